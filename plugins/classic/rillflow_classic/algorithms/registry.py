"""Registry: the algorithms that a recipe may name: every other module of this package is one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from rillflow.errors import ConfigError, nearest
from rillflow_classic.algorithm import ClassicAlgorithm

ALGORITHMS = {
    each.name: f"rillflow_classic.algorithms.{each.name}"
    for each in iter_modules([str(Path(__file__).parent)])
    if each.name != "registry"
}
"""Module of every algorithm by its name in ``algorithm.name``; each module has an ``ALGORITHM``."""


def algorithm_of(name: object) -> ClassicAlgorithm:
    """Return an algorithm by name; this loads torch.

    Raises:
        ConfigError: there is no such algorithm.
    """
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(
            f"algorithm.name is {name!r}",
            why=f"the algorithms are {', '.join(ALGORITHMS)}",
            fix=nearest(str(name), ALGORITHMS),
        )
    found = import_module(ALGORITHMS[name]).ALGORITHM
    assert isinstance(found, ClassicAlgorithm), f"{ALGORITHMS[name]}.ALGORITHM is no ClassicAlgorithm"
    return found

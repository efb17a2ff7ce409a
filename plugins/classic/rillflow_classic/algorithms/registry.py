"""Registry: the algorithms that a recipe may name.

"ppo" ────────────────> a module of this package
"package.mine:NAME" ──> a ClassicAlgorithm of the user's, in a module that every process can import
"""

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
    if isinstance(name, str) and ":" in name:
        return _own(name)
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(
            f"algorithm.name is {name!r}",
            why=f"the algorithms are {', '.join(ALGORITHMS)}",
            fix=nearest(str(name), ALGORITHMS),
        )
    found = import_module(ALGORITHMS[name]).ALGORITHM
    assert isinstance(found, ClassicAlgorithm), f"{ALGORITHMS[name]}.ALGORITHM is no ClassicAlgorithm"
    return found


def _own(name: str) -> ClassicAlgorithm:
    """Return the user's algorithm ``module:NAME``."""
    module, _, variable = name.partition(":")
    try:
        found = vars(import_module(module)).get(variable)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ConfigError(
            f"algorithm.name is {name!r}, and {module!r} cannot be imported",
            why=f"{type(error).__name__}: {error}",
            fix="install the module, or add its folder to PYTHONPATH",
        ) from error
    if not isinstance(found, ClassicAlgorithm):
        raise ConfigError(
            f"algorithm.name is {name!r}",
            why=f"{module} has no ClassicAlgorithm of the name {variable!r}",
            fix=f"define {variable} = ClassicAlgorithm(name=..., config=..., learner=..., plan=...)",
        )
    return found

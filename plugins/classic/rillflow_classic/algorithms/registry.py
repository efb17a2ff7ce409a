"""Registry: the algorithms that a recipe may name.

"ppo" ────────────────> a module of this package
"mine.py:NAME" ───────> a ClassicAlgorithm of the user's, in a file relative to the recipe
"package.mine:NAME" ──> the same, in a module that every process can import
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from traceback import extract_tb

from rillflow.errors import ConfigError, nearest
from rillflow_classic import own_code
from rillflow_classic.algorithm import ClassicAlgorithm

ALGORITHMS = {
    each.name: f"rillflow_classic.algorithms.{each.name}"
    for each in iter_modules([str(Path(__file__).parent)])
    if each.name != "registry"
}
"""Module of every algorithm by its name in ``algorithm.name``; each module has an ``ALGORITHM``."""


def located(name: object, base: Path) -> object:
    """Return ``algorithm.name`` with the file of an own algorithm as an absolute path, found below ``base``.

    Raises:
        ConfigError: the file is missing, or does not define the algorithm.
    """
    return own_code.located(name, base, "algorithm") if isinstance(name, str) else name


def algorithm_of(name: object) -> ClassicAlgorithm:
    """Return an algorithm by name; this loads torch.

    Args:
        name: ``algorithm.name``; one in a file as ``located`` returns it.

    Raises:
        ConfigError: there is no such algorithm.
    """
    if isinstance(name, str) and ":" in name:
        return _own(name)
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(
            f"algorithm.name is {name!r}",
            why=f"the algorithms are {', '.join(ALGORITHMS)}; an own one is written file.py:NAME",
            fix=nearest(str(name), ALGORITHMS),
        )
    found = import_module(ALGORITHMS[name]).ALGORITHM
    assert isinstance(found, ClassicAlgorithm), f"{ALGORITHMS[name]}.ALGORITHM is no ClassicAlgorithm"
    return found


def _own(name: str) -> ClassicAlgorithm:
    """Return the user's algorithm ``module:NAME`` or ``/folder/file.py:NAME``."""
    module, _, variable = name.rpartition(":")
    try:
        names = own_code.imported(module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        lines = [each.lineno for each in extract_tb(error.__traceback__) if each.filename == module]
        raise ConfigError(
            f"algorithm.name is {name!r}, and {module!r} cannot be imported",
            why=f"{type(error).__name__}: {error}" + (f", at {module}:{lines[-1]}" if lines else ""),
            fix="correct the file"
            if module.endswith(".py")
            else f"write file.py:{variable}, relative to the recipe; or install the module",
        ) from error
    found = names.get(variable)
    if not isinstance(found, ClassicAlgorithm):
        known = [each for each, value in names.items() if isinstance(value, ClassicAlgorithm)]
        raise ConfigError(
            f"algorithm.name is {name!r}",
            why=f"{module} has no ClassicAlgorithm of the name {variable!r}",
            fix=nearest(variable, known)
            if known
            else f"define {variable} = ClassicAlgorithm(name=..., config=..., learner=..., plan=...)",
        )
    return found

"""Own code: the user's class or algorithm in a file or a module, named by a recipe.

"mine.py:NAME" ── located ──> "/folder/mine.py:NAME" ── imported ──> the names of the file
"package:NAME" ────────────────────────────────────── imported ──> the names of the module
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from rillflow.errors import ConfigError, RewardError
from rillflow.rewards.function import parse_function

ENDING = ".py"
"""Ending of the name of a file."""


def located(name: str, base: Path, kind: str) -> str:
    """Return ``file.py:NAME`` with the file's absolute path, found below a folder; or another name as it is.

    Args:
        name: what the recipe names.
        base: folder of the recipe.
        kind: what is named, for errors.

    Raises:
        ConfigError: the file is missing, or does not define the name.
    """
    if f"{ENDING}:" not in name:
        return name
    try:
        path = parse_function(name, base, kind)
    except RewardError as error:
        raise ConfigError(error.what, why=error.why, fix=error.fix) from None
    return f"{path.file}:{path.name}"


def imported(module: str) -> dict[str, Any]:
    """Return the names of a module, or of a file, which is imported once and may import its neighbours.

    Raises:
        Exception: whatever the user's code raises; also SystemExit.
    """
    if not module.endswith(ENDING):
        return vars(import_module(module))
    if module not in sys.modules:
        if (folder := str(Path(module).parent)) not in sys.path:
            sys.path.insert(0, folder)  # for its neighbours, also at a later call
        spec = spec_from_file_location(module, module)
        assert spec is not None and spec.loader is not None
        sys.modules[module] = loaded = module_from_spec(spec)
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[module]
            raise
    return vars(sys.modules[module])

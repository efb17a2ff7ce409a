"""Text execution: find where a function's source runs text or starts processes, by parsing it.

    function ── its file, the modules next to it that it imports ── ast ──> [TextUse(file, line, call)]
             ── reward.sandbox: auto | true | false ──────────────────────> sandboxed or not, or refused

Names are resolved through the file's imports: ``re.compile``, ``model.eval()`` and ``ast.literal_eval`` do
not count. Libraries are not parsed, so text that they evaluate internally is not found. Standard library
only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rillflow.errors import RewardError
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.sandbox import Visible

Setting = Literal["auto"] | bool
"""Type of ``reward.sandbox``."""

_BUILTINS = ("exec", "eval", "compile", "__import__")
_IN_PROCESS = re.compile(
    r"(builtins\.)?(exec|eval|compile|__import__)|runpy\.run_\w+|code\.(Interactive\w+|interact|compile_command)"
    r"|codeop\.\w+|importlib\.import_module|importlib\.util\.spec_from_file_location"
    r"|importlib\.machinery\.SourceFileLoader"
)
_STARTS = re.compile(
    r"subprocess\.(run|Popen|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|os\.(system|popen|exec\w+|spawn\w+|posix_spawnp?|fork|forkpty)"
    r"|asyncio\.(subprocess\.)?create_subprocess_(exec|shell)"
    r"|multiprocessing\.(\w+\.)?(Process|Pool|Manager|get_context)"
    r"|concurrent\.futures\.(process\.)?ProcessPoolExecutor"
    r"|pty\.(spawn|fork)|ctypes\.\w+|_ctypes\.\w+|_posixsubprocess\.\w+"
    r"|rillflow\.rewards\.(programs\.)?run_python"
)


@dataclass(frozen=True, kw_only=True)
class TextUse:
    """One call that runs text, or starts a process that may.

    Example:
        TextUse(file=Path("/home/me/reward.py"), line=12, call="subprocess.run", is_in_process=False)
    """

    file: Path
    """The file."""
    line: int
    """Line number, from 1."""
    call: str
    """Full name of the called function."""
    is_in_process: bool
    """Whether the text would run in the process that computes the score."""

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line} {self.call}"


def text_uses(function: FunctionPath) -> list[TextUse]:
    """Return where a function's file, or an imported module next to it, runs text."""
    found: list[TextUse] = []
    for file, tree in _sources(function):
        found += _uses(file, tree)
    return found


def visible_to(function: FunctionPath) -> Visible:
    """Return the user's files that a sandbox shows: the function's, modules next to it, listed files."""
    return Visible(
        folder="" if function.text else str(function.file.parent),
        copies=[str(file) for file, _ in _sources(function) if file.is_file()],
        shown=[str(file) for file in function.files],
    )


def is_shut_in(function: FunctionPath, setting: Setting) -> bool:
    """Return whether a function runs in the sandbox.

    Args:
        function: the function.
        setting: ``reward.sandbox`` or ``rollout.agent.sandbox``.

    Raises:
        RewardError: under ``auto``, the function runs text in its own process.
    """
    if function.address:
        return False
    if setting != "auto":
        return setting
    uses = text_uses(function)
    for use in uses:
        if use.is_in_process:
            raise RewardError(
                f"{function} executes text in its own process: {use.call} in {use.file}, line {use.line}",
                why="text that runs in the scoring process can set its own score, even in a sandbox",
                fix="run it with run_python of rillflow.rewards.programs and compare its output, or "
                "check its syntax with ast.parse; sandbox = false allows an answer to set its own reward",
            )
    return bool(uses)


def _sources(function: FunctionPath) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the parsed trees of the function's file and of imported modules next to it, once each."""
    folder, seen = function.file.parent, {function.file}
    waiting = [function.file]
    while waiting:
        file = waiting.pop(0)
        try:
            text = function.text.encode() if function.text and file == function.file else file.read_bytes()
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            continue  # loading it will report the problem
        yield file, tree
        for name in _imported(tree):
            for beside in _beside(folder, name):
                if beside not in seen:
                    seen.add(beside)
                    waiting.append(beside)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the first parts of the modules that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0]


def _beside(folder: Path, name: str) -> list[Path]:
    """Return the files of a module in a folder: one, or all of a package."""
    if (folder / f"{name}.py").is_file():
        return [folder / f"{name}.py"]
    if (folder / name / "__init__.py").is_file():
        return sorted((folder / name).rglob("*.py"))
    return []


def _uses(file: Path, tree: ast.Module) -> Iterator[TextUse]:
    names = _meanings(tree)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    constant = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
    }
    for node in ast.walk(tree):
        if id(node) in inner or not isinstance(node, ast.Name | ast.Attribute):
            continue
        if not isinstance(node.ctx, ast.Load):
            continue
        call = _full_name(node, names)
        is_in_process = _IN_PROCESS.fullmatch(call) is not None
        if (is_in_process and id(node) not in constant) or _STARTS.fullmatch(call):
            yield TextUse(file=file, line=node.lineno, call=call, is_in_process=is_in_process)


def _meanings(tree: ast.Module) -> dict[str, str]:
    """Return the meaning of a file's names: imports, and builtins that it does not redefine."""
    names = {name: name for name in _BUILTINS}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.pop(node.name, None) if node in tree.body else None
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    """Return a dotted name with its first part resolved; empty for any other expression."""
    parts: Sequence[str] = ()
    while isinstance(node, ast.Attribute):
        parts, node = (node.attr, *parts), node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    return ".".join((names[node.id], *parts))

"""Text execution: decide whether a function runs in the sandbox, by parsing its source.

    function ── its file, the user's modules that it imports ─┬─> [Doubt]    not known to be harmless
                                                              └─> [TextUse]  runs text or starts processes
             ── reward.sandbox: auto | true | false ──────────────> SandboxDecision, or refused

Under ``auto`` a reward is shut in unless its source is known to be harmless (``harmless_source``). An agent
or an environment is shut in if its source is recognised to run text or start processes. Names are resolved
through the file's imports: ``re.compile``, ``model.eval()`` and ``ast.literal_eval`` are not recognised.
Standard library only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rillflow.errors import RewardError
from rillflow.isolation.sandbox import Visible, installed_folders
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.harmless_source import Doubt, doubts
from rillflow.rewards.own_modules import own_sources

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

_STARRED = {
    "subprocess": ("run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"),
    "os": ("system", "popen", "execv", "execve", "spawnv", "spawnl", "posix_spawn", "fork", "forkpty"),
    "builtins": _BUILTINS,
    "multiprocessing": ("Process", "Pool", "Manager", "get_context"),
    "pty": ("spawn", "fork"),
    "ctypes": ("CDLL", "PyDLL", "pythonapi", "cdll"),
    "runpy": ("run_path", "run_module"),
    "rillflow.rewards.programs": ("run_python",),
}
"""Names of a module that a star import binds."""


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


@dataclass(frozen=True, kw_only=True)
class SandboxDecision:
    """Whether a function runs in the sandbox, and why."""

    is_shut_in: bool
    """Whether it runs in the sandbox."""
    uses: Sequence[TextUse] = ()
    """Places that run text or start processes."""
    doubts: Sequence[Doubt] = ()
    """Places because of which its source is not known to be harmless."""


def text_uses(function: FunctionPath) -> list[TextUse]:
    """Return where a function's file, or a module of the user that it imports, runs text."""
    return [use for source in own_sources(function) for use in _uses(source.file, source.tree)]


def visible_to(function: FunctionPath) -> Visible:
    """Return the files that a sandbox shows: the function's, its own modules, listed files, packages."""
    return Visible(
        folder="" if function.text else str(function.file.parent),
        copies=[str(file) for file in dict.fromkeys(_copied(function)) if file.is_file()],
        shown=[str(file) for file in function.files],
        packages=installed_folders(),
    )


def _copied(function: FunctionPath) -> Iterator[Path]:
    """Yield the user's files that a function loads, with all files of their packages."""
    for source in own_sources(function):
        yield source.file
        if source.file.name == "__init__.py":
            yield from sorted(source.file.parent.rglob("*.py"))


def is_shut_in(function: FunctionPath, setting: Setting, *, unless_harmless: bool) -> bool:
    """Return whether a function runs in the sandbox; see ``decide``."""
    return decide(function, setting, unless_harmless=unless_harmless).is_shut_in


def decide(function: FunctionPath, setting: Setting, *, unless_harmless: bool) -> SandboxDecision:
    """Decide whether a function runs in the sandbox.

    Args:
        function: the function.
        setting: ``reward.sandbox``, or the same setting of what writes the rows.
        unless_harmless: ``auto`` shuts the function in unless its source is known to be harmless, as for a
            reward; else only if it is recognised to run text or start processes.

    Raises:
        RewardError: under ``auto``, the function runs text in its own process.
    """
    if function.address:
        return SandboxDecision(is_shut_in=False)
    uses, unproven = text_uses(function), doubts(function)
    if setting != "auto":
        return SandboxDecision(is_shut_in=setting, uses=uses, doubts=unproven)
    for use in uses:
        if use.is_in_process:
            raise RewardError(
                f"{function} executes text in its own process: {use.call} in {use.file}, line {use.line}",
                why="text that runs in the scoring process can set its own score, even in a sandbox",
                fix="run it with run_python of rillflow.rewards.programs and compare its output, or "
                "check its syntax with ast.parse; sandbox = false allows an answer to set its own reward",
            )
    return SandboxDecision(
        is_shut_in=bool(uses) or (unless_harmless and bool(unproven)), uses=uses, doubts=unproven
    )


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
                if alias.name == "*":
                    names |= {name: f"{node.module}.{name}" for name in _STARRED.get(node.module or "", ())}
                    continue
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

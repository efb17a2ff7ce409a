"""Imported code: find the files that a function, a class or a module reads, without running any of them.

    function, engine, algorithm ─ ast ─ imports ─┬─ the user's modules ──> their files, and their own imports
                                                 ├─ installed packages ──> their files, and versions of what
                                                 │                         they require
                                                 └─ texts ──> files of that name beside the code, variables

A name is looked up as in a reward's child: first beside the file, then along ``sys.path``. Modules of
Rillflow and of Python are left out; their versions are compared elsewhere (``workers.nodes``). An import
whose name is computed cannot be found.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

import rillflow
from rillflow.rewards.syntax import parsed
from rillflow.runs import layout

_LEFT_OUT = frozenset({"rillflow", "__main__", "__future__", *sys.stdlib_module_names})
COMPARED = frozenset(
    {"torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "vllm", "ray"}
)
"""Packages whose versions are compared for every rank; builds of one version differ by device."""
_INVALIDATING = Lock()
"""Held while Python's caches of folders are emptied: two threads of ranks that do it at once would fail."""
_BUILT = ("__config__.py", "version.py", "_version.py")
"""Files that a package's build writes."""
_SKIPPED = ("__pycache__", ".git", "node_modules", "site-packages")
_MOST_FILES = 5000
"""Largest number of files of a package, or of a folder with code, that are looked at."""
_DEPTH = 3
"""Levels of folders beside code in which a file is looked for that the code names."""
_DEEPEST = 20
"""Deepest level of a package; a link may lead to a folder above it."""
_LONG = 256
"""Length of a string that is no name."""
_IMPORTING = ("import_module", "__import__", "run_module", "find_spec")
_OF_FILES = ("Path", "open", "join", "joinpath", "glob", "rglob", "listdir", "scandir", "files", "load")
_OWN = str(Path(rillflow.__file__).parent)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Root:
    """Code that ranks run: a file, a source text or a module.

    Example:
        Root(what="reward.py:exact", file="/home/me/reward.py")
    """

    what: str
    """Name in messages."""
    file: str = ""
    """Absolute path of its file; for a text, a path in the folder where it runs."""
    text: str = ""
    """Source that travels to the ranks, instead of a file."""
    module: str = ""
    """Name of its module, instead of a file."""


@dataclass(kw_only=True)
class Code:
    """What was found of some roots; files by the name that is the same on every node."""

    files: dict[str, str] = field(default_factory=dict)
    """Path of every module, and of every file that code names; empty for a module that is not there."""
    versions: dict[str, str] = field(default_factory=dict)
    """Version of every distribution that imported packages require."""
    readers: dict[str, str] = field(default_factory=dict)
    """File or root that imports or names each entry of ``files``."""
    texts: dict[str, str] = field(default_factory=dict)
    """Strings in the user's own code, with the file that has each."""


def code_of(roots: Sequence[Root]) -> Code:
    """Return the code that roots load on this node, for its ``sys.path``."""
    return _Search().of(roots)


class _Search:
    """A search from roots through their imports."""

    def __init__(self) -> None:
        self._code = Code()
        self._seen: set[tuple[str, str]] = set()
        self._waiting: list[tuple[str, str]] = []
        self._installed = _installed_folders()

    def of(self, roots: Sequence[Root]) -> Code:
        """Return what the roots load."""
        for root in roots:
            folder = str(Path(root.file).parent) if root.file else ""
            if root.module:
                self._import(root.module, folder, root.what)
            elif root.text:
                self._read(root.text.encode(), root.file, folder, root.what)
            elif not root.file.startswith(_OWN):
                self._add(f"file {root.file}", root.file, root.what)
                self._waiting.append((root.file, folder))
        while self._waiting:
            file, folder = self._waiting.pop()
            with suppress(OSError):  # the comparison of the file names the problem
                self._read(Path(file).read_bytes(), file, folder, Path(file).name)
        return self._code

    def _add(self, name: str, path: str, reader: str) -> None:
        self._code.files.setdefault(name, path)
        self._code.readers.setdefault(name, reader)

    def _read(self, content: bytes, file: str, folder: str, reader: str) -> None:
        """Look at one source: its imports, the files it names, its texts."""
        try:
            tree = parsed(content)
        except (SyntaxError, ValueError, RecursionError):
            return
        for name in _imports(tree):
            self._import(name, folder, reader)
        texts = set(_texts(ast.walk(tree)))
        for text in texts:
            self._code.texts.setdefault(text, reader)
        places = {folder, str(Path(file).parent)} - {""}
        for path in _named_files(places, texts, set(_path_texts(tree))):
            self._add(f"file {path}", path, reader)

    def _import(self, name: str, folder: str, reader: str) -> None:
        """Find a module and the packages around it; its own imports follow."""
        top = name.partition(".")[0]
        if top in _LEFT_OUT or (folder, name) in self._seen:
            return
        self._seen.add((folder, name))
        spec = _top_spec(top, folder)
        if spec is None:
            self._add(f"module {top}", "", reader)
            return
        origin = _origin(spec)
        if self._is_installed(origin or next(iter(spec.submodule_search_locations or ()), "")):
            self._add_package(top, spec, reader)
            return
        self._add_module(top, spec, folder, reader)
        if spec.submodule_search_locations is not None:
            self._add_own_package(top, list(spec.submodule_search_locations), folder, reader)

    def _add_module(self, name: str, spec: ModuleSpec, folder: str, reader: str) -> None:
        path = _origin(spec)
        if path and f"module {name}" not in self._code.files:
            self._add(f"module {name}", path, reader)
            if path.endswith(".py"):
                self._waiting.append((path, folder))

    def _add_own_package(self, name: str, places: Sequence[str], folder: str, reader: str) -> None:
        """Add all modules of a package of the user's: a package may import its parts by computed names."""
        for place in places:
            for path in _files_below(place, (".py", ".so", ".pyd")):
                inner = Path(path).relative_to(place)
                dotted = ".".join([name, *inner.with_suffix("").parts]).removesuffix(".__init__")
                if f"module {dotted}" not in self._code.files:
                    self._add(f"module {dotted}", path, reader)
                    if path.endswith(".py"):
                        self._waiting.append((path, folder))

    def _add_package(self, name: str, spec: ModuleSpec, reader: str) -> None:
        """Add an installed package: its files, and the versions of what it requires."""
        self._code.versions |= _versions_of(name)
        if name in COMPARED:
            return
        places = list(spec.submodule_search_locations or ())
        if not places and (path := _origin(spec)):
            self._add(f"module {name}", path, reader)
        for place in places:
            for path in _files_below(place, (".py",)):
                if not path.endswith(_BUILT):
                    self._add(f"file {name}/{Path(path).relative_to(place)} of package {name}", path, reader)

    def _is_installed(self, path: str) -> bool:
        return path.startswith(self._installed)


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a source may import by absolute names, also by ``import_module("name")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Call) and _called(node) in _IMPORTING:
            yield from (text for text in _texts(node.args[:1]) if not text.startswith("."))


def _called(node: ast.Call) -> str:
    """Return the last part of the name of a called function."""
    called = node.func
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def _texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the short strings among nodes."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < _LONG:
            yield node.value


def _path_texts(tree: ast.Module) -> Iterator[str]:
    """Yield strings that are parts of paths: operands of ``/``, and arguments of functions of files."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield from _texts([node.left, node.right])
        elif isinstance(node, ast.Call) and _called(node) in _OF_FILES:
            yield from _texts(node.args)


def _top_spec(name: str, folder: str) -> ModuleSpec | None:
    """Return where a top-level module is: beside the code or along the path, or by the process's finders."""
    with _INVALIDATING:
        PathFinder.invalidate_caches()
    spec = PathFinder.find_spec(name, [*filter(None, [folder]), *sys.path])
    if spec is not None and spec.origin is not None:
        return spec
    try:  # a finder of an editable installation; a package without __init__.py counts last
        return find_spec(name) or spec
    except (ImportError, ValueError):  # a module of this process without a spec
        return spec


def _origin(spec: ModuleSpec) -> str:
    """Return the file of a module, or the archive that it is in; empty for a namespace and for built-ins."""
    path = spec.origin or ""
    if not spec.has_location or not path:
        return ""
    inside = Path(path)
    while not inside.exists() and inside.parent != inside:
        inside = inside.parent
    return str(inside) if inside.is_file() else path


def _files_below(folder: str, endings: tuple[str, ...], depth: int = 0) -> list[str]:
    """Return the files of a folder with one of these endings, sorted; at most ``depth`` levels, if given.

    Hidden folders, other packages and run directories are left out.
    """
    files: list[str] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        level = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(each for each in folders if each not in _SKIPPED and not each.startswith("."))
        folders[:] = [each for each in folders if not layout.is_run_directory(Path(place) / each)]
        if (depth and level + 1 >= depth) or level > _DEEPEST:
            folders.clear()
        files += [f"{place}/{each}" for each in names if each.endswith(endings)]
        if len(files) > _MOST_FILES:
            break
    return sorted(files)[:_MOST_FILES]


def _named_files(places: Iterable[str], texts: set[str], paths: set[str]) -> Iterator[str]:
    """Yield the files that a source names: absolute paths, and names of files beside the code.

    Args:
        places: the folders of the code.
        texts: strings of the source.
        paths: strings that are parts of paths, which may name a folder or have wildcards.
    """
    yield from (text for text in texts if text.startswith("/") and Path(text).is_file())
    names = {text.rpartition("/")[2] for text in texts}
    patterns = [re.compile(fnmatch.translate(text.rpartition("/")[2])) for text in paths if "*" in text]
    for place in places:
        for path in _files_below(place, ("",), _DEPTH):
            inner = Path(path).relative_to(place)
            is_named = inner.name in names or any(each.match(inner.name) for each in patterns)
            if (is_named or not paths.isdisjoint(inner.parts[:-1])) and Path(path).is_file():
                yield path


def _installed_folders() -> tuple[str, ...]:
    """Return the folders of installed packages and of Python's own modules."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    own = [sysconfig.get_paths()[kind] for kind in kinds]
    along = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    return tuple(f"{each}/" for each in dict.fromkeys([*own, *along]))


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """Return the distributions that provide each importable name; reads the metadata once."""
    return metadata.packages_distributions()


def _versions_of(name: str) -> dict[str, str]:
    """Return the versions of the distributions that provide a module, and of those that they require."""
    waiting, versions = list(_distributions().get(name, [name])), dict[str, str]()
    while waiting:
        key = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if key in versions:
            continue
        try:
            one = metadata.distribution(key)
        except metadata.PackageNotFoundError:
            continue
        versions[key] = one.version.split("+")[0]
        required = [each for each in one.requires or () if "extra ==" not in each]
        waiting += [match[0] for each in required if (match := _NAME.match(each))]
    return versions

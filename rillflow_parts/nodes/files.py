"""Node files: refuse nodes whose files differ from the driver's, by digest, before a rank loads any.

    recipe ─> Subject: roots of code, files, models ─┬─ listed here ────────────────┐
                                                     └─ listed on each node ────────┴─> names, paths, stats
    same names? no ──> refused        stats of one file on a shared disk? yes ──> equal
                                               └─ no ──> digests here and there, at once ──> equal | refused

A file of a shared disk costs a stat on each node. A copy is read once there and once here, by several
threads. Pairs that were equal are remembered as long as the run, so a restart does not read them again.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rillflow.errors import ModelError, RunDirectoryError
from rillflow.models.locate import base_of, locate
from rillflow.runs.environment import usable_cores
from rillflow.workers.awaited import await_replies
from rillflow.workers.backend import Backend, Node, Place, Site
from rillflow_parts.nodes.imported_code import Root, code_of

_OF_MODEL = (".json", ".safetensors", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".bin")
"""Endings of the files that a model is loaded from."""
_THREADS = 8
_LISTED = 3
"""Most differences that an error names."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Everything that ranks read from disks of their nodes, as the recipe names it."""

    roots: Sequence[Root] = ()
    """Code."""
    files: Sequence[str] = ()
    """Files and folders, as absolute paths."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Models by setting: directories, or names on the hub."""
    base: str = "."
    """The recipe's folder."""


@dataclass(frozen=True, kw_only=True)
class FileState:
    """One file of a node."""

    path: str
    """Its path there; empty if there is none."""
    problem: str = ""
    """Why it cannot be read."""
    stats: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Size, inode number, times of the last change of content and of state in ns."""
    reader: str = ""
    """Code or setting that reads it."""

    @property
    def is_usable(self) -> bool:
        """Whether it can be read."""
        return bool(self.path) and not self.problem

    def is_one_with(self, other: FileState) -> bool:
        """Return whether both are one file of a shared disk.

        Two files do not get the same inode number and the same ns by chance. Whole seconds prove nothing: a
        file system may keep no more, or an image may set all times.
        """
        return not self.problem and self.stats == other.stats and self.stats[3] % 10**9 != 0


NOWHERE = FileState(path="")
"""State of a file whose name a node does not have."""


@dataclass(frozen=True, kw_only=True)
class NodeListing:
    """The files of a subject on one node."""

    files: Mapping[str, FileState]
    """Files by a name that is the same on all nodes."""
    versions: Mapping[str, str]
    """Versions of distributions that the code imports or requires."""
    open: tuple[str, ...] = ()
    """Beginnings of names whose files the node would download."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Strings in the user's code, with the file of each."""


Known = set[tuple[str, FileState, FileState]]
"""Pairs of a driver's file and a node's that were equal, with the node's address."""


def require_alike(
    subject: Subject, backend: Backend, known: Known, start_s: float, load_s: float
) -> Mapping[str, str]:
    """Refuse a node with other files; return the strings in the user's code, with the file of each.

    Args:
        subject: what ranks read.
        backend: the backend with the ranks.
        known: pairs that need no comparison; new ones are added.
        start_s: longest wait for a listing in seconds.
        load_s: longest wait for the digests in seconds.

    Raises:
        RunDirectoryError: a node lacks a file, cannot read it, or has another one.
    """
    firsts = first_places(backend.nodes)
    calls = {at: backend.submit(at, _listed_here, subject)[0] for at in firsts}
    here = listing_of(subject)
    there = await_replies("listing its files", calls, backend, start_s)
    for at, node in firsts.items():
        _refuse(node, other_names(here, there[at]))
    pairs = {at: unproven(here, there[at]) for at in firsts}
    fresh = {
        at: {name: pair for name, pair in found.items() if (firsts[at].address, *pair) not in known}
        for at, found in pairs.items()
    }
    reading = {
        at: backend.submit(at, _digests_here, sorted({theirs.path for _, theirs in found.values()}))[0]
        for at, found in fresh.items()
        if found
    }
    own = digests_of(sorted({mine.path for found in fresh.values() for mine, _ in found.values()}))
    for at, digests in await_replies("reading its files", reading, backend, load_s).items():
        _refuse(firsts[at], other_bytes(fresh[at], own, digests))
        known |= {(firsts[at].address, *pair) for pair in fresh[at].values()}
    return here.texts


def first_places(nodes: Mapping[Place, Node]) -> dict[Place, Node]:
    """Return one rank of every node."""
    firsts: dict[str, Place] = {}
    for at, node in nodes.items():
        firsts.setdefault(node.address, at)
    return {at: nodes[at] for at in firsts.values()}


def other_names(here: NodeListing, there: NodeListing) -> list[str]:
    """Return how the names, the readable files and the versions of a node differ from this machine's."""
    problems = []
    for name in sorted({*here.files, *there.files}):
        mine, theirs = here.files.get(name, NOWHERE), there.files.get(name, NOWHERE)
        if theirs is NOWHERE and name.startswith(there.open):
            continue
        if theirs.is_usable and not mine.is_usable:
            problems.append(f"it has {theirs.path} ({name}), and this machine does not")
        elif mine.is_usable and not theirs.is_usable:
            problems.append(_lack(name, mine, theirs))
    problems += [
        f"it has {name} {there.versions[name]}, and this machine {here.versions[name]}"
        for name in sorted(here.versions.keys() & there.versions.keys())
        if here.versions[name] != there.versions[name]
    ]
    return problems


def unproven(here: NodeListing, there: NodeListing) -> dict[str, tuple[FileState, FileState]]:
    """Return the files of this machine and of a node that may differ, by name; their stats prove nothing."""
    return {
        name: (here.files[name], theirs)
        for name, theirs in there.files.items()
        if name in here.files and theirs.is_usable and not theirs.is_one_with(here.files[name])
    }


def other_bytes(
    pairs: Mapping[str, tuple[FileState, FileState]], own: Mapping[str, str], digests: Mapping[str, str]
) -> list[str]:
    """Return how the bytes of a node's files differ from this machine's, given digests by path."""
    return [
        _difference(name, mine, theirs, own[mine.path], digests[theirs.path])
        for name, (mine, theirs) in pairs.items()
        if own[mine.path] != digests[theirs.path] or own[mine.path].startswith(_ERROR)
    ]


def _lack(name: str, mine: FileState, theirs: FileState) -> str:
    read = f", which {mine.reader} reads" if mine.reader else ""
    if theirs.problem:
        return f"it cannot read {theirs.path}{read}: {theirs.problem}"
    if name.startswith("module "):
        return f"it has no {name}{read.replace('reads', 'imports')}: {mine.path} here"
    return f"it does not see {mine.path}{read}"


def _difference(name: str, mine: FileState, theirs: FileState, own: str, other: str) -> str:
    """Return how two files differ."""
    if other.startswith(_ERROR) or own.startswith(_ERROR):
        return f"{theirs.path} cannot be read: {(other if other.startswith(_ERROR) else own)[len(_ERROR) :]}"
    where = mine.path if mine.path == theirs.path else f"{theirs.path}, not {mine.path}"
    sizes = f"{theirs.stats[0]:,} bytes there, {mine.stats[0]:,} here, "
    sizes = sizes if theirs.stats[0] != mine.stats[0] else ""
    of = f" ({name})" if not name.startswith("file /") else ""
    return f"it has another {where}{of}: {sizes}SHA-256 {other[:12]} there, {own[:12]} here"


def _refuse(node: Node, problems: Sequence[str]) -> None:
    """Raise RunDirectoryError if there are problems."""
    if problems:
        more = f"; and {len(problems) - _LISTED} more differences" if len(problems) > _LISTED else ""
        raise RunDirectoryError(
            f"node {node.address} has other files than this machine: {'; '.join(problems[:_LISTED])}{more}",
            why="all ranks must run the same code on the same weights, or results are wrong without an error",
            fix="copy the files to the same paths of every node, or put them on a disk that all nodes share",
        )


def listing_of(subject: Subject) -> NodeListing:
    """Return the files of a subject on this node."""
    code, files, waiting = code_of(subject.roots), dict[str, FileState](), list[str]()
    for name, path in code.files.items():
        files[name] = state_of(path, code.readers[name])
    for given in subject.files:
        below = sorted(_below(Path(given))) if Path(given).is_dir() else [given]
        files |= {f"file {path}": state_of(path, "the recipe") for path in below}
    for setting, source in subject.models.items():
        try:
            files |= {name: state_of(path, setting) for name, path in _model_files(setting, source, subject)}
        except ModelError as error:
            files[f"{setting} {source}"] = FileState(
                path=source, problem=error.why or error.what, reader=setting
            )
        if not any(name.startswith(f"{setting} ") for name in files):
            waiting.append(f"{setting} ")
    return NodeListing(files=files, versions=code.versions, open=tuple(waiting), texts=code.texts)


def _model_files(setting: str, source: str, subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield names and paths of a model's files, and of its base's; nothing of a model to download."""
    found = locate(source, Path(subject.base))
    base = base_of(found) if Path(found).is_dir() else found
    for each, name in {base: f"{setting} base", found: setting}.items():
        directory = Path(each)
        if not directory.is_dir():
            from huggingface_hub import try_to_load_from_cache

            kept = try_to_load_from_cache(each, "config.json")
            if not isinstance(kept, str):
                continue
            directory = Path(kept).parent
        for path in _below(directory):
            if path.endswith(_OF_MODEL):
                yield f"{name} {Path(path).relative_to(directory)}", path


def _below(folder: Path) -> Iterator[str]:
    """Yield the files of a folder, without hidden ones."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each != "__pycache__")
        yield from (f"{place}/{each}" for each in sorted(names) if not each.startswith("."))


def state_of(path: str, reader: str = "") -> FileState:
    """Return the state of a file; links are followed."""
    if not path:
        return FileState(path="", reader=reader)
    try:
        found = Path(path).stat()
    except OSError as error:
        return FileState(path=path, problem=error.strerror or str(error), reader=reader)
    problem = "" if stat.S_ISREG(found.st_mode) else "it is no regular file"
    problem = problem if problem or os.access(path, os.R_OK) else os.strerror(13)
    stats = (found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
    return FileState(path=path, problem=problem, stats=stats, reader=reader)


_ERROR = "error: "
"""Beginning of a digest that could not be computed."""


def digests_of(paths: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of files, read by several threads."""
    there = list(paths)
    with ThreadPoolExecutor(max(1, min(_THREADS, int(usable_cores()), len(there)))) as threads:
        return dict(zip(there, threads.map(_digest, there), strict=True))


def _digest(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{_ERROR}{error.strerror}"


def _listed_here(site: Site, subject: Subject) -> NodeListing:
    del site
    listing = listing_of(subject)
    return NodeListing(files=listing.files, versions=listing.versions, open=listing.open)


def _digests_here(site: Site, paths: Sequence[str]) -> dict[str, str]:
    del site
    return digests_of(paths)

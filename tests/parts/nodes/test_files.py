"""Files of nodes: code, models and data that ranks read, listed and compared without a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
from pathlib import Path
from threading import Lock

import pytest

from rillflow.workers.backend import Node, Place, Pool
from rillflow.workers.inline import InlineBackend
from rillflow_parts.nodes.files import (
    FileState,
    NodeListing,
    Subject,
    digests_of,
    listing_of,
    other_bytes,
    other_names,
    require_alike,
    state_of,
    unproven,
)
from rillflow_parts.nodes.imported_code import Root, code_of

REWARD = """
import importlib
from pathlib import Path
import beside
from package import inner
from plain.deep import DEEP
import os.path, rillflow.errors
late = importlib.import_module("late")
WORDS = (Path(__file__).parent / "tables" / "words.txt").read_text()
ALL = [each.read_text() for each in Path(__file__).parent.glob("*.tsv")]
def score(prompts, completions, **columns): ...
"""
FILES = {
    "reward.py": REWARD,
    "beside.py": "import below\n",
    "below.py": "X = 1\n",
    "late.py": "X = 1\n",
    "package/__init__.py": "",
    "package/inner.py": "from .part import X\n",
    "package/part.py": "X = 1\n",
    "plain/deep.py": "DEEP = 1\n",
    "tables/words.txt": "a\n",
    "one.tsv": "1\n",
    "model/config.json": "{}\n",
    "model/model.safetensors": "12345678",
    "model/README.md": "hello\n",
    "unrelated.py": "X = 1\n",
    "unrelated.txt": "a\n",
    "runs/one/run.lock": "",
}
READ = [name for name in FILES if "unrelated" not in name and "README" not in name and "runs" not in name]


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    """Return everything that ranks would read of a recipe in a folder."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    root = Root(what="reward.py:score", file=str(tmp_path / "reward.py"))
    return Subject(roots=[root], models={"policy.model.path": "model"}, base=str(tmp_path))


def problems(subject: Subject, change: Callable[[], object]) -> list[str]:
    """Return how files differ from those before a change, as if a node had them."""
    here = listing_of(subject)
    own = digests_of({state.path for state in here.files.values() if state.is_usable})
    change()
    there = listing_of(subject)
    digests = digests_of({state.path for state in there.files.values() if state.is_usable})
    return other_names(here, there) or other_bytes(unproven(here, there), own, digests)


def test_every_file_that_code_reads_is_found_by_its_source(subject: Subject, tmp_path: Path) -> None:
    paths = {state.path for state in listing_of(subject).files.values()}
    assert paths == {str(tmp_path / name) for name in READ}


@pytest.mark.parametrize("name", READ)
def test_one_other_byte_of_any_file_is_a_difference(subject: Subject, tmp_path: Path, name: str) -> None:
    file = tmp_path / name

    def change() -> None:
        content = bytearray(file.read_bytes() or b"\n")
        content[-1:] = b" "
        stats = file.stat()
        file.write_bytes(content)
        os.utime(file, ns=(stats.st_atime_ns, stats.st_mtime_ns))  # as a copy that keeps times has them

    (problem,) = problems(subject, change)
    assert problem.startswith(f"it has another {file}") and "SHA-256" in problem


@pytest.mark.parametrize("name", [name for name in READ if name != "package/__init__.py"])
def test_a_file_that_is_not_there_is_a_difference(subject: Subject, tmp_path: Path, name: str) -> None:
    assert any(
        name.rpartition("/")[2].partition(".")[0] in each
        for each in problems(subject, (tmp_path / name).unlink)
    )


def test_files_that_no_rank_reads_may_differ(subject: Subject, tmp_path: Path) -> None:
    def change() -> None:
        for name in FILES.keys() - {*READ}:
            (tmp_path / name).write_text("other")

    assert problems(subject, change) == []


def test_a_module_that_a_node_finds_first_is_a_difference(subject: Subject, tmp_path: Path) -> None:
    inside = tmp_path / "below"
    said = problems(subject, lambda: (inside.mkdir(), (inside / "__init__.py").write_text("X = 2\n")))
    assert said and f"{inside}/__init__.py, not {tmp_path}/below.py" in said[0]


def test_a_link_to_another_model_is_a_difference(subject: Subject, tmp_path: Path) -> None:
    model, first, other = tmp_path / "model", tmp_path / "first", tmp_path / "other"
    model.rename(first)
    model.symlink_to(first)
    other.mkdir()
    for file in first.iterdir():
        (other / file.name).write_text(file.read_text().replace("5", "6"))

    def change() -> None:
        model.unlink()
        model.symlink_to(other)

    (problem,) = problems(subject, change)
    assert f"{other}/model.safetensors, not {first}/model.safetensors (policy.model.path" in problem


def test_a_file_that_cannot_be_read_is_named_with_the_reason(subject: Subject, tmp_path: Path) -> None:
    def change() -> None:
        (tmp_path / "tables/words.txt").unlink()
        (tmp_path / "tables/words.txt").mkdir()

    (problem,) = problems(subject, change)
    assert "words.txt" in problem


def test_stats_prove_one_file_only_with_parts_of_a_second() -> None:
    one = FileState(path="/a", stats=(8, 5, 10**9 + 1, 2 * 10**9 + 3))
    assert one.is_one_with(FileState(path="/b", stats=one.stats))
    assert not one.is_one_with(FileState(path="/a", stats=(8, 5, 10**9 + 1, 2 * 10**9 + 4)))
    whole = FileState(path="/a", stats=(8, 5, 10**9, 2 * 10**9))
    assert not whole.is_one_with(whole)


def test_another_version_of_a_required_package_is_a_difference() -> None:
    here, there = (NodeListing(files={}, versions={"sympy": version}) for version in ("1.13", "1.14"))
    assert other_names(here, there) == ["it has sympy 1.14, and this machine 1.13"]


def test_a_model_that_a_node_downloads_is_compared_by_what_is_there() -> None:
    files = {"policy.model.path config.json": FileState(path="/a/config.json")}
    there = NodeListing(files={}, versions={}, open=("policy.model.path ",))
    assert other_names(NodeListing(files=files, versions={}), there) == []


def test_code_given_as_text_is_read_for_its_imports(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    text = "import beside, not_there_at_all\ndef f(): return 'BONUS'\n"
    code = code_of([Root(what="f", file=str(tmp_path / "<f>"), text=text)])
    assert code.files == {"module beside": str(tmp_path / "beside.py"), "module not_there_at_all": ""}
    assert code.texts["BONUS"] == "f"


def test_ranks_that_are_threads_list_the_files_at_once(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's caches of folders cannot be emptied by two threads at once."""
    inside = Lock()

    def invalidate() -> None:
        assert inside.acquire(blocking=False), "two threads at once"
        time.sleep(0.002)
        inside.release()

    monkeypatch.setattr(PathFinder, "invalidate_caches", invalidate)
    with ThreadPoolExecutor(4) as threads:
        listings = list(threads.map(lambda _: listing_of(subject).texts, range(8)))
    assert all(listing == listings[0] for listing in listings)


def test_nodes_with_the_same_disk_need_no_digest(subject: Subject) -> None:
    backend, known = InlineBackend(60.0), set()
    backend.open([Pool(name="main", size=2)])
    backend.nodes = {Place("main", rank): Node(address=f"10.0.0.{rank}", ahead_s=0.0) for rank in (0, 1)}
    texts = require_alike(subject, backend, known, 60.0, 60.0)
    backend.close()
    assert texts["words.txt"] == "reward.py" and known == set()


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert state_of(str(tmp_path)).problem == "it is no regular file"

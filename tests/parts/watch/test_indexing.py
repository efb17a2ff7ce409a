"""The index of rollouts: what it does when a run grows, is rewound, is damaged, or its writer dies."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rillflow.runs import layout
from rillflow_parts.watch import indexing
from rillflow_parts.watch.index import COLUMNS, Index, IndexedStep, Writer, read_step
from rillflow_parts.watch.indexing import RunIndexer
from rillflow_parts.watch.search import Query, search
from tests.parts.watch.conftest import STEPS, WrittenRun, rows_of
from tests.unit.written_rollouts import write_rollouts


def steps_of(folder: Path) -> list[int]:
    return [int(step) for step in Index(folder).blocks["step"]]


def total(folder: Path, text: str) -> int:
    return search(Index(folder), Query(text=text), 1).total


def test_new_steps_are_added_without_reading_the_old_ones(
    written: WrittenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexer, read = RunIndexer(written.path, tmp_path / "index"), list[str]()

    def noted(files: tuple[Path, ...], *more: Any) -> IndexedStep:
        read.append(files[0].name)
        return read_step(files, *more)

    monkeypatch.setattr(indexing, "read_step", noted)
    indexer.advance(60)
    assert len(read) == STEPS and steps_of(tmp_path / "index") == [1, 2, 3, 4, 5, 6]
    written.step(7)
    indexer.advance(60)
    assert len(read) == STEPS + 1 and steps_of(tmp_path / "index")[-1] == 7


def test_an_index_is_built_step_by_step(written: WrittenRun, tmp_path: Path) -> None:
    indexer = RunIndexer(written.path, tmp_path / "index")
    assert indexer.advance(-1.0) is True, "there is more to do"
    assert steps_of(tmp_path / "index") == []
    while indexer.advance(0.001):
        assert total(tmp_path / "index", "STRASSE") == 3 * len(steps_of(tmp_path / "index"))
    assert steps_of(tmp_path / "index") == [1, 2, 3, 4, 5, 6]


def test_steps_after_one_that_is_not_whole_wait_for_it(written: WrittenRun, tmp_path: Path) -> None:
    half = layout.rollout_file(written.path, 7, 1, 2)
    half.write_bytes(layout.rollout_file(written.path, 6, 1, 1).read_bytes())
    written.step(8)
    indexer = RunIndexer(written.path, tmp_path / "index")
    indexer.advance(60)
    assert steps_of(tmp_path / "index") == [1, 2, 3, 4, 5, 6]
    half.unlink()
    write_rollouts(written.path, 7, rows_of(7))
    indexer.advance(60)
    assert steps_of(tmp_path / "index") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_rewound_steps_are_indexed_again(written: WrittenRun, tmp_path: Path) -> None:
    folder, indexer = tmp_path / "index", RunIndexer(written.path, tmp_path / "index")
    indexer.advance(60)
    assert total(folder, "answer 50") == 1
    written.directory.rewind(4)
    write_rollouts(written.path, 5, [{**row, "completion": "another"} for row in rows_of(5)])
    indexer.advance(60)
    assert (total(folder, "answer 50"), total(folder, "another"), total(folder, "answer 40")) == (0, 5, 1), (
        "a call of a tool is searched as a whole"
    )
    assert steps_of(folder) == [1, 2, 3, 4, 5]


def test_a_damaged_step_is_told_and_left_out(
    written: WrittenRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = layout.rollout_file(written.path, 3, 1, 1)
    content = file.read_bytes()
    for damage in (content[:50], b"", content.replace(b'"versions:values"', b'"visions:values_"')):
        file.write_bytes(damage)
        indexer = RunIndexer(written.path, tmp_path / "index")
        with caplog.at_level(logging.WARNING):
            indexer.advance(60)
        assert "step 3" in caplog.text
        assert steps_of(tmp_path / "index") == [1, 2, 4, 5, 6]
        caplog.clear()
        written.step(7)
        indexer.advance(60)
        assert "step 3" not in caplog.text, "it is told once"
        written.directory.rewind(6)
        indexer.close()
    indexer = RunIndexer(written.path, tmp_path / "index")
    indexer.advance(60)
    file.write_bytes(content)
    written.step(7)
    indexer.advance(60)
    assert steps_of(tmp_path / "index") == [1, 2, 3, 4, 5, 6, 7], (
        "a repaired step is read again, in its place"
    )


def test_a_writer_that_died_continues_after_its_last_whole_step(written: WrittenRun, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    indexer = RunIndexer(written.path, folder)
    indexer.advance(60)
    indexer.close()
    whole = {name: (folder / f"{name}.bin").read_bytes() for name in (*COLUMNS, "text", "blocks")}
    for name in (*COLUMNS, "text", "questions"):
        with (folder / f"{name}.bin").open("ab") as file:
            file.write(b"half of a step")
    assert total(folder, "STRASSE") == 3 * STEPS, "a reader sees whole steps only"
    write_rollouts(written.path, 7, [{**row, "prompt": "New", "prompt_id": 9} for row in rows_of(7)])
    again = RunIndexer(written.path, folder)
    again.advance(60)
    assert all((folder / f"{name}.bin").read_bytes().startswith(whole[name]) for name in whole)
    assert (total(folder, "new"), total(folder, "half of a step")) == (6, 0)


def test_one_process_writes_an_index(written: WrittenRun, tmp_path: Path) -> None:
    first, second = (RunIndexer(written.path, tmp_path / "index") for _ in range(2))
    first.advance(60)
    assert second.advance(60) is False
    with pytest.raises(BlockingIOError):
        Writer(tmp_path / "index", written.path)
    first.close()
    written.step(7)
    second.advance(60)
    assert steps_of(tmp_path / "index")[-1] == 7


def test_an_index_of_another_version_is_built_again(written: WrittenRun, tmp_path: Path) -> None:
    indexer = RunIndexer(written.path, tmp_path / "index")
    indexer.advance(60)
    indexer.close()
    (tmp_path / "index" / "head.json").write_text('{"format": 0}')
    assert len(Index(tmp_path / "index")) == 0
    RunIndexer(written.path, tmp_path / "index").advance(60)
    assert len(Index(tmp_path / "index")) == 6 * STEPS

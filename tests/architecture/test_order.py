"""The first files of the everyday tests exist and run first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import LONGEST_FIRST, pytest_collection_modifyitems


def test_the_longest_files_are_there(root: Path) -> None:
    assert [file for file in LONGEST_FIRST if not (root / file).is_file()] == []
    assert len(set(LONGEST_FIRST)) == len(LONGEST_FIRST)


def test_they_come_first_and_their_tests_keep_their_order() -> None:
    names = [
        "a.py::2",
        "a.py::1",
        f"{LONGEST_FIRST[1]}::z",
        f"{LONGEST_FIRST[1]}::b",
        f"{LONGEST_FIRST[0]}::c",
    ]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [names[4], *names[2:4], *names[:2]]

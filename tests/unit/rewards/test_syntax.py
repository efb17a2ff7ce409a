"""Parsing in threads: a collection that runs Python code between them breaks no tree."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rillflow.rewards.syntax import parsed

TEXT = Path(ast.__file__).read_text()


@pytest.fixture
def switching() -> Iterator[None]:
    """Let threads alternate often, and every collection run Python code, as a profiler or hypothesis does."""

    def collected(phase: str, info: object) -> None:
        sum(range(50))

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-5)
    gc.set_threshold(50)
    gc.callbacks.append(collected)
    yield
    gc.callbacks.remove(collected)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


def test_threads_parse_at_the_same_time(switching: None) -> None:
    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(lambda _: parsed(TEXT), range(40)))
    assert {len(each.body) for each in trees} == {len(ast.parse(TEXT).body)}


def test_a_tree_that_other_code_builds_meanwhile_breaks_none(switching: None) -> None:
    def parse(index: int) -> None:
        try:
            (parsed if index % 2 else ast.parse)(TEXT)
        except SystemError:
            assert not index % 2  # CPython's own

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(parse, range(40)))


def test_wrong_source_is_refused() -> None:
    with pytest.raises(SyntaxError, match="invalid syntax"):
        parsed("def reward(:", "scores.py")

"""Environments: turns become one row sampled once; every fault ends its own row with an outcome."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rillflow.errors import RillflowError, RolloutError
from rillflow.models.language_model import LanguageModel
from rillflow.records.rollout import Finish, Rollout, starts
from rillflow.rewards.outcome import FAILED
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Engine
from rillflow.rollout.native.engine import NativeEngine
from rillflow_parts.environments.config import EnvironmentConfig
from rillflow_parts.environments.engine import EnvironmentEngine
from rillflow_parts.environments.pool import EnvironmentPool
from rillflow_parts.environments.source import ENVIRONMENT_REWARD, METRICS, TURNS, parse_environment
from tests.parts.endpoint.conftest import around, check_logprobs, check_sampled_once, columns_of, prompts

GAME = """
import asyncio
import os
import random
import time


class Game:
    open = 0

    def __init__(self, factor=1.0):
        self.factor, self.turns = factor, 0

    def reset(self, kind):
        self.kind = kind
        if kind == "chat":
            return [{"role": "user", "content": "1+1"}]
        if kind == "reset raises":
            raise KeyError("oh")
        return "" if kind == "plain" else "0="

    async def step(self, text):
        self.turns += 1
        if self.turns == 2:
            if self.kind == "raises":
                raise ValueError(text)
            if self.kind == "hangs":
                time.sleep(100)
            if self.kind == "exits":
                os._exit(3)
            if self.kind == "prints":
                os.write(1, b"x" * 20_000_000)
        if self.kind == "never ends":
            return "1", 0.5, False, False, {}
        if self.kind == "wrong type":
            return "1", 0.0
        if self.kind == "nan":
            return "1", float("nan"), False, False, {}
        if self.kind == "foreign":
            return "é", 0.0, False, False, {}
        if self.kind == "long":
            await asyncio.sleep(0.1 * random.random())
            return "1+2+" * 6, 0.0, self.turns == 3, False, {}
        over = self.turns == 3
        told = {"metrics": {"turns": self.turns}}
        return ("" if over else f"{self.turns}+"), self.factor * self.turns, over, False, told

    def close(self):
        Game.open += 1
"""
STEP = next(number for number, line in enumerate(GAME.split("\n"), 1) if "async def step" in line)
Made = Callable[..., EnvironmentEngine]


@pytest.fixture(scope="module")
def made(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("game")
    (folder / "game.py").write_text(GAME)
    with ExitStack() as stack:

        def make(
            *, deterministic: bool = True, inner: Callable[..., Engine] = NativeEngine, **settings: Any
        ) -> EnvironmentEngine:
            environment = EnvironmentConfig(source="game.py:Game", **settings)
            return EnvironmentEngine(
                model.module,
                RolloutConfig(max_tokens=24, max_rows=8, deterministic=deterministic),
                environment=environment,
                source=parse_environment(environment, folder),
                stack=stack,
                stop_tokens=model.tokenizer.stop_tokens | {*model.tokenizer.encode("0123456789")},
                **around(model, inner),
            )

        yield make


@pytest.fixture(scope="module")
def games(made: Made) -> EnvironmentEngine:
    engine = made(workers=1, timeout_s=20.0, max_turns=5)
    engine.load(4, {})
    return engine


def test_turns_are_one_row_sampled_once_and_the_same_again(
    games: EnvironmentEngine, model: LanguageModel
) -> None:
    rows = check_sampled_once(games, model, ["text", "plain", "chat", "text"])
    for place, (columns, pieces, mask) in enumerate(rows):
        assert FAILED not in columns and 3 <= sum(mask) <= 24
        said = "".join(piece for piece, is_own in zip(pieces, mask, strict=True) if not is_own)
        if columns["kind"] == "chat":
            assert said.startswith("u:1+1<|end|> a:") and "".join(pieces).count("<|end|> u:") in (1, 2)
        else:
            begin = f"{place // 2}+1=" + "0=" * (columns["kind"] == "text")
            assert begin + "1+2+" == said or sum(mask) == 24
        if columns[TURNS] == 3:
            assert columns[ENVIRONMENT_REWARD] == 6.0 and columns[METRICS] == {"turns": 3.0}


def test_a_row_continues_from_its_kv_cache_unless_the_weights_are_new(
    made: Made, model: LanguageModel
) -> None:
    engine = made(deterministic=False, workers=1)
    engine.load(1, {})
    for start in starts(prompts(model, ["text", "long", "text", "long"]), 3):
        engine.add(start)
    kept = 0
    rows: list[Rollout] = []
    while engine.has_work:
        rows += engine.step()
        kept += sum(each.row.cache is not None for each in engine._acting.values())
        if kept and engine._version == 1:
            engine.load(2, {})
            assert all(each.row.cache is None for each in engine._acting.values())
    assert kept and len(rows) == 12 and {2} < {*rows[-1].versions}
    for row in rows:
        assert row.cache is None and FAILED not in json.loads(row.columns), row.columns
        check_logprobs(model, row.tokens, row.loss_mask, row.logprobs)


def test_a_fault_ends_its_own_row_and_names_the_class_and_the_line(
    games: EnvironmentEngine, model: LanguageModel
) -> None:
    kinds = ["text", "raises", "reset raises", "wrong type", "nan", "never ends", "prints", "foreign"]
    rows = games.generate(prompts(model, kinds), samples=1)
    found = dict(zip(kinds, columns_of(rows), strict=True))
    finish = dict(zip(kinds, rows.dense("finish").tolist(), strict=True))
    for kind in ("text", "prints"):
        assert FAILED not in found[kind] and found[kind][TURNS] == 3, found[kind]
    assert found["never ends"][TURNS] == 5 and finish["never ends"] == Finish.LENGTH
    assert found["never ends"][ENVIRONMENT_REWARD] == 2.5
    for kind, why in {
        "raises": "the environment Game.step raised ValueError",
        "reset raises": "the environment Game.reset raised KeyError: 'oh' (game.py, line",
        "wrong type": f"Game.step returned ('1', 0.0) (tuple), and must return the five values "
        f"observation, reward, terminated, truncated, info (game.py, line {STEP})",
        "nan": "Game.step returned nan (float), and must return a finite number as its reward (game.py, line",
        "foreign": "the row cannot go on after what the environment said",
    }.items():
        outcome, message = found[kind][FAILED]
        assert outcome == "error" and why in message, message


def test_a_hanging_one_times_out_and_a_dead_process_fails_the_rows_that_it_holds(
    made: Made, model: LanguageModel
) -> None:
    engine = made(workers=2, timeout_s=3.0)
    begun = time.monotonic()
    rows = columns_of(engine.generate(prompts(model, ["hangs", "text", "text"]), samples=1))
    assert time.monotonic() - begun < 60, "the hanging environment sleeps for 100 s"
    assert rows[0][FAILED][0] == "timeout" and "gave no answer within 3 s" in rows[0][FAILED][1]
    assert [FAILED in row for row in rows] == [True, False, False], rows
    rows = columns_of(engine.generate(prompts(model, ["exits"]), samples=1))
    assert rows[0][FAILED][0] == "error" and "exited with status 3" in rows[0][FAILED][1]
    assert "game.py:" in rows[0][FAILED][1]
    rows = columns_of(engine.generate(prompts(model, ["text"]), samples=1))
    assert FAILED not in rows[0], "a new process takes its place"


def test_many_environments_are_open_at_once_and_rows_can_be_taken_out(
    games: EnvironmentEngine, model: LanguageModel
) -> None:
    begun = starts(prompts(model, ["text"] * 20), 1)
    for start in begun:
        games.add(start)
    for _ in range(3):
        games.step()
    assert len(games._episodes) == 20, "environments are not limited by max_rows = 8"
    out = games.abort(begun[0].row)
    assert out == begun[0]
    rest: list[Rollout] = []
    while games.has_work:
        rest += games.step()
    assert {each.row for each in rest} == {each.row for each in begun[1:]}
    again = SamplingConfig(max_tokens=2)
    games.add(out, again)
    while not (found := games.step()):
        pass
    assert sum(found[0].loss_mask) <= 2 and found[0].finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def Game(): ...", "is no class"),
        ("class Game:\n    def reset(self): ...", "has no step"),
        ("1 / 0\nclass Game: ...", "cannot be loaded: ZeroDivisionError"),
    ],
)
def test_a_class_that_is_none_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(text)
    config = EnvironmentConfig(source="game.py:Game", workers=1)
    pool = EnvironmentPool(parse_environment(config, tmp_path), config)
    with pytest.raises(RolloutError, match=r"game\.py") as caught:
        pool.load()
    assert why in str(caught.value)
    pool.close()


def test_no_module_of_the_part_hides_one_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "else").mkdir()
    for name in ("engine", "config", "source", "plugin"):
        (tmp_path / "else" / f"{name}.py").write_text("MINE = True\n")
    monkeypatch.syspath_prepend(tmp_path / "else")
    (tmp_path / "game.py").write_text(
        "from config import MINE\nfrom engine import MINE\nfrom plugin import MINE\nfrom source import MINE\n"
        "class Game:\n    def reset(self, kind): ...\n    def step(self, text): ...\n"
    )
    config = EnvironmentConfig(source="game.py:Game", workers=1)
    pool = EnvironmentPool(parse_environment(config, tmp_path), config)
    assert pool.load().required == ("kind",)
    pool.close()


@pytest.mark.parametrize("source", ["game.py", "verifiers:", "openenv:http://127.0.0.1:1", "none.py:Game"])
def test_a_source_that_is_none_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(RillflowError):
        parse_environment(EnvironmentConfig(source=source), tmp_path)


class Added(NativeEngine):
    """Notes the rows in the order in which they are added."""

    order: ClassVar[list[int]] = []

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        self.order.append(rollout.row.prompt)
        super().add(rollout, sampling)


def test_new_rows_are_sampled_first_then_those_whose_environments_take_longest(
    made: Made, model: LanguageModel
) -> None:
    engine = made(workers=1, inner=Added)
    for start in starts(prompts(model, ["text"] * 5), 1):
        engine.add(start)
    engine._begin()
    while len(engine._ready) < 5:
        engine._taken(1.0)
    for episode, mean_s in zip(engine._episodes.values(), (0.1, None, 0.3, 0.2, None), strict=True):
        if mean_s is not None:
            episode._count, episode._acted_s = 2, 2 * mean_s
    engine._feed()
    assert Added.order == [1, 4, 2, 3, 0]
    engine._clear()


SLOW = """
import time


class Slow:
    def reset(self, **columns):
        return ""

    def step(self, text):
        time.sleep(float(text))
        return text, 1.0, True, False, {}
"""


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Callable[..., EnvironmentPool]]:
    (tmp_path / "slow.py").write_text(SLOW)
    with ExitStack() as stack:

        def make(**settings: Any) -> EnvironmentPool:
            config = EnvironmentConfig(source="slow.py:Slow", **settings)
            pool = EnvironmentPool(parse_environment(config, tmp_path), config)
            stack.callback(pool.close)
            return pool

        yield make


def told(pool: EnvironmentPool, count: int) -> set[int]:
    """Return the rows of the next answers, so many."""
    found = set[int]()
    while len(found) < count:
        found |= {each.row for each in pool.turn(1.0)}
    return found


def test_512_environments_work_at_once(pools: Callable[..., EnvironmentPool]) -> None:
    """One after the other they would take 256 s."""
    pool = pools()
    rows = {pool.begin({"prompt": "1+1="}) for _ in range(512)}
    assert pool.room == 0 and told(pool, 512) == rows
    begun = time.monotonic()
    for row in rows:
        pool.step(row, "0.5", {})
    assert told(pool, 512) == rows
    assert time.monotonic() - begun < 60


def test_a_slow_environment_keeps_no_other_answer_waiting(pools: Callable[..., EnvironmentPool]) -> None:
    pool = pools(workers=1)
    rows = [pool.begin({"prompt": "1+1="}) for _ in range(4)]
    told(pool, 4)
    for row, seconds in zip(rows, ("0", "40", "0", "0"), strict=True):  # all in one frame
        pool.step(row, seconds, {})
    begun = time.monotonic()
    assert told(pool, 3) == {rows[0], *rows[2:]}
    assert time.monotonic() - begun < 30

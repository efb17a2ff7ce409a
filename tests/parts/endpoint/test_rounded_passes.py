"""The door's queue and environments with passes rounded as on CUDA: rows agree with plain passes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("starlette", reason="the door is the extra `service`")

from rillflow.models.language_model import LanguageModel
from rillflow.records.rollout import Rollout, starts
from rillflow.records.row import RowId
from rillflow.rollout.config import EnvironmentConfig, RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.serving.environments.engine import EnvironmentEngine
from rillflow.serving.environments.source import parse_environment
from rillflow_parts.endpoint.engine_queue import EngineQueue, Told, Wanted
from tests.unit.rollout.reused_rows import CountedPasses, round_passes
from tests.unit.serving.conftest import around, check_logprobs, prompts

USUAL = RolloutConfig(max_tokens=12, max_rows=20)
ADDER = """
class Adder:
    def reset(self, kind):
        self.turns, self.kind = 0, kind
        return "0123456789" * 6

    def step(self, text):
        self.turns += 1
        return "1+" * (1 + len(text) % 3), 0.0, self.turns == 4, False, {}
"""


@pytest.fixture(scope="module", autouse=True)
def sharpened(model: LanguageModel) -> None:
    """Give the fresh model's tokens different probabilities, so that other keys show."""
    with torch.no_grad():
        for weight in model.module.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)


def engine_of(model: LanguageModel) -> tuple[NativeEngine, CountedPasses]:
    settings: dict[str, Any] = {"stop_tokens": model.tokenizer.stop_tokens, "seed": 5, "workers": 1}
    engine = NativeEngine(model.module, USUAL, context=model.context, **settings)
    return engine, round_passes(engine)


def test_conversations_at_the_door(model: LanguageModel) -> None:
    """Clients come in time, continue their conversations, and leave in the middle."""
    engine, passes = engine_of(model)
    queue, chance, ended, left = EngineQueue(engine, model.tokenizer, max_rows=20), Random(3), [], set[int]()
    system = [chance.randrange(3, 16) for _ in range(66)]
    turns, number = [[*system, 3 + client] for client in range(12)] + [[3, client] for client in range(12)], 0

    def ask(tokens: list[int]) -> None:
        nonlocal number
        own = number = number + 1

        def tell(told: Told, is_over: bool) -> None:
            assert isinstance(told, Rollout) and is_over
            ended.append(told)
            turns.append([*told.tokens, chance.randrange(3, 16)])

        queue.put(
            Wanted(
                begin=Rollout.start(RowId(0, own, 0), tokens),
                sampling=USUAL.model_copy(update={"max_tokens": chance.choice([2, 5, 9])}),
                stops=(),
                is_streamed=False,
                tell=tell,
                is_left=lambda: own in left,
            )
        )

    while number < 120:
        if turns and chance.random() < 0.6:
            tokens = turns.pop(chance.randrange(len(turns)))
            ask(tokens if len(tokens) < model.context - 12 else system[: chance.randint(1, 66)])
        if chance.random() < 0.05:
            left.add(number)
            queue.wake()
        queue.turn()
    while queue.turn():
        pass
    queue.close()
    assert passes.padded > 50 and len(ended) > 80
    for row in ended:
        check_logprobs(model, row.tokens, row.loss_mask, row.logprobs)


def test_turns_with_environments(model: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "adder.py").write_text(ADDER)
    environment = EnvironmentConfig(source="adder.py:Adder", max_turns=4, workers=1)
    config = USUAL.model_copy(update={"max_tokens": 40})
    with ExitStack() as stack:
        engine = EnvironmentEngine(
            model.module,
            config,
            environment=environment,
            source=parse_environment(environment, tmp_path),
            stack=stack,
            stop_tokens=model.tokenizer.stop_tokens | {*model.tokenizer.encode("01234")},
            **around(model),
        )
        assert isinstance(engine._inner, NativeEngine)
        passes, rows = round_passes(engine._inner), list[Rollout]()
        (worker,) = engine._inner._workers
        worker._kept = lambda *_: None  # type: ignore[assignment,method-assign]  # as on CUDA
        for start in starts(prompts(model, ["text"] * 6), 4):
            engine.add(start)
        while engine.has_work:
            rows += engine.step()
    assert len(rows) == 24 and passes.padded > 0
    for row in rows:
        check_logprobs(model, row.tokens, row.loss_mask, row.logprobs)

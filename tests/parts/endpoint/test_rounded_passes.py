"""The door's queue and environments with passes rounded as on CUDA: rows agree with plain passes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the door is the extra `service`")

from rillflow.models.language_model import LanguageModel
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow_parts.endpoint.engine_queue import EngineQueue, Told, Wanted
from tests.parts.endpoint.conftest import check_logprobs, sharpen
from tests.unit.rollout.reused_rows import CountedPasses, round_passes

USUAL = RolloutConfig(max_tokens=12, max_rows=20)


@pytest.fixture(scope="module", autouse=True)
def sharpened(model: LanguageModel) -> None:
    sharpen(model)


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

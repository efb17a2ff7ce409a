"""Environments with passes rounded as on CUDA: rows agree with plain passes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rillflow.models.language_model import LanguageModel
from rillflow.records.rollout import Rollout, starts
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow_parts.environments.config import EnvironmentConfig
from rillflow_parts.environments.engine import EnvironmentEngine
from rillflow_parts.environments.source import parse_environment
from tests.parts.endpoint.conftest import around, check_logprobs, prompts, sharpen
from tests.unit.rollout.reused_rows import round_passes

ADDER = """
class Adder:
    def reset(self, kind):
        self.turns, self.kind = 0, kind
        return "0123456789" * 6

    def step(self, text):
        self.turns += 1
        return "1+" * (1 + len(text) % 3), 0.0, self.turns == 4, False, {}
"""


def test_turns_with_environments(model: LanguageModel, tmp_path: Path) -> None:
    sharpen(model)
    (tmp_path / "adder.py").write_text(ADDER)
    environment = EnvironmentConfig(source="adder.py:Adder", max_turns=4, workers=1)
    with ExitStack() as stack:
        engine = EnvironmentEngine(
            model.module,
            RolloutConfig(max_tokens=40, max_rows=20),
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

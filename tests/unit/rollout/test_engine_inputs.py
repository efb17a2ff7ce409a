"""Invalid generation inputs are reported with their value before anything runs; the engine stays usable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rillflow.errors import RecordError, RolloutError
from rillflow.records.batch import Batch
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.engine import RowByRow
from rillflow.rollout.native.engine import NativeEngine

Build = Callable[..., nn.Module]
Engines = Callable[..., NativeEngine]
Prompts = Callable[..., Batch]


def test_an_empty_prompt_is_named(engine: Engines, prompts: Prompts) -> None:
    used = engine()
    with pytest.raises(RolloutError, match=r"epoch 0 prompt 1 sample 0\) has an empty prompt"):
        used.generate(prompts([1, 2], [], [3]))
    assert len(used.generate(prompts([1, 2]))) == 1


@pytest.mark.parametrize("length", [10, 11, 300])
def test_a_prompt_without_room_for_an_answer_is_named(length: int, engine: Engines, prompts: Prompts) -> None:
    with pytest.raises(RolloutError, match=rf"prompt 1 sample 0\) has {length} tokens(.|\n)*context is 10 "):
        engine(context=10).generate(prompts(3, length))


@pytest.mark.parametrize("token", [64, -1, 10**9])
def test_a_token_outside_the_vocabulary_is_named(token: int, engine: Engines, prompts: Prompts) -> None:
    with pytest.raises(
        RolloutError, match=rf"prompt 1 sample 0\) has token {token}, at position 2(.|\n)*0 to 63"
    ):
        engine().generate(prompts([1], [5, 6, token, 7]))


@pytest.mark.parametrize("token", [64, -1])
def test_a_stop_token_outside_the_vocabulary_is_named(token: int, engine: Engines) -> None:
    with pytest.raises(RolloutError, match=f"stop token {token} is outside"):
        engine(stop_tokens=[3, token])


def test_two_rows_of_one_id_are_named(engine: Engines, prompts: Prompts) -> None:
    batch = prompts([1], [2])
    twice = Batch(ids=batch.ids[[1, 1]], fields=batch.fields)
    used = engine()
    with pytest.raises(RolloutError, match="epoch 0 prompt 1 sample 0"):
        used.generate(twice)
    with pytest.raises(RolloutError, match="epoch 0 prompt 0 sample 0"):
        next(iter(used.generate_parts([batch, batch])))
    assert not used.has_work


class Counting(RowByRow):
    """An engine that counts its rows."""

    added = 0

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        self.added += 1

    def step(self) -> list[Rollout]:
        raise AssertionError("no row may run")

    def _clear(self) -> None:
        self.added = 0


def test_an_engine_row_by_row_refuses_one_id_in_two_parts(prompts: Prompts) -> None:
    used, batch = Counting(), prompts([1], [2])
    with pytest.raises(RolloutError, match="epoch 0 prompt 0 sample 0"):
        next(used.generate_parts([batch, batch]))
    assert used.added == 0


@pytest.mark.parametrize("samples", [0, -3])
def test_the_number_of_samples_is_positive(samples: int, engine: Engines, prompts: Prompts) -> None:
    with pytest.raises(RolloutError, match=f"samples is {samples}"):
        engine().generate(prompts([1]), samples=samples)


def test_stop_texts_cannot_change_after_the_engine_was_built(engine: Engines, prompts: Prompts) -> None:
    with pytest.raises(RolloutError, match=r"stop strings \['\.'\]"):
        engine().generate(prompts([1]), sampling=SamplingConfig(stop=(".",)))


def test_no_prompts_give_no_rollouts(engine: Engines, prompts: Prompts) -> None:
    found = engine().generate(prompts([1, 2]).select([]))
    assert len(found) == 0 and set(found.fields) >= {"tokens", "finish", "columns"}


def test_prompts_without_columns_are_refused(engine: Engines, prompts: Prompts) -> None:
    with pytest.raises(RecordError, match="columns"):
        engine().generate(prompts([1]).only("tokens"))


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_a_row_that_has_ended_does_not_go_on(finish: Finish, engine: Engines) -> None:
    ended = Rollout.start(RowId(1, 2, 3), [1, 2]).sampled([4], [-1.0], version=0, finish=finish)
    with pytest.raises(RolloutError, match=f"epoch 1 prompt 2 sample 3.*{finish.name}"):
        engine().add(ended)


def test_a_row_at_its_limit_does_not_go_on(engine: Engines) -> None:
    full = Rollout.start(RowId(0, 0, 0), [1, 2]).sampled([4] * 12, [-1.0] * 12, version=0)
    with pytest.raises(RolloutError, match="12 sampled tokens and max_tokens is 12"):
        engine().add(full)


def test_a_row_runs_once(engine: Engines) -> None:
    used = engine()
    used.add(Rollout.start(RowId(0, 7, 0), [1, 2]))
    with pytest.raises(RolloutError, match="epoch 0 prompt 7 sample 0"):
        used.add(Rollout.start(RowId(0, 7, 0), [3]))


def test_only_a_row_that_is_there_is_taken_out(engine: Engines) -> None:
    with pytest.raises(RolloutError, match="epoch 0 prompt 7 sample 0"):
        engine().abort(RowId(0, 7, 0))


def test_generate_drops_no_rows_that_were_added(engine: Engines, prompts: Prompts) -> None:
    used = engine()
    used.add(Rollout.start(RowId(0, 7, 0), [1, 2]))
    with pytest.raises(RolloutError, match="still runs rows"):
        used.generate(prompts([1]))
    assert used.abort(RowId(0, 7, 0)).tokens == (1, 2)


def test_a_step_without_rows_does_nothing(engine: Engines) -> None:
    assert engine().step() == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_row_and_position(
    bad: float, temperature: float, build: Build, engine: Engines, prompts: Prompts
) -> None:
    """Token 9 has a broken embedding: the error names its row, and later calls are not affected."""
    module = build()
    used = engine(module, temperature=temperature, max_rows=3)
    good = prompts([1, 2, 3], [4, 5])
    wanted = used.generate(good)
    weight = module.get_input_embeddings().weight  # type: ignore[operator]
    with torch.no_grad():
        kept = weight[9].clone()
        weight[9] = bad
    with pytest.raises(RolloutError, match=r"row \(epoch 0 prompt 2 sample 0\) at position 4 are not finite"):
        used.generate(prompts([1, 2, 3], [4, 5], [6, 7, 9, 8]))
    assert not used.has_work
    with torch.no_grad():
        weight[9] = kept
    assert torch.equal(used.generate(good).ragged("tokens").values, wanted.ragged("tokens").values)

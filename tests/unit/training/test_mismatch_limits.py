"""Rows that were sampled from wrong keys stop a bfloat16 run or are warned of; healthy rows do not."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

from rillflow.errors import TrainingError
from rillflow.models.attention import ATTENTION, register
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Rollout, rollout_batch
from rillflow.records.row import RowId
from rillflow.rollout.native.cuda_graphs import _Buffers
from rillflow.rollout.native.passes import Segment
from rillflow.runs.sampler_gap import mismatch_warning
from rillflow.training.guards import ROW_GAP, check_gap, loss_tokens
from tests.unit.rollout.reused_rows import CONTEXT, Reuse, engine_of, round_passes

TOLERANCE = 0.05


class OneVersion(Reuse):
    """Reuse under one version of the weights, as in a step at freshness 0."""

    def publish(self) -> None:
        """Keep the weights."""


def module_of(scale: float, seed: int, vocabulary: int = 64, layers: int = 2) -> nn.Module:
    """Return a model in bfloat16; a larger scale gives its tokens more different probabilities."""
    register()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    module: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.mul_(scale)
    return module.to(torch.bfloat16)


def sampled(module: nn.Module, seed: int) -> tuple[Batch, Tensor]:
    """Return the loss tokens of rows with turns from rounded passes, and a plain pass's log probabilities."""
    engine = engine_of(module, max_rows=20)
    round_passes(engine)
    reuse = OneVersion(
        module=module, engine=engine, chance=Random(seed), is_cache_compared=False, most_samples=8
    )
    reuse.run(20)
    rows = [row for row in reuse.ended if any(row.loss_mask)]
    return loss_tokens(aligned(rows)), torch.cat([plain(module, row) for row in rows])


def aligned(rows: list[Rollout]) -> Batch:
    """Return the fields of rows that are aligned to their tokens."""
    batch = rollout_batch(rows)
    names = ("tokens", "loss_mask", "sampler_logprobs")
    return Batch(ids=batch.ids, fields={name: batch.field(name) for name in names})


def plain(module: nn.Module, row: Rollout) -> Tensor:
    """Return the log probabilities of a row's sampled tokens."""
    ids = torch.tensor([row.tokens])
    with torch.no_grad():
        logits = module(input_ids=ids, use_cache=False).logits[0, :-1].float()
    own = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return own[torch.tensor(row.loss_mask[1:])]


@pytest.fixture
def wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let padding rows write into the cache rows behind the running ones."""
    fill = _Buffers.fill

    def filled(self: _Buffers, segments: Mapping[int, Segment], tokens: Tensor) -> None:
        fill(self, segments, tokens)
        for name, segment in segments.items():
            own = self.segments[name]
            assert own.rows is not None
            torch.arange(len(own.rows), out=own.rows)
            own.positions[segment.positions.shape[0] :] = segment.positions.amin() // 2
            self.fed[name] = -1

    monkeypatch.setattr(_Buffers, "fill", filled)


@pytest.mark.usefixtures("wrong_rows")
@pytest.mark.parametrize("scale", [6.0, 9.0])
def test_wrong_cache_rows_stop_the_run_or_are_warned_of_in_step_1(scale: float) -> None:
    for seed in range(2):
        tokens, logprobs = sampled(module_of(scale, seed), seed)
        try:
            metrics = check_gap(tokens, logprobs, TOLERANCE)
        except TrainingError as error:
            assert "not on-policy" in str(error)
        else:
            assert mismatch_warning([(1, metrics)]) is not None, metrics


@pytest.mark.parametrize(("scale", "vocabulary", "layers"), [(1.0, 64, 2), (9.0, 64, 2), (4.0, 2000, 4)])
def test_healthy_rows_pass_without_a_warning(scale: float, vocabulary: int, layers: int) -> None:
    steps = []
    for seed in range(2):
        tokens, logprobs = sampled(module_of(scale, seed, vocabulary, layers), seed)
        metrics = check_gap(tokens, logprobs, TOLERANCE)
        assert metrics[ROW_GAP].value < TOLERANCE
        steps.append(metrics)
    assert mismatch_warning(enumerate(steps, 1)) is None


def batch_of(gaps: list[list[float]]) -> tuple[Batch, Tensor]:
    """Return rows whose sampler differs from the trainer by these gaps."""
    rows = []
    for sample, each in enumerate(gaps):
        start = Rollout.start(RowId(0, 3, sample), [1])
        rows.append(start.sampled([2] * len(each), [-1.0 - gap for gap in each], version=0))
    return loss_tokens(aligned(rows)), torch.full((sum(map(len, gaps)),), -1.0)


def test_one_row_far_off_is_refused_by_name_though_the_mean_is_small() -> None:
    good = [[0.001] * 40 for _ in range(200)]
    with pytest.raises(TrainingError, match=r"row \(epoch 0 prompt 3 sample 200\).*0\.3 on average in"):
        check_gap(*batch_of([*good, [0.3] * 20]), TOLERANCE)
    metrics = check_gap(*batch_of([*good, [0.2] * 20, [1.3, *[0.01] * 20]]), TOLERANCE)
    assert metrics[ROW_GAP].value == pytest.approx(0.2, abs=1e-4)
    assert metrics["mismatch/first_gap/max"].value == pytest.approx(1.3, abs=1e-4)
    assert check_gap(*batch_of([*good, [1.3]]), TOLERANCE), "one token is no row"


def test_a_value_that_is_not_finite_is_refused() -> None:
    tokens, logprobs = batch_of([[0.0] * 20])
    column = tokens.ragged("sampler_logprobs")
    bad = tokens.with_fields(
        sampler_logprobs=Ragged(values=column.values.clone().fill_(float("nan")), lengths=column.lengths)
    )
    with pytest.raises(TrainingError, match="not on-policy"):
        check_gap(bad, logprobs, TOLERANCE)

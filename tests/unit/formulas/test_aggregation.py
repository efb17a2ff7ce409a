"""Contract partition-blind for the loss: any split into parts gives the same gradient."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rillflow.errors import FormulaError
from rillflow.formulas.losses import Aggregation, clipped_policy_loss, loss_weights
from rillflow.records.ragged import Ragged

MASKS = st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=8)


def gradient(rows: list[list[int]], mask: Ragged, how: Aggregation, dtype: torch.dtype) -> Tensor:
    """Return d loss / d logprobs [T], computed part by part."""
    generator = torch.Generator().manual_seed(0)
    count = mask.values.shape[0]
    logprobs = -torch.rand(count, generator=generator, dtype=torch.float64).to(dtype)
    old = logprobs + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    advantages = mask.expand(torch.randn(len(mask), generator=generator, dtype=torch.float64).to(dtype))
    logprobs.requires_grad_()
    weights = loss_weights(mask, how, constant=16)
    for part in rows:
        index = torch.isin(mask.row_of, torch.tensor(part, dtype=torch.int64)) & mask.values
        losses = clipped_policy_loss(
            (logprobs - old)[index], advantages[index], clip_low=0.2, clip_high=0.28, dual_clip=3.0
        )
        ((losses * weights.values.values[index].to(dtype)).sum() / weights.denominator).backward()
    assert logprobs.grad is not None
    return logprobs.grad


@settings(max_examples=60, deadline=None)
@given(
    masks=MASKS,
    how=st.sampled_from(get_args(Aggregation)),
    precision=st.sampled_from([(torch.float32, 1e-5), (torch.float64, 1e-12)]),
    data=st.data(),
)
def test_partition_blind(
    masks: list[list[bool]], how: Aggregation, precision: tuple[torch.dtype, float], data: st.DataObject
) -> None:
    mask = Ragged.from_rows([[False], *masks, [True]], torch.bool)
    dtype, tolerance = precision
    cut = data.draw(st.lists(st.integers(0, 3), min_size=len(mask), max_size=len(mask)))
    parts = [[row for row, part in enumerate(cut) if part == number] for number in set(cut)]
    whole = gradient([list(range(len(mask)))], mask, how, dtype)
    found = gradient(parts, mask, how, dtype)
    torch.testing.assert_close(found, whole, rtol=tolerance, atol=0)


def test_what_each_aggregation_is() -> None:
    mask = Ragged.from_rows([[False, True, True, True], [False, True], [False]], torch.bool)
    token_losses = torch.tensor([9.0, 1.0, 2.0, 6.0, 9.0, 5.0, 9.0], dtype=torch.float64)

    def loss(how: Aggregation, constant: int = 0) -> float:
        weights = loss_weights(mask, how, constant)
        return float((token_losses * weights.values.values).sum() / weights.denominator)

    assert loss("token_mean") == 14 / 4
    assert loss("sequence_mean") == (9 / 3 + 5) / 2
    assert loss("constant", 10) == 14 / (2 * 10), "a row without a loss token counts nowhere"


def test_with_rows_of_one_length_token_mean_is_sequence_mean() -> None:
    mask = Ragged.from_rows([[False, True, True]] * 4, torch.bool)
    token, sequence = loss_weights(mask, "token_mean"), loss_weights(mask, "sequence_mean")
    assert torch.equal(token.values.values / token.denominator, sequence.values.values / sequence.denominator)


@pytest.mark.parametrize("how", get_args(Aggregation))
def test_without_loss_tokens_the_denominator_is_zero(how: Aggregation) -> None:
    mask = Ragged.from_rows([[False, False], []], torch.bool)
    found = loss_weights(mask, how, constant=8)
    assert found.denominator == 0
    assert found.values.values.tolist() == [0.0, 0.0]


def test_options_are_checked() -> None:
    mask = Ragged.from_rows([[True]], torch.bool)
    with pytest.raises(FormulaError, match="constant is 0"):
        loss_weights(mask, "constant")
    with pytest.raises(FormulaError, match=r"'token_sum'.*\n.*did you mean"):
        loss_weights(mask, "token_sum")  # type: ignore[arg-type]

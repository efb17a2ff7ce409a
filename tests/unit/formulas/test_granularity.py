"""The stated granularity of a formula suffices: parts give each row the bits of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow import formulas
from rillflow.controller.executor import apply_formula
from rillflow.formulas import granularity, seeing
from rillflow.formulas.preferences import PairLossConfig
from rillflow.records.batch import Batch, Field, concatenate, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId

SHARES = {"gamma": 0.9, "lam": 0.8}
PRICE = {"weight": 0.1, "estimator": "k3"}
OPTIONS: dict[str, dict[str, Any]] = {
    "bootstrapped_rewards": {"gamma": 0.9},
    "ended": {},
    "implicit_rewards": {"config": PairLossConfig(kind="ipo")},
    "logprob_rewards": {"config": PairLossConfig(kind="simpo")},
    "is_paired": {},
    "is_preferred": {},
    "kept_totals": {},
    "previous_logprobs": {},
    "previous_totals": {},
    "whole_scores": {},
    "gae": SHARES,
    "lagrangian_advantages": {"multiplier": 0.5},
    "lambda_returns": SHARES,
    "missing_end_rewards": {"penalty": 0.3},
    "bounded_rewards": {"low": -1.0, "high": 0.5, "price": 0.1},
    "rescaled_rewards": {"count": 4.0, "mean": 0.5, "squares": 3.0},
    "overlong_rewards": {"buffer": 2},
    "penalised_rewards": PRICE,
    "penalised_token_costs": PRICE,
    "penalised_token_rewards": PRICE,
    "returns_to_go": {"gamma": 0.9},
    "token_costs": {},
    "token_rewards": {},
    "value_targets": {},
    "best_rows": {"keep": 2, "threshold": -0.5},
    "group_advantages": {"scale": "std"},
    "pair_places": {"selector": "max_random", "seed": 5, "length_price": 0.1},
    "leave_one_out": {},
    "penalised_group_advantages": {"scale": "std"},
    "varied_groups": {},
}


TOKENS = ("token_rewards", "values", "sampler_logprobs", "reference_logprobs", "advantages")
TOKENS += ("reward_advantages", "cost_advantages", "old_logprobs")


def batch_of(sizes: list[int], seed: int) -> Batch:
    """Return groups of these sizes; rows have one to nine tokens, the first of which is a prompt token."""
    generator = torch.Generator().manual_seed(seed)
    ids = row_ids([RowId(0, group, row) for group, size in enumerate(sizes) for row in range(size)])
    count = len(ids)
    lengths = torch.randint(1, 10, (count,), generator=generator)
    tokens = Ragged(values=torch.zeros(int(lengths.sum())), lengths=lengths)
    fields: dict[str, Field] = {
        name: tokens.with_values(torch.randn(len(tokens.values), generator=generator)) for name in TOKENS
    }
    fields["loss_mask"] = tokens.with_values(tokens.positions > 0)
    for name in ("rewards", "penalised", "costs", "final_values", "policy_totals", "reference_totals"):
        fields[name] = torch.randn(count, generator=generator)
    fields["valid"] = torch.rand(count, generator=generator) < 0.8
    fields["finish"] = torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8)
    fields["limits"] = torch.full((count,), 8)
    fields["tokens"] = tokens.with_values(torch.randint(0, 3, (len(tokens.values),), generator=generator))
    fields["pair_place"] = torch.randint(-1, 2, (count,), generator=generator)
    return Batch(ids=ids, fields=fields)


@pytest.mark.parametrize("name", sorted(OPTIONS))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_parts_give_the_bits_of_the_whole(name: str, data: st.DataObject) -> None:
    """Parts are cut anywhere, or between groups, and may have no rows."""
    formula: Callable[..., Any] = getattr(formulas, name)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    batch = batch_of(sizes, data.draw(st.integers(0, 99)))
    ends = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    places = st.sampled_from(ends) if granularity(formula) == "group" else st.integers(0, len(batch))
    cuts = [0, *sorted(data.draw(st.lists(places, max_size=3))), len(batch)]
    parts = [batch.slice(start, stop) for start, stop in pairwise(cuts)]
    whole = apply_formula(formula, "made", batch, **OPTIONS[name])
    found = concatenate([apply_formula(formula, "made", part, **OPTIONS[name]) for part in parts])
    one, other = (each.field("made") for each in (whole, found))
    if isinstance(one, Ragged):
        assert isinstance(other, Ragged) and torch.equal(one.lengths, other.lengths)
        one, other = one.values, other.values
    assert torch.equal(one, other)


def test_every_formula_that_does_not_see_the_batch_is_held_to_it() -> None:
    assert {name for name in dir(formulas) if granularity_of(name) != "batch"} == set(OPTIONS)


def granularity_of(name: str) -> str:
    found = getattr(formulas, name)
    return granularity(found) if callable(found) else "batch"


def test_an_own_formula_sees_the_batch_unless_it_says_otherwise() -> None:
    @seeing("group")
    def mine(rewards: torch.Tensor) -> torch.Tensor:
        return rewards

    def other(rewards: torch.Tensor) -> torch.Tensor:
        return rewards

    assert (granularity(mine), granularity(other)) == ("group", "batch")

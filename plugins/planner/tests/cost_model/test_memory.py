"""Memory: weights, optimiser, activations and what cuts them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.planner.tests.cost_model.settings import MIXTURE, SHAPE, WORKLOAD, setting
from rillflow.formulas.config import MOST_LOGITS
from rillflow.placement.grid import Grid
from rillflow_planner.cost_model import memory
from rillflow_planner.cost_model.compute import load_of
from rillflow_planner.cost_model.options import grids_of

ONE = grids_of(Grid())


@pytest.mark.parametrize(("dtype", "state"), [("bfloat16", 18), ("float32", 16)])
def test_bytes_of_a_trained_parameter(dtype: str, state: int) -> None:
    one = setting(workload=replace(WORKLOAD, dtype=dtype))
    terms = (memory.weight_bytes, memory.optimizer_bytes, memory.gradient_bytes)
    kept = sum(term(one, ONE)[0] for term in terms)
    assert kept == pytest.approx(state * SHAPE.parameters)


@given(
    dp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4]),
    is_sharded=st.booleans(),
)
def test_cuts_divide_weights_and_copies_do_not(dp: int, pp: int, tp: int, is_sharded: bool) -> None:
    grids = grids_of(Grid(dp=dp, pp=pp, tp=tp, is_sharded=is_sharded))
    embedding = SHAPE.vocabulary * SHAPE.hidden
    fullest = SHAPE.parameters if pp == 1 else SHAPE.trunk_parameters / pp + embedding
    parts = tp * (dp if is_sharded else 1)
    assert memory.weight_bytes(setting(), grids)[0] == pytest.approx(2 * fullest / parts)


def test_experts_are_cut_over_ep_and_the_rest_is_not() -> None:
    held = memory.held_parameters(setting(shape=MIXTURE), grids_of(Grid(dp=8), Grid(dp=8, ep=8)))
    assert held[0] == pytest.approx(MIXTURE.parameters)
    assert held[1] == pytest.approx(MIXTURE.shared_parameters + MIXTURE.routed_parameters / 8)


def test_recomputing_takes_less_memory() -> None:
    load = load_of(WORKLOAD, 1, 2)
    kept = memory.activation_bytes(setting(recomputes=False), load, ONE)[0]
    again = memory.activation_bytes(setting(recomputes=True), load, ONE)[0]
    assert again < kept / 3


def test_a_pipelines_first_stage_holds_a_micro_batch_for_each_stage() -> None:
    load = replace(load_of(WORKLOAD, 1, 1), micro_batches=16.0)
    whole = memory.activation_bytes(setting(recomputes=False), load, ONE)[0]
    first = memory.activation_bytes(setting(recomputes=False), load, grids_of(Grid(pp=4)))[0]
    assert first == pytest.approx(whole)


def test_a_critic_has_next_to_no_logits_and_a_policy_no_more_than_a_pass_keeps() -> None:
    policy = memory.logit_bytes(setting(), 1024, ONE, 1)[0]
    critic = memory.logit_bytes(setting(shape=replace(SHAPE, is_scalar=True)), 1024, ONE, 1)[0]
    assert policy == pytest.approx(SHAPE.vocabulary * critic)
    assert memory.logit_bytes(setting(), 1 << 20, ONE, 2)[0] == 2 * 4 * MOST_LOGITS


def test_training_needs_more_than_scoring() -> None:
    assert memory.training_bytes(setting(), ONE)[0] > memory.scoring_bytes(setting(), ONE)[0]


def test_a_micro_batch_is_never_cut_within_a_row() -> None:
    tiny = setting(workload=replace(WORKLOAD, tokens_per_micro_batch=16))
    load = load_of(tiny.workload, 1, 1)
    assert memory.micro_batch_tokens(tiny, load, ONE) == 128 + 2048
    halves = grids_of(Grid(cp=2))
    shared = load_of(tiny.workload, 1, 1, cp=2)
    assert memory.micro_batch_tokens(tiny, shared, halves) == (128 + 2048) / 2

"""Compute: what training and scoring take, and what they are made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.planner.tests.cost_model.settings import DEVICE, FLEET, MIXTURE, SHAPE, WORKLOAD, setting
from rillflow.errors import PlanError
from rillflow.placement.grid import Grid
from rillflow.sharding.pipeline import layers_of
from rillflow_planner.cost_model import compute
from rillflow_planner.cost_model.fused import stage_counts
from rillflow_planner.cost_model.options import LAYOUTS, grids_of, stage_layers
from rillflow_planner.hardware import Factors
from rillflow_planner.workload import Lengths, Packing

FREE = Factors(launch_s=0.0, expert_launch_s=0.0, collective_s=0.0, between_collective_s=0.0)
ONE = grids_of(Grid())
FIXED = replace(
    WORKLOAD,
    prompt=Lengths(kind="fixed", limit=128),
    response=Lengths(kind="fixed", limit=384),
    minibatches=1,
)
grid_sizes = st.builds(
    Grid,
    dp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4]),
    is_sharded=st.booleans(),
)


def test_scoring_on_one_device_is_two_flops_a_parameter_and_token() -> None:
    rows, length = 256, 512
    linear = 2 * SHAPE.active_parameters * rows * length
    attention = 2 * SHAPE.layers * SHAPE.heads * 128 * rows * length**2 / 2
    expected = (linear + attention) / (100e12 * FREE.score_flops)
    assert compute.score_s(setting(workload=FIXED, factors=FREE), ONE)[0] == pytest.approx(expected)


@pytest.mark.parametrize(("recomputes", "passes"), [(True, 4), (False, 3)])
def test_training_is_three_forwards_and_one_more_where_activations_are_recomputed(
    recomputes: bool, passes: int
) -> None:
    same = replace(FREE, score_flops=FREE.train_flops)
    once = setting(workload=FIXED, factors=same, recomputes=recomputes)
    optimizer = compute.optimizer_s(once, ONE)[0]
    assert compute.train_s(once, ONE)[0] - optimizer == pytest.approx(passes * compute.score_s(once, ONE)[0])


@given(stages=st.sampled_from([1, 2, 4, 8]), micro_batches=st.integers(1, 64))
def test_a_pipeline_idles_for_all_stages_but_one(stages: int, micro_batches: int) -> None:
    """(M + N - 1) / (M N) of one device's work, for equal stages, a head of one number and no sends."""
    shape = replace(SHAPE, is_scalar=True, hidden=1024)
    fast = replace(FLEET, device=replace(DEVICE, inside_bandwidth=1e30), between_bandwidth=1e30)
    one = setting(shape=shape, factors=FREE, fleet=fast)
    load = compute.Load(tokens=4096.0, squares=1.0, seats=1.0, micro_batches=float(micro_batches))
    alone, drained = compute.passes_s(one, load, grids_of(Grid(), Grid(pp=stages)), 3, 0.5)
    assert drained == pytest.approx(alone * (micro_batches + stages - 1) / (micro_batches * stages), rel=1e-3)


@given(
    layers=st.integers(2, 32),
    stages=st.integers(2, 16),
    micro_batches=st.integers(1, 32),
    runtime=st.sampled_from(["rillflow", "megatron"]),
)
def test_a_pipeline_is_as_slow_as_its_fullest_stage_with_the_head_on_the_last(
    layers: int, stages: int, micro_batches: int, runtime: str
) -> None:
    """Against every stage counted one by one."""
    layouts = LAYOUTS[runtime]
    cut = stage_layers(layers, stages, layouts)
    if cut.last < 1:
        return
    one = setting(shape=replace(SHAPE, layers=layers), factors=FREE)
    one = replace(one, problem=replace(one.problem, layouts=layouts))
    counts = stage_counts(layers, stages, int(cut.first), int(cut.last))
    assert sum(counts) == layers and min(counts) >= 1 and max(counts) == cut.most
    load = compute.Load(tokens=4096.0, squares=1e6, seats=1.0, micro_batches=float(micro_batches))
    grids = grids_of(Grid(pp=stages))
    work = compute.work_of(one, load, grids, 3, 0.5)
    each = [float(work.of(count)[0]) / micro_batches for count in counts]
    each[-1] += float(work.head_s[0]) / micro_batches
    sends = float(compute.pipeline_s(one, load, grids, 3)[0]) / micro_batches
    expected = sum(each) + (micro_batches - 1) * max(each) + (micro_batches + stages - 1) * sends
    assert compute.passes_s(one, load, grids, 3, 0.5)[0] == pytest.approx(expected)


def test_stages_of_each_runtime() -> None:
    """Rillflow's runtime cuts as its ``layers_of``, Megatron's recipes shorten the first and last stage."""
    for layers, stages in ((48, 32), (28, 8), (61, 16), (94, 8)):
        cut = stage_layers(layers, stages, LAYOUTS["rillflow"])
        runtime = [len(layers_of(stage, stages, layers)) for stage in range(stages)]
        assert stage_counts(layers, stages, int(cut.first), int(cut.last)) == runtime
    known = {(61, 16): (3, 4, 2), (94, 8): (11, 12, 11), (48, 2): (24, 24, 24), (48, 1): (48, 48, 48)}
    for (layers, stages), expected in known.items():
        cut = stage_layers(layers, stages, LAYOUTS["megatron"])
        assert (cut.first, cut.most, cut.last) == expected
    impossible = [stage_layers(layers, 40, LAYOUTS["megatron"]).last for layers in (48, 61, 94)]
    assert max(impossible) < 1


@given(epochs=st.integers(1, 4))
def test_epochs_repeat_training_and_not_scoring(epochs: int) -> None:
    once, more = setting(), setting(workload=replace(WORKLOAD, epochs=epochs))
    assert compute.train_s(more, ONE)[0] == pytest.approx(epochs * compute.train_s(once, ONE)[0])
    assert compute.score_s(more, ONE)[0] == compute.score_s(once, ONE)[0]


@given(grid=grid_sizes, faster=st.floats(1.0, 8.0))
def test_a_faster_machine_never_hurts(grid: Grid, faster: float) -> None:
    device = replace(
        DEVICE,
        flops={name: speed * faster for name, speed in DEVICE.flops.items()},
        memory_bandwidth=DEVICE.memory_bandwidth * faster,
        inside_bandwidth=DEVICE.inside_bandwidth * faster,
    )
    fleet = replace(FLEET, device=device, between_bandwidth=FLEET.between_bandwidth * faster)
    grids = grids_of(grid)
    for stage in (compute.train_s, compute.score_s):
        assert stage(setting(fleet=fleet), grids)[0] <= stage(setting(), grids)[0]


@given(grid=grid_sizes)
def test_many_grids_at_once_are_each_by_itself(grid: Grid) -> None:
    together = grids_of(Grid(), grid, Grid(dp=2, tp=2))
    for shape in (SHAPE, MIXTURE):
        found = compute.train_s(setting(shape=shape), together)
        assert found[1] == compute.train_s(setting(shape=shape), grids_of(grid))[0]


@given(dp=st.sampled_from([1, 2, 4, 8, 16, 64, 256]))
def test_the_busiest_replica_has_a_fair_share_or_the_longest_row(dp: int) -> None:
    load = compute.load_of(WORKLOAD, dp, 2)
    fair = WORKLOAD.rows / 2 / dp * WORKLOAD.row_tokens
    assert load.tokens >= fair
    assert load.tokens == pytest.approx(fair) or load.tokens <= 128 + 2048
    assert load.squares >= load.tokens * WORKLOAD.row_tokens * 0.99


def test_rows_of_one_length_are_shared_out_whole() -> None:
    assert float(compute.load_of(replace(FIXED, prompts=5, samples=1), 4, 1).tokens) == 2 * 512
    assert float(compute.load_of(replace(FIXED, prompts=8, samples=1), 4, 1).tokens) == 2 * 512


def test_tensor_parallelism_across_machines_costs_more_than_within() -> None:
    within, across = grids_of(Grid(dp=2, tp=8)), grids_of(Grid(dp=1, tp=16))
    load = compute.load_of(WORKLOAD, 2, 1)
    costs = [compute.tensor_s(setting(), load, grids)[0] for grids in (within, across)]
    assert costs[0] < costs[1]


def test_shards_are_gathered_for_every_micro_batch_and_copies_add_gradients_once() -> None:
    sharded, copied = grids_of(Grid(dp=8, is_sharded=True)), grids_of(Grid(dp=8))
    load = compute.load_of(WORKLOAD, 8, 2)
    twice = replace(load, micro_batches=2 * load.micro_batches)
    once_s, twice_s = (compute.gathers_s(setting(), one, sharded, 4)[0] for one in (load, twice))
    assert twice_s == pytest.approx(2 * once_s)
    assert compute.gathers_s(setting(), load, copied, 4)[0] == 0
    assert compute.gradients_s(setting(factors=FREE), sharded)[0] == 0
    assert compute.gradients_s(setting(), copied)[0] > 0


def test_shards_cross_twice_as_weights_and_once_as_gradients_in_every_micro_batch() -> None:
    """By hand, on 8 devices of a machine: 7/8 of P (2 x 2 + 4) bytes over links of 100 GB/s at half speed."""
    factors = replace(FREE, inside_links=0.5)
    once = compute.Load(tokens=1.0, squares=1.0, seats=1.0, micro_batches=3.0)
    shards, crossing = grids_of(Grid(dp=8, is_sharded=True)), 7 / 8 * SHAPE.parameters / 50e9
    learning, scoring = (
        compute.gathers_s(setting(factors=factors), once, shards, each)[0] for each in (3, 1)
    )
    assert learning == pytest.approx(3 * 8 * crossing)
    assert scoring == pytest.approx(3 * 2 * crossing)


@pytest.mark.parametrize(("dtype", "moved"), [("float32", 28), ("bfloat16", 30)])
def test_an_optimiser_step_moves_seven_float32_numbers_a_parameter(dtype: str, moved: int) -> None:
    """Gradient, weight and two moments are read, the last three written, and a bfloat16 copy if any."""
    one = setting(workload=replace(WORKLOAD, dtype=dtype), factors=replace(FREE, decode_bandwidth=0.5))
    expected = SHAPE.parameters * moved / (DEVICE.memory_bandwidth * 0.5)
    assert compute.optimizer_s(one, ONE)[0] == pytest.approx(expected)
    halves = grids_of(Grid(dp=2, is_sharded=True))
    assert compute.optimizer_s(one, halves)[0] == pytest.approx(expected / 2)


def test_experts_slow_a_mixture_by_their_links_and_their_pace() -> None:
    grids = grids_of(Grid(dp=8), Grid(dp=8, ep=8))
    load = compute.load_of(WORKLOAD, 8, 1)
    assert np.all(compute.experts_s(setting(), load, grids) == 0)
    by_ep = compute.experts_s(setting(shape=MIXTURE), load, grids)
    assert by_ep[0] == 0 < by_ep[1]
    fast = setting(shape=MIXTURE, factors=replace(FREE, expert_flops=1.0))
    slow = setting(shape=MIXTURE, factors=replace(FREE, expert_flops=0.5))
    products, pairs = MIXTURE.token_flops * load.tokens, MIXTURE.attention_flops(1.0) * load.squares
    flops = [
        MIXTURE.layers * compute.layer_flops(one, load) + compute.head_flops(one, load)
        for one in (fast, slow)
    ]
    assert flops[1] > flops[0] == pytest.approx(products + pairs / 2)


def test_kernels_that_are_not_fused_cost_what_they_touch_of_memory() -> None:
    eager = replace(FREE, touches=5.0, decode_bandwidth=0.5)
    fused = replace(FREE, decode_bandwidth=0.5)
    found = compute.score_s(setting(workload=FIXED, factors=eager), ONE)[0]
    expected = compute.score_s(setting(workload=FIXED, factors=fused), ONE)[0]
    kept = 6 * SHAPE.hidden + 128 * (SHAPE.heads + SHAPE.kv_heads) + 3 * SHAPE.inner
    moved = 5 * kept * 256 * 512 * SHAPE.layers * 2
    assert found - expected == pytest.approx(moved / (DEVICE.memory_bandwidth * 0.5))


def test_heads_cost_by_the_tokens_that_attention_has() -> None:
    packed = replace(FIXED, packing=Packing(scored=0.5))
    slow = setting(workload=packed, factors=replace(FREE, head_token_s=1e-6))
    found = compute.score_s(slow, grids_of(Grid(), Grid(tp=4)))
    beside = compute.score_s(setting(workload=packed, factors=FREE), grids_of(Grid(), Grid(tp=4)))
    heads = SHAPE.layers * SHAPE.heads * 256 * 512 * 1e-6
    assert found - beside == pytest.approx([heads, heads / 4])


def test_a_pass_costs_as_often_as_there_are_micro_batches() -> None:
    slow = setting(workload=FIXED, factors=replace(FREE, pass_s=0.5))
    beside = setting(workload=FIXED, factors=FREE)
    found = compute.train_s(slow, ONE)[0] - compute.train_s(beside, ONE)[0]
    assert found == pytest.approx(3 * 0.5 * 256 * 512 / 4096), "forward, forward again, backward"
    found = compute.score_s(slow, ONE)[0] - compute.score_s(beside, ONE)[0]
    assert found == pytest.approx(0.5 * 256 * 512 / 4096)


@given(hidden=st.floats(0.0, 1.0), layers=st.sampled_from([8, 16]))
def test_gathers_that_are_not_hidden_are_waited_for(hidden: float, layers: int) -> None:
    shape, sharded = replace(SHAPE, layers=layers), grids_of(Grid(dp=8, is_sharded=True))
    factors = replace(FREE, hidden=hidden, collective_s=0.1)
    one = setting(shape=shape, workload=FIXED, factors=factors)
    load = compute.load_of(FIXED, 8, 1)
    gathers = compute.gathers_s(one, load, sharded, 1)[0]
    assert gathers >= (layers + 1) * 0.1 * load.micro_batches, "every layer is a collective of its own"
    work = compute.score_s(setting(shape=shape, workload=FIXED, factors=FREE), grids_of(Grid(dp=8)))[0]
    found = compute.score_s(one, sharded)[0]
    assert found == pytest.approx(max(work, hidden * gathers) + (1 - hidden) * gathers)


def test_a_dtype_the_device_does_not_know_is_named() -> None:
    fleet = replace(FLEET, device=replace(DEVICE, flops={"float32": 1e12}))
    with pytest.raises(PlanError, match="bfloat16"):
        compute.score_s(setting(fleet=fleet), ONE)

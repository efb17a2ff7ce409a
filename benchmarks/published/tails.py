"""Steps that wait for their longest rows: verl's documentation, AReaL, RollPacker.

    lengths that explain one row ─> the other sizes of the cluster, the other bounds, the other over-samplings

- verl: one set of lengths for runs in step, one for runs ahead: their updates cost less than half the
  device-seconds, so their answers were shorter. Sequence parallelism counts as tensor parallelism.
- RollPacker: with more rows begun than kept, a batch ends when enough prompts have enough rows; rows drawn,
  16 draws averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from published.models import shape
from published.nemo import NETWORK, single_graph
from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.cost_model.generation import drain_s
from rillflow.planner.factors import Factors
from rillflow.planner.grid import Grid
from rillflow.planner.hardware import Fleet, Hardware, shipped_devices
from rillflow.planner.option import Decoder
from rillflow.planner.problem import SAMPLER, Problem
from rillflow.planner.workload import Lengths, Workload, lengths_of_mean

ENGINE_BYTES = 3e9
DRAWS = 16


@dataclass(frozen=True, kw_only=True)
class VerlRow:
    """A published step; runs ahead have as many devices again that generate."""

    training: int
    is_ahead: bool
    generate_s: float
    score_s: float
    update_s: float
    step_s: float


VERL = (
    VerlRow(training=32, is_ahead=False, generate_s=357.41, score_s=107.71, update_s=313.81, step_s=790.10),
    VerlRow(training=64, is_ahead=False, generate_s=150.72, score_s=70.26, update_s=133.41, step_s=365.28),
    VerlRow(training=128, is_ahead=False, generate_s=177.85, score_s=53.92, update_s=113.81, step_s=356.30),
    VerlRow(training=16, is_ahead=True, generate_s=21.26, score_s=0.0, update_s=269.80, step_s=294.77),
    VerlRow(training=32, is_ahead=True, generate_s=28.46, score_s=0.0, update_s=156.98, step_s=189.26),
    VerlRow(training=64, is_ahead=True, generate_s=33.14, score_s=0.0, update_s=113.16, step_s=150.63),
)
"""volcengine/verl, docs/advance/fully_async.md of October 2025. Later copies have the updates of the first
and the fourth row the other way round; only so do stages add up to steps."""


@dataclass(frozen=True, kw_only=True)
class VerlParts:
    """A predicted step in seconds; ahead, what is exposed is in the step alone."""

    generate: float
    score: float
    update: float
    step: float


@dataclass(frozen=True, kw_only=True)
class VerlFit:
    """What verl's rows are predicted with."""

    mean: float
    ahead_mean: float
    sigma: float
    factors: Factors


def verl_problem(row: VerlRow, fit: VerlFit) -> Problem:
    """512 prompts of 16 answers up to 28k tokens, 16 optimiser steps of 512 rows, on H20."""
    limit = 28 * 1024
    workload = Workload(
        prompts=512,
        samples=16,
        prompt=Lengths(kind="fixed", limit=150),
        response=lengths_of_mean(fit.ahead_mean if row.is_ahead else fit.mean, limit, fit.sigma),
        minibatches=16,
        tokens_per_micro_batch=60 * 1024 // 4,
        rows_at_once=1024,
    )
    fleet = Fleet(
        name="all",
        device=shipped_devices()["H20"],
        devices=256,
        per_machine=8,
        between_bandwidth=NETWORK / 2,
    )
    return Problem(
        graph=single_graph(),
        shapes={"policy": shape("Qwen2.5-7B")},
        workload=workload,
        hardware=Hardware(name="H20", fleets=(fleet,), factors=fit.factors),
        samples_apart=row.is_ahead,
        freshness=1 if row.is_ahead else 0,
    )


def predict_verl(row: VerlRow, fit: VerlFit) -> VerlParts:
    """Seconds of one row: fsdp over all, 4 devices a sequence, generation with tp 4."""
    problem = verl_problem(row, fit)
    costs, units = CostModel(problem), {unit.name: unit for unit in problem.units}
    grid = Grid(dp=row.training // 4, tp=4, is_sharded=True)
    option = replace(costs.option(units["policy"], "all", row.training, grid, 0), generate_tp=4)
    sampler = units[SAMPLER] if row.is_ahead else units["policy"]
    room = 0.8 * problem.hardware.fleets[0].device.memory_bytes - sampler.shape.parameters / 2 - ENGINE_BYTES
    decoder = costs.decoder(sampler, option, "all", row.training, room)
    assert decoder is not None
    stage = problem.graph.stages[0]
    score, update = option.seconds[1], option.seconds[2]
    if row.is_ahead:
        generate = costs.steady_s(stage, decoder)
        return VerlParts(
            generate=generate, score=0.0, update=update, step=max(generate, update) + _sync_s(fit)
        )
    generate = costs.generate_s(stage, decoder)
    step = generate + score + update + fit.factors.step_s
    return VerlParts(generate=generate, score=score, update=update, step=step)


def _sync_s(fit: VerlFit) -> float:
    return fit.factors.step_s


def fit_verl(sigma: float = 1.8) -> VerlFit:
    """Fitted stage by stage on 64 in step and 16 + 16, and the training share on 128's update.

    The 28k row that each optimiser step is likely to have bounds the update of 128 devices: what a device
    reaches can be read off it, and then the mean off 64. Seconds a layer of one token come from generation on
    64, which is mostly that row too.
    """
    factors = Factors(
        train_flops=0.5,
        score_flops=0.5,
        decode_bandwidth=0.7,
        decode_flops=0.4,
        decode_row_s=2e-5,
        step_s=11.0,
    )
    fit = VerlFit(mean=1000.0, ahead_mean=500.0, sigma=sigma, factors=factors)
    small, large, ahead = VERL[1], VERL[2], VERL[3]
    for _ in range(25):
        parts, tail = predict_verl(small, fit), predict_verl(large, fit)
        faster = predict_verl(ahead, fit)
        read = fit.factors.score_flops * (parts.score / small.score_s) ** 0.5
        train = fit.factors.train_flops * (tail.update / large.update_s) ** 0.5
        launch = fit.factors.decode_launch_s * (small.generate_s / parts.generate)
        fit = VerlFit(
            mean=fit.mean * (small.update_s / parts.update) ** 0.5,
            ahead_mean=fit.ahead_mean * (ahead.update_s / faster.update) ** 0.5,
            sigma=sigma,
            factors=replace(
                fit.factors,
                train_flops=min(max(train, 0.2), 0.7),
                score_flops=min(max(read, 0.2), 0.7),
                decode_launch_s=min(max(launch, 1e-5), 3e-4),
            ),
        )
    return fit


AREAL_BOUNDS = {0: 27.1, 1: 47.8, 2: 47.8, 4: 49.0, 8: 51.5, 16: 52.0}
"""Thousand tokens a second by freshness bound, 8 devices, 1.5B, 64 prompts x 16."""


def predict_areal(factors: Factors) -> dict[int, float]:
    """Throughput against bound 0, by bound: 6 devices generate, 2 train, answers up to 8k."""
    response = lengths_of_mean(2500.0, 8192, 0.9)
    seconds = {}
    for bound in AREAL_BOUNDS:
        workload = Workload(
            prompts=64, samples=16, prompt=Lengths(kind="fixed", limit=150), response=response, minibatches=4
        )
        fleet = Fleet(
            name="all", device=shipped_devices()["H800"], devices=8, per_machine=8, between_bandwidth=NETWORK
        )
        problem = Problem(
            graph=single_graph(),
            shapes={"policy": shape("Qwen2.5-1.5B")},
            workload=workload,
            hardware=Hardware(name="8", fleets=(fleet,), factors=factors),
            samples_apart=True,
            freshness=bound,
        )
        costs, units = CostModel(problem), {unit.name: unit for unit in problem.units}
        option = costs.option(units["policy"], "all", 2, Grid(dp=2), 0)
        sampler = replace(option, generate_tp=1)
        decoder = costs.decoder(units[SAMPLER], sampler, "all", 6, 60e9)
        assert decoder is not None
        update = option.seconds[1] + option.seconds[2]
        stage = problem.graph.stages[0]
        if bound == 0:
            seconds[bound] = costs.generate_s(stage, decoder) + update
        else:
            # what the longest row of one batch takes is spread over the batches that run beside it
            latency = (costs.generate_s(stage, decoder) + update) / (bound + 1)
            seconds[bound] = max(costs.steady_s(stage, decoder), update, latency)
    return {bound: seconds[0] / one for bound, one in seconds.items()}


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """A published rollout: how many prompts and answers are begun for each that is kept."""

    prompts: float
    answers: float
    seconds: float
    is_fitted: bool = False


@dataclass(frozen=True, kw_only=True)
class PackedFit:
    """Lengths that explain four of the rows; ``shared``: of their spread, the prompt's part."""

    response: Lengths
    shared: float
    factors: Factors


ROLLPACKER = (
    PackedRow(prompts=1.0, answers=1.0, seconds=82.0, is_fitted=True),
    PackedRow(prompts=1.25, answers=1.25, seconds=47.0, is_fitted=True),
    PackedRow(prompts=1.0, answers=1.125, seconds=77.0),
    PackedRow(prompts=1.0, answers=1.25, seconds=71.0),
    PackedRow(prompts=1.0, answers=1.5, seconds=54.0, is_fitted=True),
    PackedRow(prompts=1.125, answers=1.0, seconds=77.0),
    PackedRow(prompts=1.25, answers=1.0, seconds=72.0),
    PackedRow(prompts=1.5, answers=1.0, seconds=60.0, is_fitted=True),
)
"""Qwen2.5-7B up to 8k on 16 H800, 128 prompts x 8 answers (facts of arXiv 2509.21009)."""


def fit_rollpacker() -> PackedFit:
    """Median, spread and what of it belongs to the prompt, from four rows; launches from the first."""
    best, found = math.inf, None
    for sigma in (0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.8):
        for median in (300, 500, 800, 1200, 1800, 2500):
            for shared in (0.0, 0.15, 0.3, 0.45, 0.6, 0.75):
                response = Lengths(kind="lognormal", limit=8192, median=median, sigma=sigma)
                fit = PackedFit(response=response, shared=shared, factors=Factors(decode_row_s=2e-5))
                times = [predict_rollpacker(row, fit, draws=4) for row in ROLLPACKER if row.is_fitted]
                known = [row.seconds for row in ROLLPACKER if row.is_fitted]
                pace = known[0] / times[0]
                loss = sum(math.log(pace * one / two) ** 2 for one, two in zip(times, known, strict=True))
                loss += 0.1 * math.log(pace) ** 2
                if loss < best:
                    best, found = loss, fit
    assert found is not None
    low, high = 1e-6, 1e-3
    for _ in range(20):
        middle = math.sqrt(low * high)
        found = replace(found, factors=replace(found.factors, decode_launch_s=middle))
        is_fast = predict_rollpacker(ROLLPACKER[0], found) < ROLLPACKER[0].seconds
        low, high = (middle, high) if is_fast else (low, middle)
    return found


def predict_rollpacker(row: PackedRow, fit: PackedFit, draws: int = DRAWS) -> float:
    """Seconds until enough prompts have enough answers, the mean of some draws."""
    factors, response, shared = fit.factors, fit.response, fit.shared
    workload = Workload(prompts=128, samples=8, prompt=Lengths(kind="fixed", limit=200), response=response)
    fleet = Fleet(
        name="all", device=shipped_devices()["H800"], devices=16, per_machine=8, between_bandwidth=NETWORK
    )
    problem = Problem(
        graph=single_graph(),
        shapes={"policy": shape("Qwen2.5-7B")},
        workload=workload,
        hardware=Hardware(name="16", fleets=(fleet,), factors=factors),
    )
    costs = CostModel(problem)
    unit = problem.units[0]
    option = costs.option(unit, "all", 16, Grid(dp=16, is_sharded=True), 1)
    decoder = costs.decoder(unit, option, "all", 16, 45e9)
    assert decoder is not None
    return float(np.mean([_round_s(row, workload, decoder, shared, seed) for seed in range(draws)]))


def _round_s(row: PackedRow, workload: Workload, decoder: Decoder, shared: float, seed: int) -> float:
    """Seconds of one drawn round."""
    prompts, answers = round(128 * row.prompts), round(8 * row.answers)
    lengths = _drawn(workload.response, prompts, answers, shared, seed)
    enough = np.sort(np.sort(lengths, axis=1)[:, 7])[127]
    held = np.minimum(lengths, enough).reshape(-1)
    count = math.ceil(len(held) / decoder.replicas)
    spread = np.sort(held)[:: max(decoder.replicas, 1)][-count:]
    spread = np.append(spread[1:], enough)
    return decoder.prefill_s(prompts / decoder.replicas * 200.0) + drain_s(workload, decoder, np.sort(spread))


def _drawn(response: Lengths, prompts: int, answers: int, shared: float, seed: int) -> NDArray[np.float64]:
    """Lengths [prompts, answers], log-normal and clipped, part of their spread common to a prompt's."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, 7], dtype=np.uint64)))
    common = math.sqrt(shared) * generator.standard_normal((prompts, 1))
    own = math.sqrt(1.0 - shared) * generator.standard_normal((prompts, answers))
    drawn = response.median * np.exp(response.sigma * (common + own))
    return np.clip(drawn, 1.0, float(response.limit))

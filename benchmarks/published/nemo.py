"""NeMo-RL's published steps: one set of factors for four releases, two devices and five models.

    row ─> Problem ─> CostModel ─┬─ in place: generation + scoring + training + refit
                                 └─ ahead:    the planner's period of the same

- Context parallelism counts as tensor parallelism. A prompt has 110 tokens.
- Lengths are log-normal, clipped at the limit, with the published mean; sigma 0.6 of short answers and 0.9 of
  long ones are figures others use for such data.
- Two forward passes, policy and reference; one where a release trains on all rows at once.
- Refit moves whole tensors: the model's bytes over a rate. In place they go through memory that processes
  share, ahead through a broadcast over the network (``stream_weights_via_ipc_zmq`` and
  ``broadcast_weights_for_collective`` of its workers): two rates, higher by one factor since release 0.7.
- Ahead, at most ``ahead`` steps' prompts are begun and not ended, and a prompt counts until its longest
  answer has ended (the semaphore of its ``AsyncTrajectoryCollector``).
- Its recipes for several racks of GB200 say since release 0.7 which nodes must share one (pull request 2612,
  ``cluster.segment_size``). Before, a group's ranks could lie in any rack: a job larger than a rack counts
  as if NVLink ended at a node. How its older runs did lie was not published.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from published.models import shape
from rillflow.graph.graph import Graph, Stage
from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.cost_model.generation import running_rows
from rillflow.planner.factors import Factors
from rillflow.planner.grid import Grid
from rillflow.planner.hardware import Device, Fleet, Hardware, shipped_devices
from rillflow.planner.option import Decoder, Option
from rillflow.planner.problem import SAMPLER, Problem, Unit
from rillflow.planner.schedule import period_s
from rillflow.planner.workload import Lengths, Workload, lengths_of_mean

PROMPT_TOKENS = 110
SIGMA = {"Llama-3.1-8B": 0.6, "DeepSeek-V3": 0.6}
LONG_SIGMA = 0.9
RECOMPUTED = {"Llama-3.1-8B", "DeepSeek-V3", "Qwen3-235B-A22B"}
CACHE_SHARE = {True: 0.6, False: 0.8}
"""Of the memory that the engine may fill: in place, and with devices of its own."""
ENGINE_BYTES = 3e9
NETWORK = 50e9
DOMAIN = {"H100": 8, "GB200": 64}
"""Devices that NVLink joins; of a rack's 72 those that grids use."""
RACK, NODE = 72, 4
"""GB200 of a rack, and of one of its nodes."""
ALIGNED_SINCE = "0.7"
"""Before it nodes of several racks were taken in any order."""
STREAMS_SINCE = "0.5"
"""Before it a weight update waited for the batch."""
FASTER_SINCE = "0.7"
"""The release that moves weights faster."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published step."""

    release: str
    device: str
    model: str
    ahead: int
    devices: int
    rows: int
    trained_at_once: int
    limit: int
    mean: float
    generate_tp: int
    tp: int
    cp: int
    ep: int
    pp: int
    step_s: float
    is_fitted: bool = False

    @property
    def training(self) -> int:
        """Devices that train: all in place, two thirds of the 192, else half."""
        if not self.ahead:
            return self.devices
        return self.devices * 2 // 3 if self.ahead > 1 else self.devices // 2


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A predicted step in seconds."""

    generate: float
    score: float
    train: float
    refit: float
    step: float


def rows() -> list[Row]:
    """All of them."""
    data = tomllib.loads((Path(__file__).parent / "nemo.toml").read_text("utf-8"))
    return [Row(**{**one, "mean": float(one["mean"]), "step_s": float(one["step_s"])}) for one in data["row"]]


FREE: Mapping[str, tuple[float, float, float]] = {
    "train_flops": (0.2, 0.4, 0.6),
    "score_flops": (0.2, 0.45, 0.65),
    "decode_bandwidth": (0.4, 0.7, 0.85),
    "expert_flops": (0.15, 0.4, 0.8),
    "launch_s": (5e-5, 3e-4, 2e-3),
    "expert_launch_s": (2e-4, 2e-3, 6e-3),
    "decode_launch_s": (1e-5, 3e-5, 3e-4),
    "decode_row_s": (1e-6, 2e-5, 1.5e-4),
    "collective_s": (5e-6, 2e-5, 6e-5),
    "between_collective_s": (2e-5, 6e-5, 3e-4),
    "host_links": (0.1, 0.3, 0.9),
    "step_s": (0.5, 4.0, 12.0),
    "refit": (10e9, 35e9, 200e9),
    "refit_apart": (10e9, 35e9, 200e9),
    "refit_gain": (1.0, 1.5, 4.0),
}
"""Least, expected and most of what is fitted."""
FIXED = Factors(decode_flops=0.4)


def first() -> dict[str, float]:
    """What is expected before any row was seen."""
    return {name: bounds[1] for name, bounds in FREE.items()}


def predict(row: Row, values: Mapping[str, float]) -> Parts:
    """Seconds of a row's step."""
    factors = replace(FIXED, **{name: value for name, value in values.items() if "refit" not in name})
    problem = _problem(row, factors)
    costs, units = CostModel(problem), {unit.name: unit for unit in problem.units}
    ways, devices = row.tp * row.cp, row.training
    grid = Grid(dp=devices // ways // row.pp, pp=row.pp, tp=ways, ep=min(row.ep, devices // row.pp))
    option = costs.option(units["policy"], "all", devices, grid, 0)
    sampler = units[SAMPLER] if row.ahead else units["policy"]
    decoder = _decoder(row, costs, sampler, replace(option, generate_tp=row.generate_tp))
    stage = problem.graph.stages[0]
    score = option.seconds[1] * (1 if row.trained_at_once > 512 else 2)
    update, drained = score + option.seconds[2], costs.generate_s(stage, decoder)
    refit = 2.0 * sampler.shape.parameters / _refit_rate(row, values)
    if row.ahead:
        generate = drained
        if row.release >= STREAMS_SINCE:
            generate = max(costs.steady_s(stage, decoder), _held_s(row, problem.workload, decoder))
        latency = drained + update + refit
        step = period_s((generate + refit, update + refit), latency_s=latency, freshness=row.ahead)
    else:
        generate, step = drained, drained + update + refit
    overhead = factors.step_s
    return Parts(
        generate=generate,
        score=score,
        train=option.seconds[2],
        refit=refit + overhead,
        step=step + overhead,
    )


def _decoder(row: Row, costs: CostModel, sampler: Unit, option: Option) -> Decoder:
    """A replica, its cache in the share of the memory that the engine may fill."""
    generating = row.devices - row.training if row.ahead else row.devices
    memory = shipped_devices()[row.device].memory_bytes * CACHE_SHARE[not row.ahead]
    room = memory - 2.0 * sampler.shape.parameters / row.generate_tp - ENGINE_BYTES
    decoder = costs.decoder(sampler, option, "all", generating, room)
    assert decoder is not None, row
    return decoder


def _held_s(row: Row, workload: Workload, decoder: Decoder) -> float:
    """Seconds of a step's rows if prompts hold their places until their longest answers have ended.

    There are ``ahead`` steps' places. Each is held for the tokens that the longest of a prompt's answers has
    in the median, while on average mean over longest of its rows run.
    """
    response = workload.response
    longest = response.quantile(0.5 ** (1.0 / workload.samples))
    begun = row.ahead * row.rows / decoder.replicas
    running = max(int(min(begun * response.mean / longest, running_rows(workload, decoder))), 1)
    context = running * (workload.prompt.mean + response.mean_square / (2 * response.mean))
    return longest * decoder.advance_s(running, context, 1.0) / row.ahead


def _refit_rate(row: Row, values: Mapping[str, float]) -> float:
    """Bytes a second of a model on their way to generation."""
    rate = values["refit_apart"] if row.ahead else values["refit"]
    return rate * values["refit_gain"] if row.release >= FASTER_SINCE else rate


def fit(fitted: Sequence[Row], *, pull: float = 0.01, sweeps: int = 7) -> dict[str, float]:
    """Factors that explain some rows: coordinate steps on the squared logarithm of each error.

    ``pull`` holds what the rows do not show near what is expected.
    """
    values = first()
    best, step = _loss(values, fitted, pull), 0.5
    for _ in range(sweeps):
        for name, (least, _, most) in FREE.items():
            for change in (step, -step):
                while True:
                    moved = min(max(values[name] * math.exp(change), least), most)
                    tried = {**values, name: moved}
                    loss = _loss(tried, fitted, pull)
                    if loss >= best - 1e-9:
                        break
                    values, best = tried, loss
        step *= 0.6
    return values


def _loss(values: Mapping[str, float], fitted: Sequence[Row], pull: float) -> float:
    errors = sum(math.log(predict(row, values).step / row.step_s) ** 2 for row in fitted)
    return errors + pull * sum(math.log(values[name] / FREE[name][1]) ** 2 for name in FREE)


def _problem(row: Row, factors: Factors) -> Problem:
    samples = 16 if row.model == "DeepSeek-V3" else 32
    workload = Workload(
        prompts=row.rows // samples,
        samples=samples,
        prompt=Lengths(kind="fixed", limit=PROMPT_TOKENS),
        response=_lengths(row.mean, row.limit - PROMPT_TOKENS, SIGMA.get(row.model, LONG_SIGMA)),
        minibatches=row.rows // row.trained_at_once,
        tokens_per_micro_batch=row.limit,
    )
    return Problem(
        graph=_GRAPH,
        shapes={"policy": _shape(row.model)},
        workload=workload,
        hardware=Hardware(name=row.device, fleets=(_fleet(row.device, _joined(row)),), factors=factors),
        samples_apart=row.ahead > 0,
        freshness=row.ahead,
        offloads=not row.ahead,
        recomputes=row.model in RECOMPUTED,
    )


def single_graph() -> Graph:
    """A step of one model: it generates, scores, trains and publishes."""
    return _GRAPH


def _stage(index: int, endpoint: str) -> Stage:
    return Stage(index=index, role="policy", endpoint=endpoint, reads=(), writes=())


_GRAPH = Graph(
    name="policy alone",
    stages=(_stage(0, "generate"), _stage(1, "logprobs"), _stage(2, "update"), _stage(3, "publish")),
    edges=(),
)
_shape = cache(shape)
_lengths = cache(lengths_of_mean)


def _joined(row: Row) -> int:
    """Devices that NVLink joins as the row's ranks were dealt out."""
    is_scattered = row.device == "GB200" and row.devices > RACK and row.release < ALIGNED_SINCE
    return NODE if is_scattered else DOMAIN[row.device]


@cache
def _fleet(device: str, joined: int) -> Fleet:
    known: Mapping[str, Device] = shipped_devices()
    return Fleet(
        name="all",
        device=known[device],
        devices=1024,
        per_machine=joined,
        between_bandwidth=NETWORK,
    )

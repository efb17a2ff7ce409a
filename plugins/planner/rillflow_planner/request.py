"""Request: build a planning problem from command-line options instead of a recipe and a cluster file.

--model config.json --gpus 64xH100 --algorithm grpo --response mean=2000,max=8192 ─> Statement

Needs no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from rillflow.errors import ModelError, PlanError, nearest
from rillflow.graph.graph import Edge, Graph, Stage
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedUnit
from rillflow.placement.tables import YES, Reader, one_of, values, whole
from rillflow_planner.cost_model.options import LAYOUTS
from rillflow_planner.hardware import Hardware, read_hardware
from rillflow_planner.model_shape import ModelShape, read_shape
from rillflow_planner.problem import Problem, Statement, assumed
from rillflow_planner.workload import Lengths, Workload, lengths_of_mean, require_within

SIGMA = 0.9
"""Default sigma of log-normal lengths, typical for answers with reasoning."""
LINK = "50 GB/s"
"""Default share of the network per device: one 400 Gb/s card each."""
MACHINE = 8
"""Number of devices of a machine."""
_GRAPHS = Path(__file__).parent / "graphs.json"
_SAID = re.compile(r"\s*(mean|median|max|sigma|p[1-9][0-9]?)\s*=\s*([0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)\s*")
_TRAINED = ("critic", "cost_critic")
UNASKED = "gpu"
"""Factor set of Rillflow's own plans on accelerators, on which no run of Rillflow was measured."""
_SPOKEN = {"true": True, "false": False}
SETTINGS: Mapping[str, Reader] = {
    "policy.gradient_checkpointing": YES,
    "policy.model.dtype": one_of(("float8", "bfloat16", "float32")),
    "policy.tokens_per_micro_batch": whole(1),
}
"""Settings that ``--set`` changes without a recipe."""
_AXES: Mapping[str, Reader] = dict.fromkeys(
    ("tp", "pp", "cp", "ep", "generate", "separate", "streams"), whole(1)
) | {"fsdp": whole(0, 1)}


def state_request(
    *,
    model: Path,
    gpus: str,
    algorithm: str,
    response: str,
    prompt: str,
    prompts: int,
    samples: int,
    minibatches: int,
    like: str,
    layout: str,
    between: str,
    price: str,
    reward_seconds: float,
    steps: int,
    settings: Sequence[str] = (),
    freshness: float = 0,
) -> Statement:
    """Return the problem for the options of ``rillflow plan --help``, with its assumptions.

    Args:
        settings: changed settings, ``KEY=VALUE``, among ``SETTINGS``.
        freshness: bound of a given layout.

    Raises:
        PlanError: the options contradict each other or are invalid.
    """
    require_within("--steps", steps, 0, 1_000_000_000)
    require_within("--reward-seconds", reward_seconds, 0, 86_400)
    hardware, changed = cluster(gpus, like or UNASKED, between or LINK, price), set_of(settings)
    graph = stack_graph(hardware, like, algorithm, minibatches, layout) if like else graph_of(algorithm)
    rows, answers = lengths(prompt, "--prompt"), lengths(response, "--response")
    packed = rows.limit + answers.limit if like else Workload.tokens_per_micro_batch
    workload = Workload(
        prompts=prompts,
        samples=samples,
        prompt=rows,
        response=answers,
        minibatches=minibatches,
        function_s=reward_seconds,
        tokens_per_micro_batch=changed.get("policy.tokens_per_micro_batch", packed),
        dtype=changed.get("policy.model.dtype", "bfloat16"),
    )
    problem = Problem(
        graph=graph,
        shapes=_shapes(graph, open_shape(model)),
        workload=workload,
        hardware=hardware,
        layouts=LAYOUTS[hardware.published.layouts if like and hardware.published else "rillflow"],
        recomputes=changed.get("policy.gradient_checkpointing", True),
    )
    return Statement(
        problem=problem,
        assumptions=tuple(_assumed(problem, response, between)),
        steps=steps,
        stack=like,
        placed=replace(layout_of(layout, hardware, freshness), name=algorithm) if layout else None,
        may_recompute="policy.gradient_checkpointing" not in changed,
    )


def _shapes(graph: Graph, shape: ModelShape) -> dict[str, ModelShape]:
    models = [role for role in graph.roles if role not in ("reward", "cost", "controller")]
    return {role: replace(shape, is_scalar=role in _TRAINED) for role in models}


def _assumed(problem: Problem, response: str, between: str) -> Iterator[str]:
    """Yield a sentence for every assumption of the short form."""
    if len(problem.shapes) > 1:
        yield f"{' and '.join(problem.shapes)}: all have the shape of the given model"
    otherwise = "" if "sigma" in response else "set sigma=... or p90=... in --response to change it"
    yield from assumed(problem, lengths=otherwise, seconds="set --reward-seconds to its seconds per row")
    if not between and problem.hardware.devices > MACHINE:
        yield f"{LINK} per device between machines; set --between to change it"


def set_of(settings: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``KEY=VALUE`` settings.

    Raises:
        PlanError: a key is not in ``SETTINGS``, or its value is invalid.
    """
    found: dict[str, Any] = {}
    for one in settings:
        key, _, value = (part.strip() for part in one.partition("="))
        found[key] = _SPOKEN.get(value, int(value) if value.isdecimal() else value)
    return values(found, SETTINGS, "--set without a recipe")


def stack_graph(hardware: Hardware, like: str, algorithm: str, minibatches: int, layout: str = "") -> Graph:
    """Return the step of a published stack: the policy's stages one after the other.

    A stack whose steps train once on all rows may take the policy's log-probabilities from training: then
    its step for this case is listed as ``NAME, once``; ``NAME, separate`` is a step with a separate sampler.

    Raises:
        PlanError: no steps of this stack or algorithm were published.
    """
    known = hardware.published.steps if hardware.published else {}
    once = f"{algorithm}, once"
    stages = known.get(once if minibatches == 1 and once in known else algorithm)
    stages = known.get(f"{algorithm}, separate" if "separate" in layout else "", stages)
    if stages is None:
        why = (
            f"published steps of {like} are of {', '.join(known)}"
            if known
            else "no steps of it were published"
        )
        fix = "leave out --like, and Rillflow's own step is planned"
        raise PlanError(f"--like is {like} and --algorithm {algorithm!r}", why=why, fix=fix)
    names = [stage.split(".") for stage in stages]
    return _graph(algorithm, names, [(index, index + 1, ()) for index in range(len(names) - 1)])


def _graph(name: str, stages: Sequence[Sequence[str]], edges: Sequence[Any]) -> Graph:
    """Return the graph of stages (role, endpoint) and edges (source, destination, fields)."""
    return Graph(
        name=name,
        stages=tuple(
            Stage(index=index, role=role, endpoint=endpoint, reads=(), writes=())
            for index, (role, endpoint) in enumerate(stages)
        ),
        edges=tuple(
            Edge(source=source, destination=destination, fields=tuple(fields))
            for source, destination, fields in edges
        ),
    )


def layout_of(text: str, hardware: Hardware, freshness: float) -> Plan:
    """Return the plan of one model on a given layout, such as ``tp=4,pp=2,generate=4,separate=64``.

    Raises:
        PlanError: unknown axes, or devices that the axes do not divide.
    """
    parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
    said = values({key: int(one) if one.isdecimal() else one for key, _, one in parts}, _AXES, "--layout")
    axes = {axis: said.get(axis, 1) for axis in ("tp", "pp", "cp")}
    fleet, apart, generate = hardware.fleets[0], said.get("separate", 0), said.get("generate", axes["tp"])
    ways, trained, streams = math.prod(axes.values()), fleet.devices - apart, said.get("streams", 0)
    if (
        trained < 1
        or trained % ways
        or (apart or trained) % generate
        or bool(apart) != bool(freshness or streams)
    ):
        raise PlanError(
            f"--layout is {text!r}, for {fleet.devices} devices and freshness {freshness:g}",
            why=f"{trained} devices train in groups of {ways}, and {apart or trained} generate in groups of "
            f"{generate}; above freshness 0, or with streams=N, generation has separate devices (separate=N)",
            fix="choose axes that divide the devices, such as tp=4,pp=2,generate=4",
        )
    grid = Grid(dp=trained // ways, ep=said.get("ep", 1), is_sharded=bool(said.get("fsdp", 0)), **axes)
    pools = [fleet.pool("train", trained)]
    units = {"policy": PlannedUnit(pool="train", grid=grid, generate_tp=0 if apart else generate)}
    if apart:
        pools.append(fleet.pool("sample", apart))
        own = Grid(dp=apart // generate, tp=generate)
        units[SAMPLER] = PlannedUnit(pool="sample", grid=own, generate_tp=generate)
    return Plan(name="policy", pools=tuple(pools), units=units, freshness=freshness, streams=streams)


def open_shape(file: Path, name: str = "") -> ModelShape:
    """Read the sizes of a model from its config.json, or from the folder with that file.

    Raises:
        ModelError: the file cannot be read.
        PlanError: a size is missing.
    """
    file = file / "config.json" if file.is_dir() else file
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read", why=str(error), fix="name a config.json") from None
    if not isinstance(found, Mapping):
        raise ModelError(f"{file} is not a config.json", why="it does not contain a JSON object")
    return read_shape(found, name or file.parent.name or file.name)


def graph_of(algorithm: str) -> Graph:
    """Return the step of a shipped algorithm, traced from its recipe.

    Raises:
        PlanError: no shipped algorithm has this name.
    """
    known = json.loads(_GRAPHS.read_text("utf-8"))
    if algorithm not in known:
        why = f"shipped algorithms are {', '.join(known)}"
        raise PlanError(f"--algorithm is {algorithm!r}", why=why, fix=nearest(algorithm, known))
    return _graph(algorithm, known[algorithm]["stages"], known[algorithm]["edges"])


def cluster(gpus: str, like: str, between: str, price: str) -> Hardware:
    """Return a cluster of shipped devices on machines of eight.

    Raises:
        PlanError: ``gpus`` has no count, or names an unknown device.
    """
    found = re.fullmatch(r"\s*([1-9][0-9]*)\s*[x*]\s*(\S+)\s*", gpus)
    if found is None:
        why = "it must be a number of devices, 1 or more, and their type"
        raise PlanError(f"--gpus is {gpus!r}", why=why, fix="write it like --gpus 64xH100")
    count, kind = int(found[1]), found[2]
    fleet = {"device": kind, "devices": count, "per_machine": min(count, MACHINE), "between": between}
    fleet |= {"price": price} if price else {}
    data = {"name": f"{count} x {kind}", "like": like, "machine_type": [fleet]}
    return read_hardware(data, "the --gpus cluster")


def lengths(text: str, where: str) -> Lengths:
    """Parse lengths: ``mean=2000,max=8192`` (``median``, ``sigma``, ``p90`` too), one number, or a file.

    A file has one length per line, as a number or as ``{"length": ...}``.

    Raises:
        PlanError: the values contradict each other or are invalid.
    """
    if text.strip().isdecimal():
        return Lengths(kind="fixed", limit=int(text))
    if "=" not in text:
        return _measured(Path(text), where)
    said: dict[str, float] = {}
    for part in text.split(","):
        found = _SAID.fullmatch(part)
        if found is None or found[1] in said or not float(found[2]):
            why = "each of mean, median, max, sigma and p1 to p99 may be given once, as a number above 0"
            fix = nearest(part.partition("=")[0].strip(), ("mean", "median", "max", "sigma", "p90"))
            raise PlanError(f"{where} has {part.strip()!r}", why=why, fix=fix)
        said[found[1]] = float(found[2])
    return _lognormal(said, where)


def _lognormal(said: Mapping[str, float], where: str) -> Lengths:
    """Return the clipped log-normal with a limit, a mean or median, and a sigma or percentile."""
    middle = next((key for key in ("mean", "median") if key in said), "")
    more = [key for key in said if key not in ("max", middle)]
    if "max" not in said or not middle or len(more) > 1 or "median" in more:
        raise PlanError(
            f"{where} has {', '.join(said)}",
            why="a log-normal has max, one of mean and median, and at most one of sigma and p1 to p99",
            fix="write it like mean=2000,sigma=0.9,max=8192",
        )
    limit, sigma = int(said["max"]), said.get("sigma", SIGMA)
    for key in (middle, *more):
        if key != "sigma" and said[key] > limit:
            raise PlanError(f"{where} has {key} {said[key]:g} and max {limit}", why="no length exceeds max")
    if more and more != ["sigma"]:
        times, share = said[more[0]] / said[middle], NormalDist().inv_cdf(int(more[0][1:]) / 100)
        sigma = math.log(times) / share if share and times != 1.0 else 0.0
        if not 0.0 <= sigma <= 5.0:
            why = f"it contradicts {middle} {said[middle]:g}"
            raise PlanError(f"{where} has {more[0]} {said[more[0]]:g}", why=why)
    if middle == "mean":
        return lengths_of_mean(said["mean"], limit, sigma)
    return Lengths(kind="lognormal", limit=limit, median=said["median"], sigma=sigma)


def _measured(file: Path, where: str) -> Lengths:
    try:
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
        found = sorted(int(row["length"] if isinstance(row, Mapping) else row) for row in rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{where} is {str(file)!r}",
            why=f"it is not a file with one length per line: {error}",
            fix='write mean=2000,max=8192, or name a file with a number or {"length": ...} on each line',
        ) from None
    return Lengths(kind="measured", limit=max(found, default=0), values=tuple(found))

"""Request: state a step and devices that options of ``rillflow plan`` describe, and the question about them.

--gpus, or a cluster file ─ hardware_of ─> Hardware ─┬─ describe: --model, --algorithm, ... ─┬─> Statement
                                                     └─ recipe_problem: a recipe ────────────┘      │
the question ready to plan <── ask: --like, --layout, --tokens-per-pass, --reward-seconds ──────────┘

Needs no torch.
"""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from rillflow.errors import ModelError, PlanError, nearest
from rillflow.graph.graph import Edge, Graph, Stage
from rillflow.placement.tables import YES, Reader, one_of, read, values, whole
from rillflow_planner import units
from rillflow_planner.cost_model.options import LAYOUTS
from rillflow_planner.given_layout import layout_of
from rillflow_planner.hardware import (
    EngineFactors,
    Hardware,
    read_hardware,
    require_slower,
    shipped_devices,
    shipped_stacks,
)
from rillflow_planner.model_config import read_shape
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.problem import OWN, Problem, Statement, Work, assumed
from rillflow_planner.workload import Lengths, Packing, Workload, lengths_of_mean, require_within, sharing

SIGMA = 0.9
"""Default sigma of log-normal lengths, typical for answers with reasoning."""
LINK = "50 GB/s"
"""Default share of the network per device: one 400 Gb/s card each."""
MOST_DEVICES = 1_000_000
"""Largest number of devices that is searched."""
_GRAPHS = Path(__file__).parent / "graphs.json"
_SAID = re.compile(r"\s*(mean|median|max|sigma|p[1-9][0-9]?)\s*=\s*([0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)\s*")
_TRAINED = ("critic", "cost_critic")
UNASKED = "gpu"
"""Factor set of Rillflow's own plans on accelerators."""
CHECKPOINTING, PACKED = "policy.gradient_checkpointing", "policy.tokens_per_micro_batch"
ROWS_AT_ONCE = "rollout.max_rows"
SETTINGS: Mapping[str, Reader] = {
    CHECKPOINTING: YES,
    "policy.model.dtype": one_of(("float8", "bfloat16", "float32")),
    PACKED: whole(1),
    ROWS_AT_ONCE: whole(1),
}
"""Settings of a recipe that ``--set`` changes without one."""
MAX_ROWS = 256
"""Default of ``rollout.max_rows``."""
OF_A_RECIPE = {
    "model": "policy.model.path",
    "algorithm": "algorithm.name",
    "prompts": "algorithm.prompts_per_step",
    "samples": "algorithm.samples_per_prompt",
    "minibatches": "algorithm.minibatches",
    "steps": "algorithm.steps",
}
"""Options that describe a step in place of a recipe, and the recipe's settings."""
OF_A_CLUSTER = ("gpus", "per_machine", "between", "price")
"""Options that describe devices in place of a cluster file."""
_LEAVE = "leave one of the two out"
_EXCLUDED = {
    "cluster": (OF_A_CLUSTER, "the cluster file describes its devices", "change the file, or pass --gpus"),
    "lengths": (("response", "prompt", "reward_seconds"), "the run gives lengths and seconds", _LEAVE),
    "layout": (("objective", "deadline", "separate_in_step"), "a given layout is not searched", _LEAVE),
}
"""Options that exclude others, with the reason, and what to do."""


def require_compatible(arguments: Namespace) -> None:
    """Raise an error for options that are missing, or of which one would be ignored."""
    every = vars(arguments).items()
    given = {name: value for name, value in every if value is not None and value is not False}
    for what, why, fix in _contradictions(arguments, given):
        raise PlanError(what, why=why, fix=fix)


def _contradictions(arguments: Namespace, given: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what the options contradict or lack, why that cannot be, and what to do."""
    has_recipe = "recipe" in given
    for name, setting in OF_A_RECIPE.items() if has_recipe else ():
        if name in given:
            what = f"{_option(name)} is {given[name]}, and {arguments.recipe} is a recipe"
            fix = f"pass --set {setting}={given[name]}, or leave the recipe out"
            yield what, f"a recipe states {setting} itself", fix
    for name, (others, why, fix) in _EXCLUDED.items():
        for other in others:
            if name in given and other in given:
                yield f"{_option(name)} and {_option(other)} are given together", why, fix
    if "separate_in_step" in given and 0 not in arguments.freshness:
        what = "--separate-in-step is given, and --freshness has no 0"
        yield what, "it adds plans of bound 0", "add 0 to --freshness, or leave --separate-in-step out"
    if "dir" in given and not has_recipe:
        yield "--dir is given without a recipe", "nothing is run", "leave --dir out"
    if given.get("objective") == "cost" and "gpus" in given and "price" not in given:
        yield "--objective is cost without --price", "a cost follows from a price", 'add --price "2.5 $/h"'
    kinds = [] if has_recipe else [("--model",), ("--algorithm",), ("--response", "--lengths")]
    kinds.append(("--cluster", "--gpus"))
    missing = [" or ".join(kind) for kind in kinds if not any(one[2:] in given for one in kind)]
    if missing:
        yield (
            f"the command has no {', no '.join(missing)}",
            "it needs a recipe, or --model, --algorithm and --response; and --cluster or --gpus",
            "run rillflow plan RECIPE --cluster FILE, or rillflow plan --model config.json "
            "--gpus 64xH100 --algorithm NAME --response mean=2000,max=8192",
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def describe(
    arguments: Namespace, hardware: Hardware, response: Lengths | None, prompt: Lengths | None
) -> Statement:
    """Return the step that the options describe in place of a recipe.

    Args:
        arguments: options of ``rillflow plan``.
        hardware: the devices.
        response: lengths of responses; None to measure all lengths in the run of ``--lengths``.
        prompt: lengths of prompts; None for the default.

    Raises:
        PlanError: an option is invalid.
    """
    minibatches = 1 if arguments.minibatches is None else arguments.minibatches
    algorithm = arguments.algorithm.partition(",")[0] if arguments.like else arguments.algorithm
    graph = graph_of(algorithm, minibatches)
    changed = values(pairs_of(arguments.set), SETTINGS, "--set without a recipe")
    rows = {
        "prompts": 512 if arguments.prompts is None else arguments.prompts,
        "samples": 8 if arguments.samples is None else arguments.samples,
        "minibatches": minibatches,
        "tokens_per_micro_batch": changed.get(PACKED, Workload.tokens_per_micro_batch),
        "dtype": changed.get("policy.model.dtype", "bfloat16"),
        "rows_at_once": changed.get(ROWS_AT_ONCE, MAX_ROWS),
    }
    if response is None:
        from rillflow_planner.recipe_rows import measured

        workload = measured(rows, arguments.lengths)
    else:
        workload = sharing(Workload(prompt=prompt or lengths("256", "--prompt"), response=response, **rows))
    shape = open_shape(arguments.model)
    roles = [role for role in graph.roles if role not in ("reward", "cost", "controller")]
    alike = f"{' and '.join(roles)}: all have the shape of the given model"
    problem = Problem(
        graph=graph,
        shapes={role: replace(shape, is_scalar=role in _TRAINED) for role in roles},
        workload=workload,
        hardware=hardware,
        recomputes=changed.get(CHECKPOINTING, True),
    )
    return Statement(
        problem=problem,
        assumptions=(alike,) if len(roles) > 1 else (),
        steps=arguments.steps or 0,
        may_recompute=CHECKPOINTING not in changed,
        named=frozenset(changed),
    )


def ask(step: Statement, arguments: Namespace) -> Statement:
    """Return the question that the options ask about a step, with its assumptions.

    Raises:
        PlanError: the options contradict the step, the devices, or each other.
    """
    for name in ("scoring_tokens", "steps"):
        if vars(arguments)[name] is not None:
            require_within(_option(name), vars(arguments)[name], 1, 1_000_000_000)
    problem, like = step.problem, arguments.like or ""
    if like:
        is_apart = "separate" in (arguments.layout or "") or min(arguments.freshness) > 0
        algorithm = arguments.algorithm or problem.graph.name
        problem = of_stack(problem, like, algorithm, step.named, is_apart=is_apart)
    elif arguments.scoring_tokens is not None:
        why = "Rillflow scores with micro-batches of the size that it trains with"
        raise PlanError("--scoring-tokens is given without --like", why=why, fix=f"set {PACKED}")
    if arguments.reward_seconds and not any(
        problem.work(one) is Work.FUNCTION for one in problem.graph.stages
    ):
        why = f"{problem.graph.name} has no reward function"
        raise PlanError(f"--reward-seconds is {arguments.reward_seconds:g}", why=why, fix="leave it out")
    changes = {
        "tokens_per_pass": arguments.tokens_per_pass,
        "function_s": arguments.reward_seconds,
        "scoring_tokens": arguments.scoring_tokens,
    }
    known = {name: value for name, value in changes.items() if value is not None}
    problem = replace(problem, workload=replace(problem.workload, **known))
    placed = layout_of(arguments.layout, problem, arguments.freshness, like) if arguments.layout else None
    assumptions = (*step.assumptions, *_assumed(problem, arguments))
    return replace(step, problem=problem, assumptions=assumptions, stack=like, placed=placed)


def of_stack(
    problem: Problem, like: str, algorithm: str, named: Container[str], *, is_apart: bool
) -> Problem:
    """Return the policy's step as a published stack makes it, with its own defaults of settings not named."""
    workload, published = problem.workload, problem.hardware.published
    packed, at_once = workload.prompt.limit + workload.response.limit, Workload.rows_at_once
    graph = stack_graph(problem.hardware, like, algorithm, workload.minibatches, is_apart=is_apart)
    return replace(
        problem,
        graph=graph,
        shapes={"policy": problem.shapes["policy"]},
        workload=replace(
            workload,
            packing=Packing(),
            tokens_per_micro_batch=workload.tokens_per_micro_batch if PACKED in named else packed,
            rows_at_once=workload.rows_at_once if ROWS_AT_ONCE in named else at_once,
        ),
        layouts=LAYOUTS[published.layouts if published else "rillflow"],
    )


def _assumed(problem: Problem, arguments: Namespace) -> Iterator[str]:
    """Yield a sentence for every assumption that an option replaces."""
    spread = "set sigma=... or p90=... in --response to change it"
    told = "" if re.search("sigma|p[1-9]", arguments.response or "") else spread
    otherwise = told if arguments.response else "set --response, or measure with --lengths RUN"
    yield from assumed(problem, lengths=otherwise, seconds="set --reward-seconds to its seconds per row")
    fleet = problem.hardware.fleets[0]
    if arguments.gpus and not arguments.between and fleet.devices > fleet.per_machine:
        rate = f"{fleet.between_bandwidth / 1e9:g} GB/s"
        yield f"{rate} per device between machines; set --between to change it"
    if arguments.gpus and not arguments.per_machine and fleet.device.rack:
        yield f"{fleet.per_machine} devices are joined by NVLink; set --per-machine to change it"


def pairs_of(settings: Sequence[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` settings with numbers, true and false as such, and other values as text.

    Raises:
        PlanError: a key is given twice.
    """
    said: dict[str, Any] = {}
    for one in settings:
        key, _, value = (part.strip() for part in one.partition("="))
        if key in said:
            raise PlanError(f"{key} is given twice", why="one value applies", fix=_LEAVE)
        try:
            said[key] = json.loads(value)
        except ValueError:
            said[key] = value
    return said


def stack_graph(hardware: Hardware, like: str, algorithm: str, minibatches: int, *, is_apart: bool) -> Graph:
    """Return the step of a published stack: the policy's stages one after the other.

    A stack whose steps train once on all rows may take the policy's log-probabilities from training: then
    its step for this case is listed as ``NAME, once``; ``NAME, separate`` is a step with a separate sampler.

    Raises:
        PlanError: no steps of this stack or algorithm were published.
    """
    known = hardware.published.steps if hardware.published else {}
    once = f"{algorithm}, once"
    stages = known.get(once if minibatches == 1 and once in known else algorithm)
    stages = known.get(f"{algorithm}, separate" if is_apart else "", stages)
    if stages is None:
        why = (
            f"published steps of {like} are of {', '.join(dict.fromkeys(one.split(',')[0] for one in known))}"
            if known
            else "no steps of it were published"
        )
        fix = "leave out --like, and Rillflow's own step is planned"
        raise PlanError(f"--like is {like} and the algorithm {algorithm!r}", why=why, fix=fix)
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


def graph_of(algorithm: str, minibatches: int = 0) -> Graph:
    """Return the step of a shipped algorithm, traced from its recipe.

    With several minibatches, a step may compute the log-probabilities of the policy that it began with.

    Args:
        algorithm: its name.
        minibatches: optimiser steps per pass; 0 for those of its recipe.

    Raises:
        PlanError: no shipped algorithm has this name.
    """
    known = json.loads(_GRAPHS.read_text("utf-8"))
    names = [name for name in known if "," not in name]
    if algorithm not in names:
        why = f"shipped algorithms are {', '.join(names)}"
        raise PlanError(f"--algorithm is {algorithm!r}", why=why, fix=nearest(algorithm, names))
    case = algorithm + ("" if not minibatches else ", once" if minibatches == 1 else ", often")
    traced = known[case if case in known else algorithm]
    return _graph(algorithm, traced["stages"], traced["edges"])


def cluster(gpus: str, like: str, **more: Any) -> dict[str, Any]:
    """Return the content of a cluster file for shipped devices.

    Args:
        gpus: number and type of devices.
        like: factor set; empty for Rillflow's own. A stack that does not place its ranks by rack joins only
            the devices of a node.
        **more: ``per_machine``, ``between`` and ``price`` if given.

    Raises:
        PlanError: ``gpus`` has no count or an unknown device, or a value is invalid.
    """
    said = re.fullmatch(r"\s*([1-9][0-9]{0,8})\s*[x*]\s*(\S+)\s*", gpus)
    devices, stacks = shipped_devices(), shipped_stacks()
    if said is None or said[2] not in devices:
        known = f"it must be a number of devices, 1 or more, and their type: {', '.join(devices)}"
        fix = "write it like --gpus 64xH100" if said is None else nearest(said[2], devices)
        raise PlanError(f"--gpus is {gpus!r}", why=known, fix=fix)
    if like:
        one_of(stacks)(like, "--like")
    for name, reader in (("price", units.PRICE), ("per_machine", whole(1))):
        if more.get(name) is not None:
            reader(more[name], _option(name))
    count, device = int(said[1]), devices[said[2]]
    like = like or (OWN if device.name == "cpu" else UNASKED)
    usual = LINK if units.RATE(LINK, "") <= device.memory_bandwidth else f"{device.inside_bandwidth:g} B/s"
    between = more.get("between") or usual
    rate = units.RATE(between, "--between")
    require_slower(rate, device.memory_bandwidth, "--between, the link between machines,")
    require_within("the number of --gpus", count, 1, MOST_DEVICES)
    joined = device.rack or device.machine
    if count > joined and stacks[like].engine.scatters:
        joined = device.machine
    joined = min(count, more.get("per_machine") or joined)
    if count % joined:
        raise PlanError(
            f"--gpus is {gpus!r}, and a machine has {joined}",
            why="all machines have the same number of devices",
            fix=f"plan for {count // joined * joined} or {-(-count // joined) * joined} devices, or set "
            f"--per-machine to a divisor of {count}",
        )
    fleet = {"device": device.name, "devices": count, "per_machine": joined, "between": between}
    fleet |= {"price": more["price"]} if more.get("price") else {}
    return {"name": f"{count} x {device.name}", "like": like, "machine_type": [fleet]}


def hardware_of(arguments: Namespace, file: Mapping[str, Any] | None) -> Hardware:
    """Return the devices of a cluster file's content, or of ``--gpus``, with ``--like`` and ``--engine``."""
    where = str(arguments.cluster or f"--gpus {arguments.gpus}")
    if file is None:
        more = {name: vars(arguments)[name] for name in ("per_machine", "between", "price")}
        file = cluster(arguments.gpus, arguments.like or "", **more)
    stack = {"like": arguments.like} if arguments.like else {}
    changes = pairs_of(arguments.engine)
    read(EngineFactors, changes, "--engine", EngineFactors())
    engine = {"engine": {**file.get("engine", {}), **changes}} if changes else {}
    return read_hardware({**file, **stack, **engine}, where)


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

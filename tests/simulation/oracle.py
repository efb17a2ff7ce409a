"""Oracle: check that a run directory is that of a correct run. It reads the files with its own code.

metrics, evaluations     every step once, in order; every due evaluation once
rollouts, given_up       every group of the stream in exactly one step, whole; no token older than the bound
the same, replayed       each token is the one that the weights of its version sample; the rows of all steps,
                         added up in order, give the weights of the last checkpoint, bit for bit
digests, manifests       every line and file matches its digest
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from tests.simulation.roles import Numbers, drawn, followed, key_of, trained
from tests.simulation.world import Scenario, order_of_prompts

_PART = re.compile(r"step-(\d+)-(\d+)-of-(\d+)\.safetensors")
TIMES = {"run/step_seconds/mean", "flight/waited_seconds/mean"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trained row."""

    id: tuple[int, int, int]
    tokens: Sequence[int]
    versions: Sequence[int]
    advantage: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results that two runs of one scenario must have in common."""

    numbers: Sequence[Mapping[str, Any]]
    """Every step's metrics without times."""
    evaluations: Sequence[Mapping[str, Any]]
    """Every evaluation without its time."""
    weights: bytes
    """The bits of the weights of the last checkpoint."""
    rows: Mapping[int, Sequence[Row]]
    """Trained rows by step, in order."""


def problems(
    run: Path, scenario: Scenario, *, is_fresher: bool = False, may_lose: bool = False, errors: int = 0
) -> list[str]:
    """Return everything that is wrong with a finished run; empty for a correct one.

    Args:
        run: its directory.
        scenario: its settings.
        is_fresher: True if some steps may be sampled by newer weights than without a fault.
        may_lose: True if a dead rank or a failed disk may have lost the rollouts of a saved step; the run
            then has recorded them as lost.
        errors: starts that ended with an error. Each of them may have lost one evaluation, because open steps
            are saved without it.
    """
    try:
        found = [*_problems(run, scenario, is_fresher, errors)]
    except (AssertionError, KeyError, OSError, ValueError) as error:
        return [f"the run directory cannot be read: {error!r}"]
    if lost_steps(run) and not may_lose:
        found.append(f"the rollouts of the steps {sorted(lost_steps(run))} are lost without a fault")
    return found


LEFT = "the phase ended"
LOST = ("its replica was lost", "its rows were lost when the run resumed")


def lost_steps(run: Path) -> set[int]:
    """Return the steps whose rollouts the run itself recorded as lost."""
    return {each["step"] for each in lines_of(run, "digests.jsonl") if each.get("lost")}


def result(run: Path) -> Result:
    """Return the results of a run."""
    return Result(
        numbers=[measured(line) for line in lines_of(run, "metrics.jsonl")],
        evaluations=[
            {name: each for name, each in line.items() if name != "time_s"}
            for line in lines_of(run, "evaluations.jsonl")
        ],
        weights=load_file(_newest(run) / "policy" / "model.safetensors")["numbers"].tobytes(),
        rows=_rows(run),
    )


def differences(whole: Result, run: Result) -> list[str]:
    """Return the differences between a run and an undisturbed one of the same settings.

    Only evaluations that the run has are compared; ``problems`` limits how many may be missing. A dead rank
    loses the evaluation that it works on, and no start can repeat it once the next step is saved.
    """
    found = []
    for step, (here, there) in enumerate(zip(whole.numbers, run.numbers, strict=False), 1):
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if names:
            found.append(f"step {step} has other metrics: {', '.join(sorted(names)[:3])}")
            break
    looked = {each["step"] for each in run.evaluations}
    if run.evaluations != [each for each in whole.evaluations if each["step"] in looked]:
        found.append("the evaluations differ")
    if whole.rows != run.rows:
        found.append("the rows differ")
    if whole.weights != run.weights:
        found.append("the last weights differ in bits")
    return found


def _problems(run: Path, scenario: Scenario, is_fresher: bool, errors: int) -> Iterator[str]:
    steps = [line["step"] for line in lines_of(run, "metrics.jsonl")]
    if steps != [*range(1, scenario.steps + 1)]:
        yield f"metrics.jsonl has the steps {steps}"
    if json.loads((run / "finished.json").read_text()) != {"steps": scenario.steps}:
        yield "finished.json has other steps"
    every = scenario.evaluate_every
    due = [0, *(step for step in range(1, scenario.steps) if every and step % every == 0), scenario.steps]
    looked = [line["step"] for line in lines_of(run, "evaluations.jsonl")]
    most_missing = errors * (1 + scenario.freshness // max(every, 1)) if scenario.freshness else 0
    if looked != [step for step in due if step in looked] or len(due) - len(looked) > most_missing:
        yield f"evaluations of the steps {looked}, due were {due}"
    if not _newest(run).name.endswith(f"{scenario.steps:06d}"):
        yield f"the last checkpoint is {_newest(run).name}"
    yield from _lost_or_doubled(run, scenario)
    yield from _too_old(_rows(run), scenario, is_fresher)
    yield from _replayed(run, scenario)
    yield from _changed(run)


def _lost_or_doubled(run: Path, scenario: Scenario) -> Iterator[str]:
    """Yield groups of the stream that are not in exactly one step with all of their rows.

    If late groups are dropped, the last step may leave some, and the run records that.
    """
    rows = _rows(run)
    left = {tuple(each["group"]) for each in lines_of(run, "given_up.jsonl") if LEFT in each["reason"]}
    known = {*range(1, scenario.steps + 1)} - lost_steps(run)
    if {*rows} != known:
        yield f"rollouts of the steps {[*rows]}"
    wanted = order_of_prompts(scenario.steps * scenario.groups + len(left))
    counts = Counter(row.id for each in rows.values() for row in each)
    expected = {
        (*group, sample) for group in wanted for sample in range(scenario.samples) if group not in left
    }
    doubled = sorted(row for row, times in counts.items() if times > 1)
    if doubled:
        yield f"{len(doubled)} rows are trained twice: {doubled[:3]}"
    lost = sorted(expected - counts.keys())
    if len(lost) != len(lost_steps(run)) * scenario.groups * scenario.samples:
        yield f"{len(lost)} rows are lost: {lost[:3]}"
    if strange := sorted(counts.keys() - expected):
        yield f"{len(strange)} rows are not of the first groups of the stream: {strange[:3]}"
    for step, each in rows.items():
        groups = [row.id[:2] for row in each]
        if len({*groups}) != scenario.groups or len(each) != scenario.groups * scenario.samples:
            yield f"step {step} trains {len(each)} rows of {len({*groups})} groups"
        at = (step - 1) * scenario.groups
        is_ordered = not scenario.is_ready_first and scenario.oversampling == 1
        if is_ordered and [*dict.fromkeys(groups)] != wanted[at : at + scenario.groups]:
            yield f"step {step} trains other groups than the stream's next"
    for line in lines_of(run, "given_up.jsonl"):
        is_lost = line["reason"].startswith(LOST) and scenario.is_ready_first
        if not line["reason"] or not (scenario.drops or is_lost):
            yield f"a group was given up: {line}"


def _too_old(rows: Mapping[int, Sequence[Row]], scenario: Scenario, is_fresher: bool) -> Iterator[str]:
    """Yield tokens older than the bound or newer than their step; in order, the step gives the version."""
    for step, each in rows.items():
        times = scenario.publishes
        newest, oldest = step * times - 1, (step - 1) * times - scenario.freshness
        if not scenario.is_ready_first and not is_fresher:
            newest = max(0, oldest)
        for place, row in enumerate(each):
            part = place * times // len(each)
            sampled = [version for version in row.versions if version >= 0]
            least = max(0, oldest + part)
            if sampled != sorted(sampled) or sampled[0] < least or sampled[-1] > newest:
                yield f"row {row.id} of step {step} has versions {sampled}, allowed are {least} to {newest}"
                return


def _replayed(run: Path, scenario: Scenario) -> Iterator[str]:
    """Sample and train all rows again, from the first weights on."""
    if lost_steps(run):
        return  # the weights cannot be recomputed without them
    numbers = reference = Numbers().numbers.data
    keys = [key_of([numbers])]
    for step, each in _rows(run).items():
        for row in each:
            first = next(place for place, version in enumerate(row.versions) if version >= 0)
            for place in range(first, len(row.tokens)):
                version = row.versions[place]
                if version >= len(keys) or drawn(keys[version], row.id, place)[0] != row.tokens[place]:
                    yield f"token {place} of row {row.id} of step {step} is not of version {version}"
                    return
        size = -(-len(each) // scenario.publishes)
        for at in range(0, len(each), size):
            part = each[at : at + size]
            told = [(list(row.id), [*row.tokens], [*row.versions], row.advantage) for row in part]
            numbers = trained(numbers, told)
            keys.append(key_of([numbers]))
        reference = followed(reference, numbers)
    made = {"policy": numbers, **({"reference": reference} if scenario.has_reference else {})}
    for role, each in made.items():
        saved = torch.from_numpy(load_file(_newest(run) / role / "model.safetensors")["numbers"])
        if not torch.equal(saved, each):
            yield f"the last weights of the {role} are not those of the recorded rows, trained in order"


def _changed(run: Path) -> Iterator[str]:
    """Yield lines and files that differ from their digests or their checkpoint's manifest."""
    entries = lines_of(run, "digests.jsonl")
    for name in ("metrics.jsonl", "evaluations.jsonl", "given_up.jsonl", "spans.jsonl"):
        there = (run / name).read_bytes().splitlines(keepends=True) if (run / name).exists() else []
        wanted = [each["digest"] for each in entries if each["file"] == name]
        if [_digest(line) for line in there] != wanted:
            yield f"{name} differs from its digests"
    for name in sorted(path.name for path in (run / "rollouts").iterdir()):
        if int(name.split("-")[1]) in lost_steps(run):
            continue  # the surviving ranks have written
        known = [each["digest"] for each in entries if each["file"] == f"rollouts/{name}"]
        if known[-1:] != [_digest((run / "rollouts" / name).read_bytes())]:
            yield f"rollouts/{name} differs from its digest"
    for folder in (run / "checkpoints").iterdir():
        told = json.loads((folder / "manifest.json").read_text())["files"]
        there = {
            path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file() and path.name != "manifest.json"
        }
        if there != {name: each["sha256"] for name, each in told.items()}:
            yield f"{folder.name} differs from its manifest"


def _rows(run: Path) -> dict[int, list[Row]]:
    """Return the trained rows of every step in the order of training."""
    files: dict[int, list[tuple[int, int, Path]]] = {}
    for path in sorted((run / "rollouts").iterdir()):
        if match := _PART.fullmatch(path.name):
            files.setdefault(int(match[1]), []).append((int(match[2]), int(match[3]), path))
    found, lost = {}, lost_steps(run)
    for step, parts in sorted(files.items()):
        if step in lost:
            continue
        assert [each[0] for each in parts] == [*range(1, parts[0][1] + 1)], (
            f"a part of step {step} is missing"
        )
        found[step] = _joined([load_file(path) for *_, path in parts])
    return found


def _joined(parts: Sequence[Mapping[str, np.ndarray[Any, Any]]]) -> list[Row]:
    gains: dict[tuple[int, ...], float] = {}
    for part in parts:
        if "advantages:" in part:
            gains |= zip(map(tuple, part["ids"].tolist()), part["advantages:"].tolist(), strict=True)
    rows = []
    for part in parts:
        if "tokens:values" not in part:
            continue
        ends = np.cumsum([0, *part["tokens:lengths"]]).tolist()
        for ids, start, stop in zip(part["ids"].tolist(), ends, ends[1:], strict=False):
            rows.append(
                Row(
                    id=tuple(ids),
                    tokens=part["tokens:values"][start:stop].tolist(),
                    versions=part["versions:values"][start:stop].tolist(),
                    advantage=gains[tuple(ids)],
                )
            )
    return rows


def measured(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metrics of a line that do not depend on a clock."""
    return {name: each for name, each in line["metrics"].items() if name not in TIMES}


def lines_of(run: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of a file of lines; the last may be truncated."""
    path = run / name
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [json.loads(line) for line in whole.splitlines()]


def _newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()

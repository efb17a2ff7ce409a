"""Sides that meet every H steps beside plain data parallelism: traffic, accuracy, and goodput with outages.

    learning   a teacher's labels ── 4 sides, H inner AdamW steps ── pack, merged: the code of merge-sides
                                  └─ plain data parallelism: the same rows, gradients summed in every step
    goodput    a virtual clock; sides leave and return by a seeded schedule; MergeRule of merge-sides
               lock-step: a step needs every side, and a loss goes back to the last checkpoint

    python benchmarks/links/sides.py
    python benchmarks/links/sides.py goodput --write results.md

Traffic is what one side sends and receives. Goodput is the share of all sides' time, gone or not, in steps
that a version has (sides) or that no loss undid (lock-step).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from rillflow.sharding.codec import State
from rillflow_links.sides.merger import merged
from rillflow_links.sides.outer import OuterSettings, shares_of
from rillflow_links.sides.packed import pack, unpack
from rillflow_links.sides.payload import encoded
from rillflow_links.sides.rules import Contribution, MergeRule

sys.path.insert(0, str(Path(__file__).parents[1]))
import measured_at
from intervals import interval

SMALLEST = ["learning --seeds 1 --steps 40", "goodput --seeds 1 --hours 2"]
NEEDS = ["rillflow_links"]

SIDES, ROWS, WIDTH, CLASSES = 4, 32, 64, 10
HIDDEN = (256, 256)
NESTEROV, PLAIN = OuterSettings(), OuterSettings(lr=1, momentum=0)
CASES = [("dense", 1.0, NESTEROV), ("sparse_loco", 0.03, NESTEROV), ("sparse_loco", 0.03, PLAIN)]
"""Codec of contributions, the share of the values that it sends, and the outer step."""


def network(*sizes: int) -> nn.Sequential:
    """Return a network of linear layers of these sizes with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(kw_only=True)
class TeacherTask:
    """Rows that a random network has labelled."""

    seed: int
    """Seed of the teacher and of the rows."""

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.teacher = network(WIDTH, 32, CLASSES)
        self.test = self.rows(torch.Generator().manual_seed(self.seed + 10_000), 4000)

    @torch.no_grad()
    def rows(self, generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs [count, WIDTH] and labels [count]."""
        inputs = torch.randn(count, WIDTH, generator=generator)
        return inputs, self.teacher(inputs).argmax(1)

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Return the share of test rows with the teacher's label."""
        inputs, labels = self.test
        return float((model(inputs).argmax(1) == labels).double().mean())


def student(seed: int) -> tuple[nn.Sequential, torch.optim.AdamW]:
    """Return a new model and its optimiser."""
    torch.manual_seed(seed + 1)
    model = network(WIDTH, *HIDDEN, CLASSES)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: tuple[Tensor, Tensor]) -> None:
    """Take one step on rows."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows[0]), rows[1]).backward()
    optimizer.step()


def streams(seed: int) -> list[torch.Generator]:
    """Return the generator of each side's rows."""
    return [torch.Generator().manual_seed(1000 * seed + side) for side in range(SIDES)]


def plain(task: TeacherTask, steps: int) -> tuple[float, int]:
    """Train with data parallelism; return the accuracy and a rank's bytes, those of a ring's sums."""
    model, optimizer = student(task.seed)
    generators = streams(task.seed)
    for _ in range(steps):
        parts = [task.rows(each, ROWS) for each in generators]
        step(model, optimizer, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
    gradients = sum(each.nbytes for each in model.parameters())
    return task.accuracy(model), round(4 * (SIDES - 1) / SIDES * gradients) * steps


def by_sides(
    task: TeacherTask, steps: int, inner: int, codec: str, share: float, outer: OuterSettings
) -> tuple[float, int]:
    """Train on sides that meet every ``inner`` steps; return the accuracy and a side's bytes."""
    coding = {"gradients": codec, "share": share}
    models = [student(task.seed) for _ in range(SIDES)]
    generators, traffic = streams(task.seed), 0
    base = {name: each.detach().clone() for name, each in models[0][0].named_parameters()}
    momentum = {name: torch.zeros_like(each) for name, each in base.items()}
    errors: list[dict[str, State]] = [{} for _ in range(SIDES)]
    for done in range(inner, steps + 1, inner):
        files = []
        for side, (model, optimizer) in enumerate(models):
            for _ in range(inner):
                step(model, optimizer, task.rows(generators[side], ROWS))
            local = {name: each.detach() for name, each in model.named_parameters()}
            data = pack(encoded(coding, base, local, errors[side]), {"coding": coding})
            traffic += len(data)
            files.append(unpack(data, f"side {side}"))
        entries = [{"name": str(side), "share": each} for side, each in enumerate(shares_of([1] * SIDES))]
        made = merged(base, momentum, files, [base] * SIDES, entries, outer)
        base = {name: each.weights for name, each in made.items()}
        momentum = {name: each.momentum for name, each in made.items()}
        traffic += SIDES * len(pack(base, {"version": done}))
        for model, _ in models:
            for name, weight in model.named_parameters():
                weight.data.copy_(base[name])
    return task.accuracy(models[0][0]), traffic // SIDES


def learning(seeds: int, steps: int, inner: int) -> Iterator[str]:
    """Yield the table of traffic and accuracy."""
    tasks = [TeacherTask(seed=seed) for seed in range(seeds)]
    count = sum(each.numel() for each in student(0)[0].parameters())
    yield f"{SIDES} sides, {ROWS} rows a step, {count:,} float32 parameters, {steps:,} steps, seeds: {seeds}."
    yield ""
    yield "| training | a side's traffic | less than plain | test accuracy | change to plain, by seed |"
    yield "|---|---|---|---|---|"
    known = [plain(task, steps) for task in tasks]
    before = known[0][1]
    yield f"| plain data parallelism | {before / 1e6:.1f} MB | | {interval([each for each, _ in known])} | |"
    for codec, share, outer in CASES:
        found = [by_sides(task, steps, inner, codec, share, outer) for task in tasks]
        gaps = [one - other for (one, _), (other, _) in zip(found, known, strict=True)]
        accuracy, sent = interval([each for each, _ in found]), found[0][1]
        name = codec if codec == "dense" else f"{codec}, {share:.0%}"
        yield (
            f"| H = {inner}, {name}, outer lr {outer.lr:g}, momentum {outer.momentum:g} "
            f"| {sent / 1e6:.1f} MB | {before / sent:.0f}x | {accuracy} | {interval(gaps)} |"
        )


@dataclass(frozen=True, kw_only=True)
class Outages:
    """When sides leave and return, in virtual seconds."""

    hours: float = 24
    """Length of the schedule."""
    sides: int = 16
    """Number of sides."""
    up_s: float = 5400
    """Mean time until a side leaves."""
    down_s: float = 360
    """Mean time until it is back and loaded."""
    step_s: float = 15
    """Time of a step."""
    kept_steps: int = 4
    """Steps between two checkpoints."""
    inner: int = 20
    """Steps between two contributions."""
    tick_s: int = 5
    """Time of a tick; also from a merge's begin until sides have the version."""

    @property
    def ticks(self) -> int:
        """Ticks of the schedule."""
        return round(3600 * self.hours / self.tick_s)

    def gone(self, seed: int) -> list[list[bool]]:
        """Return, for each side and tick, whether the side is gone."""
        schedule = []
        for side in range(self.sides):
            random, there, told = Random(1000 * seed + side), True, list[bool]()
            while len(told) < self.ticks:
                mean_s = self.up_s if there else self.down_s
                told += [not there] * max(1, round(random.expovariate(1 / mean_s) / self.tick_s))
                there = not there
            schedule.append(told[: self.ticks])
        return schedule


@dataclass(kw_only=True)
class SimulatedSide:
    """A side on the virtual clock; it follows ``SideMeeting``."""

    name: str
    """Name of the side."""
    base: int = 0
    """Version that its progress is measured against."""
    done_s: float = 0
    """Time in the step that it trains."""
    fresh: int = 0
    """Steps that no contribution has."""
    kept: int = 0
    """Steps in its newest checkpoint."""
    since: int = 0
    """Steps of the run."""
    pending: Contribution | None = None
    """Contribution that it does not know to be decided."""
    is_decided: bool = False
    """Whether the merger has merged or refused the contribution."""
    waits_s: float = 0
    """Time that it still waits for a version."""

    def tick(self, how: Outages, newest: int, wait_s: float) -> None:
        """Train, or wait, for a tick."""
        if self.waits_s > 0:
            self.waits_s = 0 if self.is_decided else self.waits_s - how.tick_s
            if self.waits_s <= 0:
                self.take(newest)
            return
        self.done_s += how.tick_s
        if self.done_s < how.step_s:
            return
        self.done_s, self.fresh, self.since = 0, self.fresh + 1, self.since + 1
        if self.since % how.kept_steps == 0:
            self.kept = self.fresh
        if self.since % how.inner:
            return
        if self.is_decided:
            self.take(newest)
        if self.pending is None:
            name = f"{self.name}.{self.since}"
            self.pending = Contribution(
                side=self.name, base=self.base, step=self.since, tokens=self.fresh, name=name
            )
            self.fresh, self.kept, self.waits_s = 0, 0, wait_s
            if wait_s == 0:
                self.take(newest)

    def take(self, newest: int) -> None:
        """Take the newest version."""
        self.base = newest
        if self.is_decided:
            self.pending, self.is_decided = None, False

    def leave(self) -> None:
        """Lose what the last checkpoint does not have."""
        lost = self.fresh - self.kept
        self.done_s, self.fresh, self.since, self.waits_s = 0, self.kept, self.since - lost, 0


def decoupled(how: Outages, gone: Sequence[Sequence[bool]], rule: MergeRule, wait_s: float) -> float:
    """Return the goodput of sides that merge by a rule."""
    sides = {f"side{number:02d}": SimulatedSide(name=f"side{number:02d}") for number in range(how.sides)}
    seen, newest, good, begun_s = dict.fromkeys(sides, 0), 0, 0, -1.0
    for now in range(how.ticks):
        for side, absent in zip(sides.values(), gone, strict=True):
            was_absent = now > 0 and absent[now - 1]
            if absent[now] and not was_absent:
                side.leave()
            elif not absent[now]:
                if was_absent:
                    side.take(newest)
                side.tick(how, newest, wait_s)
        offers = [each.pending for each in sides.values() if each.pending and not each.is_decided]
        chosen, refused = rule.chosen(offers, newest)
        ready = {each.side for each in chosen}
        for name in refused:
            sides[name.partition(".")[0]].is_decided = True
        if len(ready) < rule.quorum:
            begun_s = -1.0
            continue
        begun_s = now * how.tick_s if begun_s < 0 else begun_s
        if rule.is_due(ready, rule.expected(seen, newest), now * how.tick_s - begun_s):
            newest, begun_s = newest + 1, -1.0
            good += sum(each.tokens for each in chosen)
            seen |= dict.fromkeys(ready, newest)
            for name in ready:
                sides[name].is_decided = True
    return good * how.step_s / (how.ticks * how.tick_s * how.sides)


def lock_step(how: Outages, gone: Sequence[Sequence[bool]]) -> float:
    """Return the goodput if every step needs all sides, with a checkpoint every ``kept_steps`` steps."""
    done_s, steps, kept, was_gone = 0.0, 0, 0, False
    for now in range(how.ticks):
        is_gone = any(each[now] for each in gone)
        if is_gone and not was_gone:
            steps, done_s = kept, 0.0
        was_gone = is_gone
        if not is_gone:
            done_s += how.tick_s
            if done_s >= how.step_s:
                done_s, steps = 0.0, steps + 1
                kept = steps if steps % how.kept_steps == 0 else kept
    return kept * how.step_s / (how.ticks * how.tick_s)


def goodput(seeds: int, hours: float) -> Iterator[str]:
    """Yield the table of goodput."""
    how = Outages(hours=hours)
    schedules = [how.gone(seed) for seed in range(seeds)]
    there = [1 - sum(map(sum, gone)) / (how.ticks * how.sides) for gone in schedules]
    yield (
        f"{how.sides} sides for {hours:g} h; each leaves after {how.up_s / 60:g} min on average and is back "
        f"after {how.down_s / 60:g} min; a step takes {how.step_s:g} s, H = {how.inner}, a checkpoint every "
        f"{how.kept_steps} steps; {seeds} seeds."
    )
    yield ""
    yield "| order of the steps | goodput | of the time that sides are there |"
    yield "|---|---|---|"
    cases = {"lock-step": [lock_step(how, gone) for gone in schedules]}
    for quorum, grace_s, wait_s in ((1, 30, 60), (8, 30, 60), (8, 30, 0), (12, 30, 0)):
        rule = MergeRule(quorum=quorum, grace_s=grace_s)
        said = f"sides, --quorum {quorum}, --grace-s {grace_s}, schedule.grace_s = {wait_s}"
        cases[said] = [decoupled(how, gone, rule, wait_s) for gone in schedules]
    for said, found in cases.items():
        shares = [one / other for one, other in zip(found, there, strict=True)]
        yield f"| {said} | {interval(found)} | {interval(shares)} |"
    yield f"| bound: sides are there | {interval(there)} | |"


def main() -> None:
    """Measure the chosen parts."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("parts", nargs="*", metavar="PART", help="learning, goodput; both by default")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600, help="steps of each side (learning)")
    parser.add_argument("--inner", type=int, default=20, help="steps between two contributions (learning)")
    parser.add_argument("--hours", type=float, default=24, help="length of the schedule (goodput)")
    parser.add_argument("--write", type=Path, help="where the results go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    page = ["# Sides beside plain data parallelism", "", measured_at.line(), ""]
    page.append(f"{os.cpu_count()} cores, one thread, torch {version('torch')}, float32.")
    parts = {
        "learning": (
            "## Traffic and accuracy",
            lambda: learning(arguments.seeds, arguments.steps, arguments.inner),
        ),
        "goodput": (
            "## Goodput while sides leave and return",
            lambda: goodput(arguments.seeds, arguments.hours),
        ),
    }
    for name in arguments.parts or parts:
        title, measure = parts[name]
        lines = [*measure()]
        print("\n".join(lines), flush=True)
        page += ["", title, "", f"`python benchmarks/links/sides.py {name}`", "", *lines]
    if arguments.write is not None:
        arguments.write.write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()

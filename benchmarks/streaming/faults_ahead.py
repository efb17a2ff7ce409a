"""Faults ahead: steps per minute of a ready-first run while a reward hangs and while ranks are lost.

    python benchmarks/streaming/faults_ahead.py --write benchmarks/results/faults_ahead.md

HANGS    the reward of one of 160 prompts never returns; its time limit is 20 times the length of a step
DIES     one of two sampler replicas on Ray is killed; a new process replaces it while training continues
MINUTES  one fault per minute for ten minutes: the two replicas are killed and stopped in turn, and the
         trainer's rank is killed once; the same run without faults precedes it
CUT      two nodes and a spare node (network namespaces): the node of a replica loses its network for good

Each run trains the same recipe: a small model, additions, 16 prompts with 8 answers per step, two versions
ahead, two reward processes. The first ten steps do not count. Times of steps come from metrics.jsonl; MINUTES
and CUT watch that file grow. EFFECTIVE is the share of undisturbed training that remains: the steps made in
the whole time of faults, with restarts and repeated steps, divided by the steps at each interval's rate
without its fault.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rungs import say
from watched import REPLICAS, WatchedRun, wrong_rows

from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs import layout

SMALLEST = []
SLOW = [  # minutes; Ray
    "--steps 14 --rounds 1 --only hangs",
    "--steps 30 --rounds 1 --only dies",
    "--only minutes --every-s 30 --faults 2 --undisturbed-s 20",
    "--only cut --every-s 40",
]

SKIPPED = 10
"""Steps at the start that do not count."""
LIMIT = 20
"""Time limit of the reward, in steps."""
PROMPTS, SAMPLES, BOUND = 160, 8, 2
"""Settings of the recipe: prompts of an epoch, rows of a prompt, staleness bound."""
KEPT_EVERY = 10
"""Steps between two checkpoints; after the loss of the trainer, the steps since the last one are repeated."""
POOLS = ('placement.backend="ray"', "placement.pools={ main = 1, answers = 2, scores = 1 }")
ROLES = 'placement.roles={ sampler = "answers", reward = "scores" }'
LAST = "placement.pools={ main = 1, scores = 1, answers = 2 }"
"""The same pools in an order in which, on nodes of 3 and 1 cores, a replica is placed last."""
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""Health checks of Ray's head: it declares a dead node after seconds, not after about a minute."""
ROOT = Path(__file__).parents[2]
WATCHED = (*POOLS, ROLES, 'rollout.engine="watched:Announced"', "algorithm.steps=100000")
ROBUST_RL = 0.8
"""Effective training time that RobustRL (arXiv 2512.22492) publishes with failures in a tenth of the time."""
STOPPED_S, STARTED_S, AGAIN_S = 5.0, 6.0, 25.0
"""Assumed seconds for the prediction.

They are the times until a stopped process is detected, until a new one samples, and until all ranks train
again.
"""
RECIPE = """
[run]
seed = 1
threads = 1
[task]
source = "arithmetic"
digits = 2
operators = "+"
size = 160
held_out = 0
[policy]
lr = 1e-4
model.new = { hidden = 192, layers = 6, heads = 6, kv_heads = 2, context = 80, alphabet = "0123456789+=" }
[rollout]
max_rows = 128
max_tokens = 64
[algorithm]
name = "grpo"
prompts_per_step = 16
samples_per_prompt = 8
minibatches = 2
[schedule]
mode = "ready_first"
freshness = 2
[reward]
function = "reward.py:reward"
sandbox = false
workers = 2
"""
REWARD = """
import pathlib, time

def reward(prompts, completions, **columns):
    hung = pathlib.Path(__file__).with_name("hung")
    if hung.exists() and len(prompts) == 8:
        if not hung.read_text():
            hung.write_text(prompts[0])
        if hung.read_text() in prompts:
            time.sleep(3600)
    return [sum(letter < "5" for letter in text) / 32 for text in completions]
"""


class Dying(NativeEngine):
    """The native engine; the first process that reaches a number of passes kills itself."""

    passes = 0

    def step(self) -> Any:
        """See Engine."""
        self.passes += 1
        if self.passes == int(os.environ["DIES_AT"]):
            try:
                with Path(os.environ["DIED"]).open("x") as file:
                    file.write(str(time.time()))
            except FileExistsError:
                return super().step()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


def ran(folder: Path, steps: int, *settings: str, hangs: bool = False) -> list[float]:
    """Run the recipe; return the times of its steps, in seconds since its start."""
    from rillflow.app.launch import launch
    from rillflow.app.recipe import load_recipe
    from rillflow.runs.reader import read_metrics

    folder.mkdir()
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    if hangs:
        (folder / "hung").touch()
    own = [f'run.dir="{folder / "run"}"', f"algorithm.steps={steps}", *settings]
    loaded = load_recipe(folder / "run.toml", own)
    launch(loaded, quiet=True)
    return [each.time_s for each in read_metrics(folder / "run")]


def rate(times: list[float], first: float = 0.0, last: float = float("inf")) -> float:
    """Return steps per minute, after the first ones, between two times."""
    kept = [each for each in times[SKIPPED:] if first <= each <= last]
    return 60 * (len(kept) - 1) / (kept[-1] - kept[0]) if len(kept) > 1 else float("nan")


def hanging(folder: Path, steps: int, rounds: int) -> list[str]:
    """Return the lines of the table of hanging rewards."""
    found: dict[str, list[float]] = {"wait": [], "drop": []}
    plain: dict[str, list[float]] = {"wait": [], "drop": []}
    inline = 'placement.backend="inline"'
    for number in range(rounds):
        for late in found:
            how = (inline, f'schedule.on_stale="{late}"')
            times = ran(folder / f"{late}-{number}", steps, *how)
            plain[late].append(rate(times))
            limit = f"reward.timeout_s={LIMIT * 60 / rate(times):.2f}"
            hung = ran(folder / f"{late}-{number}-hangs", steps, *how, limit, hangs=True)
            found[late].append(rate(hung))
    lines = ["| on_stale | steps a minute | with a hanging reward | ratio |", "|---|---:|---:|---:|"]
    for late, rates in found.items():
        ratios = [hung / whole for hung, whole in zip(rates, plain[late], strict=True)]
        told = (statistics.median(plain[late]), statistics.median(rates), statistics.median(ratios))
        lines.append(f"| {late} | {told[0]:.0f} | {told[1]:.0f} | {told[2]:.2f} |")
    return lines


def dying(folder: Path, steps: int, rounds: int) -> list[str]:
    """Return the lines of the table of replicas that die."""
    lines = [
        "| round | before | 10 s from the death on | later | rows lost or doubled |",
        "|---|---:|---:|---:|---:|",
    ]
    for number in range(rounds):
        at = folder / f"dies-{number}"
        os.environ |= {"DIES_AT": str(20 * steps), "DIED": str(folder / f"died-{number}")}
        engine = f'rollout.engine="{Path(__file__).stem}:Dying"'
        times = ran(at, steps, *POOLS, ROLES, engine)
        died = Path(os.environ["DIED"])
        if not died.exists():
            lines.append(f"| {number + 1} | {rate(times):.0f} | no death | | |")
            continue
        began = (at / "run" / "metrics.jsonl").stat().st_mtime - times[-1]
        moment = float(died.read_text()) - began
        parts = (rate(times, 0, moment), rate(times, moment, moment + 10), rate(times, moment + 10))
        cells = " | ".join(f"{each:.0f}" for each in (*parts, sum(wrong(at / "run").values())))
        lines.append(f"| {number + 1} | {cells} |")
    return lines


def wrong(run: Path) -> dict[str, int]:
    """Return the numbers of rows that are trained twice, missing in a group, or never trained."""
    return wrong_rows(run, SAMPLES, PROMPTS, BOUND)


def written(folder: Path) -> Path:
    """Make a folder with the recipe and its reward."""
    folder.mkdir()
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    return folder


def faults(count: int) -> Iterator[str]:
    """Yield the fault of each minute: kill and stop a replica in turn; the middle one kills the trainer."""
    for number in range(count):
        yield "trainer killed" if number == count // 2 else ("replica killed", "replica stopped")[number % 2]


def predicted(count: int, every_s: float, step_s: float) -> float:
    """Return the predicted share of training, with half the sampling while a replica is absent."""
    costs = {
        "replica killed": STARTED_S / 2,
        "replica stopped": (STOPPED_S + STARTED_S) / 2,
        "trainer killed": AGAIN_S + KEPT_EVERY / 2 * step_s,
    }
    return 1 - sum(costs[each] for each in faults(count)) / (count * every_s)


def minutes(folder: Path, given: argparse.Namespace) -> list[str]:
    """Return the table of a run with one fault per minute, and its effective training time."""
    settings = (*WATCHED, f"run.checkpoint_every={KEPT_EVERY}")
    whole = WatchedRun(written(folder / "undisturbed"), settings)
    try:
        first = whole.until(lambda: whole.steps >= SKIPPED)
        whole.until_time(first + given.undisturbed_s)
        rate = whole.rate(first, whole.until(lambda: whole.steps >= SKIPPED + 2))
        assert whole.end(signal.SIGTERM) == 128 + signal.SIGTERM, whole.said
    finally:
        whole.kill()
    told = predicted(given.faults, given.every_s, 60 / rate)
    say(f"undisturbed: {rate:.1f} steps a minute; predicted: {told:.0%} effective, wanted {ROBUST_RL:.0%}")
    lines = [
        "| minute | fault | seen, s | replaced, s | before | a third of a minute from it on | later |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    run = WatchedRun(written(folder / "disturbed"), settings)
    try:
        first = run.until(lambda: run.steps >= SKIPPED and run.made >= 2) + given.every_s / 4
        run.until_time(first)
        every = list[Disturbed]()
        for number, fault in enumerate(faults(given.faults)):
            every.append(disturbed(run, number, fault, first, given.every_s))
            lines.append(f"| {number + 1} | {fault} | {every[-1].cells} |")
            say(lines[-1])
        last = first + given.faults * given.every_s
        code = run.end(signal.SIGTERM)
        left = run.left()
    finally:
        run.kill()
    rows = ", ".join(f"{count} {name}" for name, count in wrong(run.run).items())
    found = layout.rollout_files(run.run)  # includes steps that the stop abandoned
    lost = sum(step not in found for step in range(1, run.steps + 1))
    lines += [
        "",
        f"Undisturbed: {rate:.1f} steps a minute in {given.undisturbed_s:g} s. With a fault every "
        f"{given.every_s:g} s: {run.rate(first, last):.1f} in {last - first:.0f} s. **Effective training "
        f"time {effective(every):.0%}** (steps made over those at the higher of the rates before a fault and "
        f"later), predicted {told:.0%}; RobustRL publishes {ROBUST_RL:.0%}, at its own rate of failures.",
        f"SIGTERM ended the run with exit code {code} after {run.steps} steps, {lost} of them without "
        f"rollouts; processes left 5 s later: {len(left)}. Rows: {rows}.",
    ]
    return lines


@dataclass(frozen=True, kw_only=True)
class Disturbed:
    """The effect of one fault on a run; rates are steps per minute."""

    seen_s: float
    """Seconds until the run reports a lost rank."""
    replaced_s: float
    """Seconds until the new processes have loaded their models."""
    before: float
    """Rate in the quarter of an interval before the fault."""
    during: float
    """Rate in the third of the interval that begins with the fault."""
    later: float
    """Rate in the rest of the interval."""

    @property
    def cells(self) -> str:
        """Cells of the table."""
        rates = " | ".join(f"{each:.0f}" for each in (self.before, self.during, self.later))
        return f"{self.seen_s:.1f} | {self.replaced_s:.1f} | {rates}"


def effective(every: Sequence[Disturbed]) -> float:
    """Return the steps made, divided by the steps at each interval's higher rate before or after the fault.

    The rate of a run changes as the policy learns, so the rate of another run is not a baseline.
    """
    made = sum(each.during / 3 + each.later * 2 / 3 for each in every)
    return made / sum(max(each.before, each.later) for each in every)


def disturbed(run: WatchedRun, number: int, fault: str, first: float, every_s: float) -> Disturbed:
    """Cause a fault and watch the run until the next one is due."""
    at, losses, made = run.until_time(first + number * every_s), run.losses, run.made
    victim = run.trainer if fault == "trainer killed" else run.replicas[0]
    os.kill(victim, signal.SIGSTOP if fault == "replica stopped" else signal.SIGKILL)
    seen = run.until(lambda: run.losses > losses)
    wanted = 2 if fault == "trainer killed" else 1
    replaced = run.until(lambda: run.made >= made + wanted)
    run.until_time(first + (number + 1) * every_s)
    third = at + every_s / 3
    return Disturbed(
        seen_s=seen - at,
        replaced_s=replaced - at,
        before=run.rate(at - every_s / 4, at),
        during=run.rate(at, third),
        later=run.rate(third, at + every_s),
    )


def cut(folder: Path, given: argparse.Namespace) -> list[str]:
    """Return the lines for a node that loses its network while a run trains on it."""
    from machines import PORT, SHARED, machines, ray_up

    at = written(folder / "cut")
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, REPLICAS: f"{SHARED}/replicas", **HEALTH}
    with machines(at, count=3) as (first, other, spare):
        ray_up(first, env=env, cpus=3)
        ray_up(other, first, env=env)
        settings = (*WATCHED, LAST, f"placement.address={first.address}:{PORT}")

        def started(words: Sequence[str], own: Any) -> subprocess.Popen[str]:
            with (at / "output.txt").open("w") as said:
                return first.started(*words, env={**env, **own, "PYTHONPATH": path}, stdout=said)

        run = WatchedRun(at, settings, started=started, seen=SHARED)
        try:
            began = run.until(lambda: run.steps >= SKIPPED)
            ray_up(spare, first, env=env)
            due = run.until_time(began + given.every_s)
            nodes = json.loads((run.run / "environment.json").read_text("utf-8"))["starts"][-1]["nodes"]
            away = [place for place, node in nodes.items() if node["address"] == other.address]
            assert len(away) == 1 and away[0].startswith("answers"), f"on the other node are {away}"
            say(f"{away[0]} is on {other.address}; its link goes down")
            losses, made = run.losses, run.made
            first.run("ip", "link", "set", "v2", "down")
            seen = run.until(lambda: run.losses > losses)
            replaced = run.until(lambda: run.made > made)
            end = run.until_time(replaced + given.every_s)
            code = run.end(signal.SIGTERM)
        finally:
            run.kill()
    rows = ", ".join(f"{count} {name}" for name, count in wrong(run.run).items())
    rates = (run.rate(began, due), run.rate(due, replaced), run.rate(replaced, end))
    return [
        "| cut off | seen, s | replaced, s | before, steps a minute | until replaced | later | rows |",
        "|---|---:|---:|---:|---:|---:|---|",
        f"| {away[0]} | {seen - due:.1f} | {replaced - due:.1f} "
        f"| {' | '.join(f'{each:.0f}' for each in rates)} | {rows} |",
        "",
        f"SIGTERM ended the run with exit code {code}. Ray's health checks: "
        + ", ".join(f"`{name}={value}`" for name, value in HEALTH.items())
        + ".",
    ]


PARTS = {
    "hangs": ("A reward that hangs", lambda folder, given: hanging(folder, given.steps, given.rounds)),
    "dies": ("A replica that dies", lambda folder, given: dying(folder, given.steps, given.rounds)),
    "minutes": ("A fault a minute", minutes),
    "cut": ("A node that is cut off", cut),
}
"""Heading and measurement of each part."""
NOTES = {
    "hangs": """Medians of rounds. With `wait` a step waits for a group that is due, so each one that hangs
costs its time limit, 20 steps. With `drop` the group is dropped instead, and its reward process is ended. The
rank starts a further reward process for a group that is late by a second or more; shorter steps are held up.
""",
    "dies": "One of two replicas on Ray kills itself.\n",
    "minutes": f"""The two replicas of the sampler are killed and stopped in turn, and the trainer's rank is
killed once; then all ranks start again from the last checkpoint, at most {KEPT_EVERY} steps back. Seen: the
run says it. Replaced: a new process has its model.
""",
    "cut": """Network namespaces with Ray's node in each: trainer, scores, driver and a replica on the first,
a replica on the second, whose link goes down for good; a third has room. Replaced, from the cut on: Ray has
declared the node dead, and a new process has its model.
""",
}
"""A note above the table of each part."""
HEAD = """# Faults ahead

`python benchmarks/streaming/faults_ahead.py {words}`, {cores} cores, Python {python}, torch {torch},
ray {ray}. The head of the script describes the faults and the recipe. Rates are steps per minute.

"""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="of the runs of hangs and dies")
    parser.add_argument("--rounds", type=int, default=3, help="of hangs and dies")
    parser.add_argument("--faults", type=int, default=10, help="of minutes")
    parser.add_argument("--every-s", type=float, default=60.0, help="seconds between faults, before a cut")
    parser.add_argument("--undisturbed-s", type=float, default=180.0, help="what minutes is compared with")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # ranks import the engine by name
    sys.path.insert(0, str(ROOT / "tests" / "distributed"))
    lines = list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only:
            title, measure = PARTS[name]
            lines += [f"## {title}", "", NOTES[name], *measure(Path(folder), given), ""]
    sys.stdout.write("\n".join(lines) + "\n")
    if given.write is not None:
        from measured_at import below_title, line

        head = HEAD.format(
            words=shlex.join(sys.argv[1:]),
            cores=os.cpu_count(),
            python=platform.python_version(),
            **{name: version(name) for name in ("torch", "ray")},
        )
        given.write.write_text(below_title(head + "\n".join(lines).rstrip("\n") + "\n", line()), "utf-8")


if __name__ == "__main__":
    main()

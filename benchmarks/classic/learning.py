"""Learning of the classic recipes over seeds, and of PPO, DQN and SAC beside Stable-Baselines3.

    python benchmarks/classic/learning.py --records learning.jsonl --jobs 2 \\
        --sb3 .sb3/bin/python --rliable .rliable/bin/python --write benchmarks/results/classic_learning.md

Each row runs ``rillflow run recipes/classic/NAME/run.toml --set run.seed=SEED`` and reads the run directory:
the mean return of 20 greedy episodes, at the end and at the best of all evaluations. MAML and MB-MPO have the
returns after adaptation instead. Peers have environments of their own:

    python -m venv .sb3 && .sb3/bin/pip install stable-baselines3==2.9.2 gymnasium
    python -m venv .rliable && .rliable/bin/pip install rliable==1.2.0 'pandas<3'

Stable-Baselines3 plays as many frames and is evaluated as often. Its PPO and DQN have the settings of RL Zoo,
its SAC those of the recipe. The table shows interquartile means with 95% intervals of the stratified
bootstrap by rliable (Agarwal et al., arXiv 2108.13264), where each environment is a stratum of its own;
without ``--rliable`` it shows the seeds alone.

Each finished run adds a line to the records. The same command continues after the last one; a line counts
while its command is that of the row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import measured_at

from rillflow.records.metrics import merge_metrics
from rillflow.runs.reader import MetricsRecord, read_evaluations, read_metrics
from rillflow.runs.summary import summarise

SMALLEST = []
SLOW = ["--only maml_point --seeds 0 --steps 2"]
NEEDS = ["gymnasium", "rillflow_classic"]
ROOT = Path(__file__).parents[2]
PEERS = Path(__file__).parent / "peers"
COMMAND = "import sys; from rillflow.cli.main import main; sys.exit(main())"
RETURN = "episode/return/mean"
PER_POLICY = re.compile("episode/(.+)_return/mean")
LAST = 20
"""Steps of the mean return of each policy."""
EPISODES = 20
"""Greedy episodes of a peer's evaluation, as in the recipes of CartPole."""

SB3_DQN = {
    "workers": ("slots=1", "steps=256"),
    "algorithm": (
        *(
            "steps=196",
            "lr=2.3e-3",
            "anneal_updates=0",
            "num_steps=1",
            "double=false",
            "batch_size=64",
            "updates=128",
        ),
        *("target_every=128", "huber=1", "epsilon_last=0.04", "epsilon_updates=3500"),
        "replay.capacity=100000",
    ),
    "network": ("hidden=[256,256]",),
    "evaluate": ("every=20",),
}
"""Settings of RL Zoo's DQN. Stable-Baselines3 copies to the target network while it plays, so once in 256
frames or 128 updates, despite its ``target_update_interval`` of 10. Random actions fall with the frames."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table."""

    name: str
    """Name in the table and of ``--only``."""
    recipe: str = ""
    """Folder in recipes/classic; empty for a peer."""
    settings: tuple[str, ...] = ()
    """Changes of the recipe."""
    peer: str = ""
    """Task of peers/sb3_learning.py without seed, as JSON."""
    threshold: float | None = None
    """Smallest final return that counts as learnt."""
    last_steps: int = 0
    """If not 0, the score is the mean of the metric of returns over this many last steps."""
    note: str = ""
    """Differences from the shipped recipe, for the table."""

    def command(self, seed: int, steps: int | None) -> list[str]:
        """Return the words after ``rillflow``, or after the peer's script."""
        if self.peer:
            return [json.dumps({**json.loads(self.peer), "seed": seed})]
        changes = [*self.settings, f"run.seed={seed}", "evaluate.video=false"]
        changes += [f"algorithm.steps={steps}"] if steps else []
        path = f"recipes/classic/{self.recipe}/run.toml"
        return ["run", path, *(word for each in changes for word in ("--set", each))]


def of_sb3(algorithm: str, environment: str, frames: int, every: int, **given: Any) -> str:
    """Return a peer's task."""
    task = {"algorithm": algorithm, "environment": environment, "frames": frames, "every": every}
    task |= {"episodes": EPISODES, "slots": given.pop("slots", 1), "falling": given.pop("falling", [])}
    return json.dumps({**task, "settings": given})


def of_sb3_sac(discount: float) -> str:
    """Return a task with the settings of the recipe of SAC."""
    return of_sb3(
        *("sac", "Pendulum-v1", 12_800, 1_600),
        slots=4,
        falling=["learning_rate"],
        learning_rate=1e-3,
        batch_size=256,
        learning_starts=1000,
        train_freq=16,
        gradient_steps=64,
        gamma=discount,
        policy_kwargs={"net_arch": [64, 64]},
    )


CASES = [
    Case(name="ppo_cartpole", recipe="ppo_cartpole", threshold=475, note="settings of RL Zoo, constant clip"),
    Case(
        name="ppo_cartpole, SB3",
        peer=of_sb3(
            *("ppo", "CartPole-v1", 102_400, 12_800),
            slots=8,
            falling=["learning_rate", "clip_range"],
            n_steps=32,
            batch_size=256,
            n_epochs=20,
            gae_lambda=0.8,
            gamma=0.98,
            ent_coef=0.0,
            learning_rate=1e-3,
            clip_range=0.2,
        ),
        threshold=475,
        note="RL Zoo",
    ),
    Case(name="dqn_cartpole", recipe="dqn_cartpole", threshold=475),
    Case(
        name="dqn_cartpole, RL Zoo",
        recipe="dqn_cartpole",
        settings=tuple(f"{area}.{each}" for area, changes in SB3_DQN.items() for each in changes),
        threshold=475,
        note="settings of RL Zoo",
    ),
    Case(
        name="dqn_cartpole, SB3",
        peer=of_sb3(
            *("dqn", "CartPole-v1", 50_000, 5_120),
            learning_rate=2.3e-3,
            batch_size=64,
            buffer_size=100_000,
            learning_starts=1000,
            gamma=0.99,
            target_update_interval=10,
            train_freq=256,
            gradient_steps=128,
            exploration_fraction=0.16,
            exploration_final_eps=0.04,
            policy_kwargs={"net_arch": [256, 256]},
        ),
        threshold=475,
        note="RL Zoo",
    ),
    Case(name="a2c_cartpole", recipe="a2c_cartpole", threshold=475),
    Case(name="a3c_cartpole", recipe="a3c_cartpole", threshold=475),
    Case(name="impala_cartpole", recipe="impala_cartpole", threshold=475),
    Case(name="apex_cartpole", recipe="apex_cartpole", threshold=475),
    Case(name="ppo_population", recipe="ppo_population", threshold=475, note="best of four members"),
    Case(name="two_trainers", recipe="two_trainers", threshold=150),
    Case(name="ppo_minatar", recipe="ppo_minatar", threshold=10),
    Case(name="sac_pendulum", recipe="sac_pendulum", threshold=-200),
    Case(name="sac_pendulum, SB3", peer=of_sb3_sac(0.95), threshold=-200, note="settings of the recipe"),
    Case(
        name="sac_pendulum, 0.99",
        recipe="sac_pendulum",
        settings=("algorithm.gamma=0.99",),
        threshold=-200,
        note="discount 0.99",
    ),
    Case(name="sac_pendulum, 0.99, SB3", peer=of_sb3_sac(0.99), threshold=-200, note="discount 0.99"),
    Case(name="maml_point", recipe="maml_point", last_steps=10, note="after one step of adaptation"),
    Case(
        name="maml_point, control",
        recipe="maml_point",
        settings=("algorithm.inner_lr=0",),
        last_steps=10,
        note="never adapts",
    ),
    Case(name="mb_mpo_point", recipe="mb_mpo_point", last_steps=5, note="last five real episodes"),
    Case(
        name="mb_mpo_point, one model",
        recipe="mb_mpo_point",
        settings=("algorithm.members=1", "algorithm.inner_lr=0", "algorithm.imagined=160"),
        last_steps=5,
        note="never adapts, as many imagined episodes",
    ),
    Case(
        name="mb_mpo_point, five models",
        recipe="mb_mpo_point",
        settings=("algorithm.inner_lr=0",),
        last_steps=5,
        note="never adapts",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """A finished run, a line of the records."""

    case: str
    """Name of the row."""
    seed: int
    """Seed."""
    command: list[str]
    """See ``Case.command``."""
    curve: list[list[float]]
    """Frames and return of every evaluation."""
    final: float
    """Return at the end."""
    frames: int
    """Environment steps of the run."""
    seconds: float
    """Duration, start and evaluations included."""
    policies: Mapping[str, float] = field(default_factory=dict)
    """Mean return of each policy's agents in the last steps, with exploring actions; empty for one policy."""

    @property
    def best(self) -> float:
        """Return of the best evaluation."""
        return max(value for _, value in self.curve)


def main() -> None:
    """Run what the records lack, and write the page."""
    options = _options()
    cases = [each for each in CASES if each.name in options.only and (options.sb3 or not each.peer)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        records = options.records or Path(folder) / "records.jsonl"
        asked = [(case, seed) for case in cases for seed in options.seeds]
        if options.recorded:
            asked = [each for each in asked if kept(*each, records, options.steps)]
        done = list(pool.map(lambda each: learnt(*each, records, options), asked))
    page = "\n".join(lines_of(cases, done, options)) + "\n"
    print(page)
    if options.write:
        options.write.write_text(measured_at.below_title(page, measured_at.line()))


def learnt(case: Case, seed: int, records: Path, options: argparse.Namespace) -> Learnt:
    """Return a run of the records, or run it and add it to them."""
    if (there := kept(case, seed, records, options.steps)) is not None:
        return there
    command = case.command(seed, options.steps)
    found = peer_run(case, seed, command, options) if case.peer else own_run(case, seed, command)
    with records.open("a") as file:
        file.write(json.dumps(vars(found)) + "\n")
    print(f"{case.name}, seed {seed}: {found.final:.1f}, {found.seconds:.0f} s", file=sys.stderr, flush=True)
    return found


def kept(case: Case, seed: int, records: Path, steps: int | None) -> Learnt | None:
    """Return a run of the records; None if they lack it."""
    command = case.command(seed, steps)
    for line in map(json.loads, records.read_text().splitlines() if records.is_file() else []):
        if line["case"] == case.name and line["command"] == command:
            return Learnt(**line)
    return None


def own_run(case: Case, seed: int, command: list[str]) -> Learnt:
    """Run a recipe, and read its directory."""
    with tempfile.TemporaryDirectory() as folder:
        run, began = Path(folder) / "run", time.monotonic()
        _output([sys.executable, "-c", COMMAND, *command, "--quiet", "--set", f"run.dir={run}"])
        seconds, records = time.monotonic() - began, read_metrics(run)
        steps = [record.metrics["actor/steps/sum"].value for record in records]
        frames = [0, *accumulate(map(round, steps))]
        if case.last_steps:
            returns = [record.metrics[RETURN].value for record in records]
            curve = [[float(count), value] for count, value in zip(frames[1:], returns, strict=True)]
            final = fmean(returns[-case.last_steps :])
        else:
            curve = [[float(frames[each.step]), each.mean_reward] for each in read_evaluations(run)]
            after = summarise(run).after
            assert after is not None and after.mean_reward is not None
            final = after.mean_reward
    return Learnt(
        case=case.name,
        seed=seed,
        command=command,
        curve=curve,
        final=final,
        frames=frames[-1],
        seconds=seconds,
        policies=returns_by_policy(records[-LAST:]),
    )


def returns_by_policy(records: Sequence[MetricsRecord]) -> dict[str, float]:
    """Return the mean of ``episode/NAME_return/mean`` by name."""
    found = merge_metrics(each.metrics for each in records)
    names = {name: PER_POLICY.fullmatch(name) for name in found}
    return {match[1]: found[name].value for name, match in names.items() if match}


def peer_run(case: Case, seed: int, command: list[str], options: argparse.Namespace) -> Learnt:
    """Run Stable-Baselines3."""
    began = time.monotonic()
    said = _output([options.sb3, str(PEERS / "sb3_learning.py"), *command], own_path=False)
    curve = json.loads(said.splitlines()[-1])["curve"]
    return Learnt(
        case=case.name,
        seed=seed,
        command=command,
        curve=curve,
        final=curve[-1][1],
        frames=curve[-1][0],
        seconds=time.monotonic() - began,
    )


def _output(command: Sequence[str], *, own_path: bool = True, given: str | None = None) -> str:
    """Return what a command writes, with one thread.

    Raises:
        RuntimeError: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not own_path:
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, cwd=ROOT, input=given, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def intervals(scores: dict[str, list[float]], rliable: str | None) -> dict[str, str]:
    """Return the cells of some rows: the interquartile mean and its interval."""
    if not rliable:
        return dict.fromkeys(scores, "")
    found = json.loads(
        _output(
            [rliable, str(PEERS / "rliable_intervals.py")], own_path=False, given=json.dumps(scores)
        ).splitlines()[-1]
    )
    return {name: f"{mean:.1f} [{low:.1f}, {high:.1f}]" for name, (mean, low, high) in found.items()}


def lines_of(cases: Sequence[Case], done: Sequence[Learnt], options: argparse.Namespace) -> list[str]:
    """Return the page."""
    runs: dict[str, list[Learnt]] = defaultdict(list)
    for each in done:
        runs[each.case].append(each)
    finals = intervals({name: [run.final for run in each] for name, each in runs.items()}, options.rliable)
    bests = intervals({name: [run.best for run in each] for name, each in runs.items()}, options.rliable)
    seeds = f"{len(options.seeds)} seeds ({', '.join(map(str, options.seeds))})"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "gymnasium", "envpool"))
    text = [
        "# Learning of classic recipes",
        "",
        f"{seeds}; {os.cpu_count()} cores, one thread for each run, Python {platform.python_version()}, "
        f"{versions}. How: `benchmarks/classic/learning.py`.",
        "",
        "Return: interquartile mean over seeds and its 95% interval of the stratified bootstrap (rliable), "
        "of the greedy episodes at the end (20; 64 of MinAtar), then of the best evaluation of each run. "
        "Frames are environment steps. Reached: seeds whose last evaluation is at or above the threshold.",
        "",
        "| row | settings | frames | return at the end | each seed | best evaluation | threshold | reached |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in [each for each in cases if runs[each.name]]:
        each = runs[case.name]
        limit, shown = case.threshold, " ".join(f"{run.final:.1f}" for run in each)
        reached = "" if limit is None else f"{sum(run.final >= limit for run in each)} of {len(each)}"
        best = "" if case.last_steps else bests[case.name]
        frames = round(fmean(run.frames for run in each))
        cells = [case.name, case.note or "the recipe", f"{frames:,}", finals[case.name], shown, best]
        text.append(f"| {' | '.join([*cells, '' if limit is None else f'{limit:g}', reached])} |")
    return text


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [each.name for each in CASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW", help="these rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, help="steps of recipes, instead of their own")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--records", type=Path, help="JSON lines of finished runs, read and added to")
    parser.add_argument("--recorded", action="store_true", help="show the records, without other runs")
    parser.add_argument("--sb3", help="interpreter with Stable-Baselines3")
    parser.add_argument("--rliable", help="interpreter with rliable")
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Off-policy corrections for rows of old weights: three tasks, two learning rates, eight arms, over seeds.

    in step          freshness 0: every row is sampled by the weights with which its step begins
    none             freshness 4; the ratio is taken against the trainer, without importance weights
    sampler's clip   freshness 4; the ratio is taken against the sampler's own log probabilities
    tis, decoupled   freshness 4; truncated importance weights up to 2, up to 5 (AReaL's decoupled loss)
    sequence_tis     freshness 4; one truncated weight per row
    icepop, m2po     freshness 4; tokens far from the sampler are masked

    python benchmarks/algorithms/stale.py --keep /tmp/stale.jsonl                # most of an hour on one core
    python benchmarks/algorithms/stale.py --keep /tmp/stale.jsonl --write benchmarks/results/stale.md
    python benchmarks/algorithms/stale.py --smallest                             # seconds

Each task trains one small model per seed for a few supervised steps; every arm begins with that model. Each
finished run adds a line to the kept file, so the same command resumes. ``--write`` makes the page from the
kept file and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import fmean
from textwrap import wrap
from typing import Any

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.runs.reader import read_evaluations, read_metrics

sys.path.append(str(Path(__file__).parents[1]))
from intervals import interval

SMALLEST = []
SLOW = ["--smallest"]  # runs every arm of three tasks

AHEAD = 4
"""Freshness of every arm but the first."""
IN_STEP, STALE = ({"mode": "ahead", "freshness": lag} for lag in (0, AHEAD))
ARMS: dict[str, dict[str, Any]] = {
    "in step": {"schedule": IN_STEP},
    "none": {"schedule": STALE, "loss.correction": "none"},
    "sampler's clip": {"schedule": STALE, "old_logprobs": "sampler"},
    "tis": {"schedule": STALE, "loss.correction": "tis", "loss.correction_bounds": [0, 2]},
    "decoupled": {"schedule": STALE, "loss.correction": "tis", "loss.correction_bounds": [0, 5]},
    "sequence_tis": {"schedule": STALE, "loss.correction": "sequence_tis"},
    "icepop": {"schedule": STALE, "loss.correction": "icepop"},
    "m2po": {"schedule": STALE, "loss.correction": "m2po"},
}
"""Algorithm settings of each arm."""
PAIRS = (
    ("tis", "none"),
    ("sampler's clip", "none"),
    ("sampler's clip", "tis"),
    ("decoupled", "tis"),
    ("sequence_tis", "tis"),
)
"""Pairs of arms that the page compares."""
COMMON: dict[str, Any] = {
    "run": {"threads": 1, "checkpoint_minutes": 0, "rollouts_every": 0},
    "task": {"source": "prompts.jsonl", "held_out": 100},
    "policy": {"beta2": 0.99, "warmup_steps": 3},
    "rollout": {"max_rows": 512},
    "reward": {"function": "reward.py:score"},
    "placement": {
        "backend": "inline",
        "pools": {"main": 1, "answers": 1},
        "roles": {"sampler": "answers"},
    },
    "algorithm": {"name": "grpo", "prompts_per_step": 16, "samples_per_prompt": 8, "loss": {"kl": 0.0}},
    "evaluate": {"every": 10, "problems": 100},
}
"""Settings of every run, including the supervised starts."""
MODEL = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "context": 24}
LETTERS = "abcdefgh"


def sums() -> list[dict[str, str]]:
    """Return prompts for sums of three digits."""
    return [
        {"prompt": f"{a}+{b}+{c}=", "answer": str(a + b + c)}
        for a in range(10)
        for b in range(10)
        for c in range(10)
    ]


def letters() -> list[dict[str, str]]:
    """Return prompts that ask for their third letter four times."""
    return [
        {"prompt": f"{first}{second}{letter}:", "answer": letter * 4}
        for first in LETTERS
        for second in LETTERS
        for letter in LETTERS
    ]


def reversal() -> list[dict[str, str]]:
    """Return prompts that ask for four letters in reverse order."""
    words = {"".join(Random(place).choices(LETTERS, k=4)) for place in range(6000)}
    return [{"prompt": f"{word}:", "answer": word[::-1]} for word in sorted(words)]


EXACT = """
def score(prompts, completions, answer, **_):
    return [float(text == right) for text, right in zip(completions, answer)]
"""
SHARE = """
def score(prompts, completions, answer, **_):
    return [
        sum(one == other for one, other in zip(text, right)) / max(len(text), len(right))
        for text, right in zip(completions, answer)
    ]
"""


class Task:
    """A task with its own settings."""

    def __init__(
        self,
        rows: Callable[[], list[dict[str, str]]],
        reward: str,
        *,
        alphabet: str,
        max_tokens: int,
        start: int,
        steps: int,
        minibatches: int,
        rates: tuple[float, float],
        said: str,
    ) -> None:
        self.rows, self.reward, self.alphabet, self.max_tokens = rows, reward, alphabet, max_tokens
        self.start, self.steps, self.minibatches, self.rates, self.said = (
            start,
            steps,
            minibatches,
            rates,
            said,
        )


TASKS = {
    "sums": Task(
        sums,
        EXACT,
        alphabet="0123456789+=",
        max_tokens=3,
        start=120,
        steps=30,
        minibatches=1,
        rates=(2e-4, 6e-4),
        said="sums of three digits; reward 1 for the right number",
    ),
    "letters": Task(
        letters,
        SHARE,
        alphabet=f"{LETTERS}:",
        max_tokens=4,
        start=15,
        steps=30,
        minibatches=1,
        rates=(5e-4, 2e-3),
        said="the third letter of the prompt four times; reward the share of right places",
    ),
    "reversal": Task(
        reversal,
        SHARE,
        alphabet=f"{LETTERS}:",
        max_tokens=5,
        start=100,
        steps=30,
        minibatches=2,
        rates=(3e-4, 1e-3),
        said="four letters backwards; reward the share of right places",
    ),
}


def main() -> None:
    """Run what the kept file lacks, or write the page."""
    arguments = _arguments()
    if arguments.write:
        kept = [json.loads(line) for line in Path(arguments.keep).read_text().splitlines()]
        Path(arguments.write).write_text(page(kept))
        return
    with tempfile.TemporaryDirectory() as folder:
        for task, rate, arm, seed in planned(arguments):
            steps = 2 if arguments.smallest else TASKS[task].steps
            line = course(Path(folder), task, rate, arm, seed, steps, arguments.keep)
            print(f"{task} {rate:g} {arm}, seed {seed}: {line['held_out'][-1]:.3f}", flush=True)


def planned(arguments: argparse.Namespace) -> list[tuple[str, float, str, int]]:
    """Return task, rate, arm and seed of every run, seed by seed; the smallest round has each arm once."""
    if arguments.smallest:
        return [
            (task, TASKS[task].rates[0], arm, 0)
            for task, arm in zip(cycle(arguments.tasks), ARMS, strict=False)
        ]
    return [
        (task, rate, arm, seed)
        for seed in arguments.seeds
        for task in arguments.tasks
        for rate in TASKS[task].rates
        for arm in arguments.arms
    ]


def course(
    base: Path, task: str, rate: float, arm: str, seed: int, steps: int, keep: str | None
) -> dict[str, Any]:
    """Return the result of one run: from the kept file if it is there, else by a run."""
    key = {"task": task, "rate": rate, "arm": arm, "seed": seed, "steps": steps}
    file = None if keep is None else Path(keep)
    if file is not None and file.is_file():
        for line in map(json.loads, file.read_text().splitlines()):
            if all(line[name] == value for name, value in key.items()):
                found: dict[str, Any] = line
                return found
    line = {**key, "commit": commit(), **trained(base / f"{task}-{seed}", task, rate, arm, seed, steps)}
    if file is not None:
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")
    return line


def trained(base: Path, task: str, rate: float, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the held-out and sampled rewards of one run, and the metrics of its correction."""
    one = TASKS[task]
    first = start(base, task, seed, steps)
    recipe = settings_of(task, seed)
    recipe["policy"] |= {"lr": rate, "model": first}
    recipe["algorithm"] |= {"steps": steps, "minibatches": one.minibatches}
    own = {name: value for name, value in ARMS[arm].items() if name != "schedule"}
    overrides = {"schedule": ARMS[arm]["schedule"], **{f"algorithm.{name}": own[name] for name in own}}
    with tempfile.TemporaryDirectory(dir=base) as run:
        ran(recipe, base, Path(run) / "run", overrides)
        metrics = [step.metrics for step in read_metrics(Path(run) / "run")]
        judged = read_evaluations(Path(run) / "run")
    shown = (
        "mismatch/bounded/share",
        "mismatch/weight/mean",
        "mismatch/kl/mean",
        "staleness/kl/mean",
        "policy/clipped/share",
    )
    return {
        "at": [each.step for each in judged],
        "held_out": [each.mean_reward for each in judged],
        "sampled": [each["reward/score/mean"].value for each in metrics],
        **{
            name: fmean(each[name].value for each in metrics)
            for name in shown
            if all(name in each for each in metrics)
        },
    }


def start(base: Path, task: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the section ``policy.model`` with which every arm of a seed begins; the first call trains it."""
    one = TASKS[task]
    new = {"new": {**MODEL, "alphabet": one.alphabet}}
    if not base.is_dir():
        base.mkdir()
        rows = one.rows()
        Random(0).shuffle(rows)
        (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (base / "reward.py").write_text(one.reward)
        if one.start:
            recipe = settings_of(task, seed)
            recipe["policy"] |= {"lr": 2e-3, "model": new}
            recipe["algorithm"] = {
                "name": "sft",
                "steps": one.start if steps > 2 else 2,
                "prompts_per_step": 128,
            }
            recipe["evaluate"] = {"problems": 0}
            del recipe["placement"], recipe["reward"]
            ran(recipe, base, base / "start", {})
    if not one.start:
        return new
    (found,) = (base / "start" / "checkpoints").glob("step-*")
    return {"path": str(found / "policy")}


def settings_of(task: str, seed: int) -> dict[str, Any]:
    """Return a copy of the common settings for a task and a seed."""
    recipe: dict[str, Any] = json.loads(json.dumps(COMMON))
    recipe["run"]["seed"] = seed
    recipe["rollout"]["max_tokens"] = TASKS[task].max_tokens
    return recipe


def ran(recipe: Mapping[str, Any], base: Path, run: Path, overrides: Mapping[str, Any]) -> None:
    """Run a recipe whose files are in ``base``."""
    loaded = load_recipe(recipe, {**overrides, "run.dir": str(run)})
    launch(replace(loaded, base=base), quiet=True)


def commit() -> str:
    """Return the commit that last changed the package."""
    root = Path(__file__).parents[2]
    asked = ["git", "-C", str(root), "log", "-1", "--format=%h", "--", "rillflow"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def collapse(values: Sequence[float]) -> float:
    """Return the largest drop from a reward to a later one."""
    best, fall = values[0], 0.0
    for value in values:
        best = max(best, value)
        fall = max(fall, best - value)
    return fall


def page(kept: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of the kept runs."""
    seeds = sorted({line["seed"] for line in kept})
    commits = sorted({line["commit"] for line in kept})
    arms = " ".join(f'"{arm}"' for arm in ARMS if arm in {line["arm"] for line in kept})
    versions = ", ".join(f"{name} {version(name)}" for name in ("rillflow", "torch", "transformers"))
    lines = [
        "# What a correction does for rows of old weights",
        "",
        f"Measured at commit {', '.join(commits)}.",
        "",
        *wrap(
            f"Command: `python benchmarks/algorithms/stale.py --keep FILE "
            f"--seeds {' '.join(map(str, seeds))} "
            f"--arms {arms}`, then the same with `--write benchmarks/results/stale.md`; one thread of "
            f"{os.cpu_count()} cores, Python "
            f"{platform.python_version()}, {versions}.",
            width=110,
        ),
        "",
        *wrap(
            f"GRPO, seeds {', '.join(map(str, seeds))}, 16 prompts x 8 samples a step, a policy of 2 layers "
            f"and hidden size 48. Every arm but the first runs {AHEAD} versions ahead. *End* is the mean "
            "held-out reward (100 prompts, greedy) after the last step. *Less in step* is the difference "
            "within a seed. Both have Student's 95% interval over seeds. *Collapse* is the largest fall from "
            "one evaluation to a later one, of all seeds. *KL* is the k3 estimate of the divergence of "
            "trainer and sampler, *bounded* the share of tokens whose weight met a bound, *clipped* the "
            "share where the clip binds; all three are means over steps.",
            108,
        ),
        "",
    ]
    for name, task in TASKS.items():
        lines.append(
            f"- **{name}**: {task.said}; {task.start} supervised steps, then {task.steps} of GRPO with "
            f"{task.minibatches} minibatch{'es' if task.minibatches > 1 else ''} a step"
        )
    by_arm: dict[str, list[dict[int, float]]] = {arm: [] for arm in ARMS}
    for name, task in TASKS.items():
        for rate in task.rates:
            runs = {
                arm: {each["seed"]: each for each in kept if key_of(each) == (name, rate, arm, task.steps)}
                for arm in ARMS
            }
            if runs["in step"]:
                lines += ["", f"## {name}, learning rate {rate:g}", "", *cell(runs)]
                for arm, of in runs.items():
                    by_arm[arm].append(behind(of, runs["in step"]))
    lines += ["", "## All six", "", *overall(by_arm)]
    return "\n".join([*lines, ""])


def key_of(line: Mapping[str, Any]) -> tuple[str, float, str, int]:
    """Return the fields that identify the runs of one table row."""
    return line["task"], line["rate"], line["arm"], line["steps"]


def behind(of: Mapping[int, Any], in_step: Mapping[int, Any]) -> dict[int, float]:
    """Return the last held-out reward minus that of the run in step, by seed."""
    return {seed: of[seed]["held_out"][-1] - in_step[seed]["held_out"][-1] for seed in of if seed in in_step}


def cell(runs: Mapping[str, Mapping[int, Any]]) -> list[str]:
    """Return the table of a task and a rate: final rewards, then the curves."""
    lines = ["| arm | seeds | end | less in step | collapse | KL | mean weight | bounded | clipped |"]
    lines += ["|---" * 9 + "|"]
    for arm, of in runs.items():
        if not of:
            continue
        every = list(of.values())
        apart = "" if arm == "in step" else interval([*behind(of, runs["in step"]).values()])
        worst = max(collapse(each["held_out"]) for each in every)
        shown = [
            f"{fmean(each[name] for each in every):.{places}f}" if name in every[0] else ""
            for name, places in (
                ("mismatch/kl/mean", 3),
                ("mismatch/weight/mean", 2),
                ("mismatch/bounded/share", 3),
                ("policy/clipped/share", 3),
            )
        ]
        end = interval([each["held_out"][-1] for each in every])
        lines.append(f"| {arm} | {len(of)} | {end} | {apart} | {worst:.3f} | {' | '.join(shown)} |")
    at = next(iter(runs["in step"].values()))["at"]
    lines += ["", "Mean over seeds after each step:", ""]
    lines += [f"| arm | {' | '.join(map(str, at))} |", "|---" * (len(at) + 1) + "|"]
    for arm, of in runs.items():
        if of:
            means = [fmean(each["held_out"][place] for each in of.values()) for place in range(len(at))]
            lines.append(f"| {arm} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return lines


def overall(by_arm: Mapping[str, Sequence[Mapping[int, float]]]) -> list[str]:
    """Return the table of every arm over all tasks and rates, for seeds that ran in all of them."""
    lines = ["| arm | seeds | less in step, mean of all six | worst of the six |", "|---|---|---|---|"]
    for arm, cells in by_arm.items():
        seeds = set[int].intersection(*map(set, cells)) if cells else set()
        if arm != "in step" and seeds:
            by_seed = [fmean(each[seed] for each in cells) for seed in sorted(seeds)]
            worst = min(fmean(each.values()) for each in cells)
            lines.append(f"| {arm} | {len(seeds)} | {interval(by_seed)} | {worst:+.3f} |")
    lines += ["", "Two arms, seed by seed:", "", "| difference | seeds | mean of all six | each of the six |"]
    lines += ["|---|---|---|---|"]
    for one, other in PAIRS:
        both = [
            {seed: each[seed] - less[seed] for seed in each if seed in less}
            for each, less in zip(by_arm[one], by_arm[other], strict=True)
        ]
        seeds = set[int].intersection(*map(set, both)) if both else set()
        if seeds:
            apart = interval([fmean(each[seed] for each in both) for seed in sorted(seeds)])
            shown = ", ".join(f"{fmean(each.values()):+.3f}" for each in both)
            lines.append(f"| {one} - {other} | {len(seeds)} | {apart} | {shown} |")
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--keep", metavar="FILE", help="JSON lines of finished runs, read and added to")
    parser.add_argument("--smallest", action="store_true", help="every arm once, two steps each")
    parser.add_argument("--write", metavar="FILE", help="write the page from the kept file and run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()

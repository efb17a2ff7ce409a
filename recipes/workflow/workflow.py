"""From demonstrations to a policy: SFT, pairs, a reward model, a judge, and iterations of online DPO.

    sums, a part of them wrong ─ sft ─> policy ─ collect ─> answers ─ gold ─> pairs ─┬─ reward ─> scores ─┐
                                          │                                          └─ judge             │
                                          └─ online: sample, score, pair, update, three times <───────────┘

    python recipes/workflow/workflow.py [--quick] [--seed N]

Each stage runs a recipe of this folder and writes to runs/workflow. Finished stages are skipped; an
interrupted stage resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from gold import gold

import rillflow
from rillflow.cli.main import main as command

HERE = Path(__file__).parent
RUNS = Path("runs") / "workflow"
HELD_OUT, SHOWN, WRONG = 20, 20, 0.5
"""Held-out sums; demonstrations of each other sum; the share of demonstrations with a wrong digit."""
QUICK: dict[str, dict[str, Any]] = {
    "sft": {"algorithm.steps": 4, "policy.warmup_steps": 0, "evaluate.problems": 20},
    "collect": {"algorithm.samples_per_prompt": 4},
    "reward": {"algorithm.steps": 2, "policy.warmup_steps": 0},
    "judge": {"algorithm.steps": 2, "policy.warmup_steps": 0},
    "after": {"algorithm.samples_per_prompt": 4},
    "online": {"algorithm.prompts_per_step": 32, "algorithm.minibatches": 2, "evaluate.problems": 20},
}
"""Settings that shorten every stage to seconds, to check the setup."""


def sums() -> Iterator[dict[str, str]]:
    """Yield every sum of two digits with its answer."""
    for left in range(10):
        for right in range(10):
            yield {"prompt": f"{left}+{right}=", "answer": str(left + right)}


def demonstrations(rows: Iterable[dict[str, str]], random: Random) -> Iterator[dict[str, str]]:
    """Yield each sum several times, with its answer or with one wrong digit."""
    for row in rows:
        for _ in range(SHOWN):
            digits = list(row["answer"])
            if random.random() < WRONG:
                place = random.randrange(len(digits))
                digits[place] = random.choice([digit for digit in "0123456789" if digit != digits[place]])
            yield {**row, "completion": "".join(digits)}


def pairs(run: Any) -> Iterator[dict[str, str]]:
    """Yield each prompt's best answer by gold paired with every worse answer."""
    rows = sorted(run.rollouts(), key=lambda row: row.prompt)
    for prompt, group in groupby(rows, key=lambda row: row.prompt):
        ranked = sorted({(row.reward, row.completion) for row in group})
        best, chosen = ranked[-1]
        for reward, rejected in ranked:
            if reward < best:
                yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write a JSONL file if it does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Run every stage and compare the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few rows and steps of everything")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of every run (0)")
    parser.add_argument("--runs", type=Path, default=RUNS, help=f"where the runs go ({RUNS})")
    given = parser.parse_args()
    runs = given.runs.absolute()

    def stage(name: str, **settings: Any) -> Any:
        sys.stdout.write(f"\n{name}\n")
        sys.stdout.flush()
        settings = {"run.seed": given.seed, **(QUICK[name] if given.quick else {}), **settings}
        recipe = "collect" if name == "after" else name
        return rillflow.train(HERE / f"{recipe}.toml", settings=settings, dir=runs / name)

    prompts = {"task.source": str(runs / "sums.jsonl")}
    asked = {"task.held_out_source": str(runs / "held_out.jsonl")}
    random = Random(given.seed)
    known = random.sample([*sums()], 100)
    write(runs / "held_out.jsonl", known[:HELD_OUT])
    write(runs / "sums.jsonl", known[HELD_OUT:])
    write(runs / "demonstrations.jsonl", demonstrations(known[HELD_OUT:], random))
    shown = {"task.source": str(runs / "demonstrations.jsonl")}
    start = {"policy.model.path": str(stage("sft", **shown, **asked).checkpoint())}
    write(runs / "pairs.jsonl", pairs(stage("collect", **prompts, **start)))
    preferred = {"task.source": str(runs / "pairs.jsonl")}
    stage("reward", **preferred, **start)
    stage("judge", **preferred)
    online = stage("online", **prompts, **asked, **start, **{"reward.model": str(runs / "reward")})
    after = stage("after", **prompts, **{"policy.model.path": str(online.checkpoint())})
    sys.stdout.write("\niteration  reward model  gold    of what was sampled\n")
    steps = [(online, step) for step in range(1, len(online.metrics) + 1)] + [(after, 1)]
    for number, (run, step) in enumerate(steps):
        rows = run.rollouts(step)
        texts = ([row.prompt for row in rows], [row.completion for row in rows])
        right = gold(*texts, [row.columns["answer"] for row in rows])
        believed = f"{fmean(row.reward for row in rows):12.3f}" if run is online else " " * 12
        sys.stdout.write(f"{number:>9}  {believed}  {fmean(right):.3f}\n")
    compare(runs)


def compare(runs: Path) -> None:
    """Compare the last policy with the SFT policy, by gold, by the judge and by the reward model."""
    met = ["evaluate", str(runs / "online"), "--against", str(runs / "sft")]
    for judge in ([], ["--judge", str(runs / "judge")], ["--reward-model", str(runs / "reward")]):
        sys.stdout.write(f"\nrillflow {' '.join([*met, *judge])}\n")
        sys.stdout.flush()
        if code := command([*met, *judge]):
            sys.exit(code)


if __name__ == "__main__":
    main()

"""From demonstrations to a policy: fine-tuning, pairs, a reward model, a judge, iterations of online DPO.

    sums, a part of them wrong ─ sft ─> policy ─ collect ─> answers ─ gold ─> pairs ─┬─ reward ─> scores ─┐
                                          │                                          └─ judge             │
                                          └─ online: sample, score, pair, update, three times <───────────┘

    python recipes/workflow/workflow.py [--quick] [--seed N]

Each stage is a run of a recipe beside this file, in runs/workflow; what has finished is not done again, what
was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import rillflow
from rillflow.cli.main import main as command

HERE = Path(__file__).parent
RUNS = Path("runs") / "workflow"
SUMS, WRONG = 4000, 0.5
"""Problems, and the share of demonstrations with a wrong digit."""
QUICK: dict[str, dict[str, Any]] = {
    "sft": {"algorithm.steps": 4, "policy.warmup_steps": 0, "algorithm.prompts_per_step": 64},
    "collect": {"algorithm.prompts_per_step": 256},
    "reward": {"algorithm.steps": 2, "policy.warmup_steps": 0, "task.held_out": 10},
    "judge": {"algorithm.steps": 2, "policy.warmup_steps": 0, "task.held_out": 10},
    "online": {"algorithm.prompts_per_step": 32, "algorithm.minibatches": 2, "evaluate.problems": 20},
}
"""What makes every stage a matter of seconds, to see that all is in place."""


def sums(random: Random) -> Iterator[dict[str, str]]:
    """Sums with a demonstration each, which is right or has a wrong digit, and the right answer."""
    for number in random.sample(range(90 * 90), SUMS):
        left, right = 10 + number // 90, 10 + number % 90
        answer = str(left + right)
        digits = list(answer)
        if random.random() < WRONG:
            place = random.randrange(len(digits))
            digits[place] = random.choice([digit for digit in "0123456789" if digit != digits[place]])
        yield {"prompt": f"{left}+{right}=", "completion": "".join(digits), "answer": answer}


def pairs(run: Any) -> Iterator[dict[str, str]]:
    """The best and the worst answer to each prompt by gold, where they differ."""
    rows = sorted(run.rollouts(), key=lambda row: row.prompt)
    for prompt, group in groupby(rows, key=lambda row: row.prompt):
        ranked = sorted(group, key=lambda row: row.reward)
        if ranked[0].reward < ranked[-1].reward:
            yield {"prompt": prompt, "chosen": ranked[-1].completion, "rejected": ranked[0].completion}


def write(path: Path, rows: Iterator[dict[str, str]]) -> None:
    """A JSONL file, once."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Every stage, and what came of them."""
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
        return rillflow.train(HERE / f"{name}.toml", settings=settings, dir=runs / name)

    prompts = {"task.source": str(runs / "sums.jsonl")}
    write(runs / "sums.jsonl", sums(Random(given.seed)))
    start = {"policy.model.path": str(stage("sft", **prompts).checkpoint())}
    write(runs / "pairs.jsonl", pairs(stage("collect", **prompts, **start)))
    preferred = {"task.source": str(runs / "pairs.jsonl")}
    stage("reward", **preferred, **start)
    stage("judge", **preferred)
    online = stage("online", **prompts, **start, **{"reward.model": str(runs / "reward")})
    sys.stdout.write("\niteration  gold on held-out sums\n")
    for each in online.evaluations:
        sys.stdout.write(f"{each.step:>9}  {each.mean_reward:.3f}\n")
    met = ["evaluate", str(runs / "online"), "--against", str(runs / "sft")]
    for judge in ([], ["--judge", str(runs / "judge")], ["--reward-model", str(runs / "reward")]):
        sys.stdout.write(f"\nrillflow {' '.join([*met, *judge])}\n")
        sys.stdout.flush()
        if code := command([*met, *judge]):
            sys.exit(code)


if __name__ == "__main__":
    main()

"""Online DPO in miniature: which pairs to train on, and which policy samples them, over seeds.

All DPO runs use the same number of prompts and the same beta.

    sft                  a short warm start, the base of all other runs
    offline dpo          all pairs are sampled by it, and trained on in one iteration
    iterative dpo        as many prompts, a third in each of three iterations, sampled by the current policy
    selectors            iterative, with other rows of a group as its pair
    best of n            one round; its divergence from the base, next to the theoretical bound

    python benchmarks/algorithms/online.py                                              # a quarter of an hour
    python benchmarks/algorithms/online.py --seeds 0
    python benchmarks/algorithms/online.py --keep /tmp/online.jsonl --write benchmarks/results/online.md

The gold reward is the share of an answer's characters that are right in their places. Its value is the mean
over all answers of the policy, at temperature 1, to every prompt of the next iteration. Every run therefore
makes one more iteration than the table judges. Each finished run adds a line to the kept file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.formulas import best_of_n_bound

sys.path.append(str(Path(__file__).parents[1]))
from intervals import interval

SMALLEST = []
SLOW = ["--seeds 0"]  # trains seven policies

RECIPE: dict[str, Any] = {
    "run": {"threads": 1, "checkpoint_minutes": 0, "rollouts_every": 0},
    "task": {"source": "arithmetic", "digits": 1, "operators": "+-", "held_out": 20},
    "reward": {"function": "gold.py:gold"},
    "policy": {
        "lr": 3e-4,
        "warmup_steps": 4,
        "beta2": 0.99,
        "model": {"new": {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "context": 16,
                          "alphabet": "0123456789+-="}},
    },
    "rollout": {"max_rows": 512, "max_tokens": 5},
    "evaluate": {"problems": 0},
}  # fmt: skip
"""Settings of every run."""
GOLD = '''"""The share of the right digits in their places."""


def gold(prompts, completions, answer, **_):
    """Of the longer of the two texts, the places at which both have one letter."""
    return [
        sum(one == other for one, other in zip(text, right)) / max(len(text), len(right))
        for text, right in zip(completions, answer)
    ]
'''
WARM_STEPS, WARM_ROWS, WARM_LR = 100, 64, 3e-3
PROMPTS, SAMPLES, ITERATIONS, MINIBATCHES, EPOCHS, BETA, NLL = 180, 8, 3, 8, 2, 0.1, 0.2
SELECTORS = ("max_min", "max_random", "random")
BEST_OF = (2, 4, 8)


def dpo(iterations: int, **settings: Any) -> dict[str, Any]:
    """Return the settings of a run over this many iterations; all runs use the same number of prompts."""
    share = ITERATIONS // iterations
    return {
        "name": "online_dpo",
        "steps": iterations + 1,
        "prompts_per_step": PROMPTS * share,
        "samples_per_prompt": SAMPLES,
        "minibatches": MINIBATCHES * share,
        "epochs": EPOCHS,
        "loss": {"beta": BETA, "nll": NLL},
        **settings,
    }


def best_of(n: int) -> dict[str, Any]:
    """Return the settings of one round and a second one, whose rows measure the effect of the first."""
    return {
        "name": "best_of_n",
        "steps": 2,
        "prompts_per_step": 2 * PROMPTS,
        "samples_per_prompt": n,
        "minibatches": 8,
        "epochs": 2,
        "measure_kl": True,
    }


RUNS: dict[str, dict[str, Any]] = {
    "offline dpo": dpo(1, data="fresh"),
    "iterative dpo": dpo(ITERATIONS),
    "iterative dpo, fresh pairs": dpo(ITERATIONS, data="fresh"),
    **{f"iterative dpo, {name}": dpo(ITERATIONS, selector=name) for name in SELECTORS[1:]},
    **{f"best of {n}": best_of(n) for n in BEST_OF},
}
"""Algorithm settings of each run, by its name."""


def main() -> None:
    """Run everything and print the tables."""
    arguments = _arguments()
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder)
            (base / "gold.py").write_text(GOLD)
            for name in RUNS:
                found[name, seed] = line = course(base, name, seed, arguments.keep)
                print(f"{name}, seed {seed}: {line['gold'][0]:.3f} -> {line['gold'][-1]:.3f}", flush=True)
    text = page(found, arguments.seeds)
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text)


def course(base: Path, name: str, seed: int, keep: str | None) -> dict[str, Any]:
    """Return the result of one run and seed: from the kept file if it is there, else by a run."""
    file = Path(keep) if keep else None
    kept = file.read_text().splitlines() if file is not None and file.is_file() else []
    for line in map(json.loads, kept):
        if (line["name"], line["seed"], line["settings"]) == (name, seed, RUNS[name]):
            return dict(line)
    start = base / "start"
    if not start.exists():
        run(
            base, start, seed, {"name": "sft", "steps": WARM_STEPS, "prompts_per_step": WARM_ROWS}, lr=WARM_LR
        )
    (model,) = start.glob("checkpoints/*/policy")
    folder = base / name.replace(" ", "_").replace(",", "")
    metrics, gold = run(base, folder, seed, RUNS[name], model=str(model))
    made = {"name": name, "seed": seed, "settings": RUNS[name], "gold": gold}
    made["pairs"] = sum(each.get("flow/paired_groups/mean", {}).get("mean", 0) for each in metrics[:-1])
    made["kl"] = metrics[-1].get("flow/mean_divergence/mean", {}).get("mean")
    made["selected"] = metrics[0].get("flow/best_of_n_divergence/mean", {}).get("mean")
    if file is not None:
        with file.open("a") as kept_file:
            kept_file.write(json.dumps(made) + "\n")
    return made


def run(
    base: Path, folder: Path, seed: int, algorithm: dict[str, Any], *, model: str = "", lr: float = 0.0
) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the metrics of a run's steps, and the gold reward before the first step and after each one."""
    policy = {
        **RECIPE["policy"],
        **({"model": {"path": model}} if model else {}),
        **({"lr": lr} if lr else {}),
    }
    sections = {**RECIPE, "policy": policy, "algorithm": algorithm}
    loaded = load_recipe(sections, [f"run.dir={folder}", f"run.seed={seed}"])
    launch(replace(loaded, base=base), quiet=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    return metrics, [each["reward/score/mean"]["mean"] for each in metrics if "reward/score/mean" in each]


def page(found: dict[tuple[str, int], dict[str, Any]], seeds: list[int]) -> str:
    """Return the page: tables, and the result of each claim."""
    last = {name: [found[name, seed]["gold"][-1] for seed in seeds] for name in RUNS}
    first = [found["iterative dpo", seed]["gold"][0] for seed in seeds]
    lines = [
        "# Online iterations",
        "",
        "`python benchmarks/algorithms/online.py --write benchmarks/results/online.md`, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}, "
        f"seeds {', '.join(map(str, seeds))}.",
        "",
        f"Sums and differences of one-digit numbers, a Qwen2 of 56 thousand parameters after {WARM_STEPS} "
        f"supervised steps of {WARM_ROWS} rows. Gold reward: share of right characters, all answers that the "
        "policy gives to the next iteration's prompts at temperature 1; means over seeds, 95% intervals. "
        f"{ITERATIONS} x {PROMPTS} prompts, {SAMPLES} answers each, beta {BETA:g}, {NLL:g} of the chosen "
        f"answers' own loss, {ITERATIONS * MINIBATCHES * EPOCHS} optimiser steps in all. "
        "Tied rewards make no pair, so that selectors have unlike numbers of pairs of the same prompts; "
        "iterative dpo goes through the first iterations' pairs again in the later ones, in as many "
        "optimiser steps.",
        "",
        "| run | pairs | gold reward | less sft, seed by seed |",
        "|---|---|---|---|",
        f"| sft | | {interval(first)} | |",
    ]
    for name in (each for each in RUNS if "dpo" in each):
        pairs = mean(found[name, seed]["pairs"] for seed in seeds)
        gain = interval([one - other for one, other in zip(last[name], first, strict=True)])
        lines.append(f"| {name} | {pairs:.0f} | {interval(last[name])} | {gain} |")
    lines += ["", "After each iteration of iterative dpo, and the gain of each:", ""]
    lines += ["| iteration | gold reward | gain |", "|---|---|---|", f"| 0 | {interval(first)} | |"]
    by_iteration = [
        [found["iterative dpo", seed]["gold"][at] for seed in seeds] for at in range(ITERATIONS + 1)
    ]
    for at, (before, after) in enumerate(pairwise(by_iteration), 1):
        gain = interval([one - other for one, other in zip(after, before, strict=True)])
        lines.append(f"| {at} | {interval(after)} | {gain} |")
    lines += [
        "",
        f"Best of n, one round ({2 * PROMPTS} prompts, two passes over the best answers), in nats:",
        "",
    ]
    lines += ["| n | gold reward | selection, by the rewards | policy from its start, sampled | bound |"]
    lines += ["|---|---|---|---|---|"]
    for n in BEST_OF:
        of = [found[f"best of {n}", seed] for seed in seeds]
        after = interval([each["gold"][1] for each in of])
        told = " | ".join(interval([each[kind] for each in of]) for kind in ("selected", "kl"))
        lines.append(f"| {n} | {after} | {told} | {best_of_n_bound(n=n):.3f} |")
    return "\n".join([*lines, "", *verdicts(found, seeds), ""])


def verdicts(found: dict[tuple[str, int], dict[str, Any]], seeds: list[int]) -> list[str]:
    """Return the expected orderings with their measured difference and the number of seeds that agree."""
    last = {name: [found[name, seed]["gold"][-1] for seed in seeds] for name in RUNS}
    last["sft"] = [found["iterative dpo", seed]["gold"][0] for seed in seeds]
    expected = [
        ("offline dpo", "sft"),
        ("iterative dpo", "offline dpo"),
        ("iterative dpo, fresh pairs", "offline dpo"),
    ]
    expected += [
        ("iterative dpo", "iterative dpo, max_random"),
        ("iterative dpo, max_random", "iterative dpo, random"),
    ]
    lines = ["| expected | difference | seeds of which it holds |", "|---|---|---|"]
    for above, below in expected:
        apart = [one - other for one, other in zip(last[above], last[below], strict=True)]
        holds = sum(each > 0 for each in apart)
        lines.append(f"| {above} > {below} | {interval(apart)} | {holds} of {len(seeds)} |")
    under = sum(found[f"best of {n}", seed]["kl"] < best_of_n_bound(n=n) for n in BEST_OF for seed in seeds)
    lines.append(f"| best of n is under its bound | | {under} of {len(seeds) * len(BEST_OF)} runs |")
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--keep", help="a file of runs that are done")
    parser.add_argument("--write", help="where the page goes")
    return parser.parse_args()


if __name__ == "__main__":
    main()

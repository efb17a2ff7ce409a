"""WARP's Pareto front of reward and KL from the first start, compared with one long run.

    start 1 ─┬─ recipes/warp: rounds of policies, merged, interpolated ─> start 2, start 3, ... ┐
             └─ one run of the same recipe, with a KL penalty to start 1 ─> checkpoints ────────┴─> reward, KL

    python benchmarks/algorithms/warp.py --write benchmarks/results/warp.md     # some minutes

Every model answers all 100 sums of one-digit numbers at temperature 1. Reward: the share of right answers.
Divergence: the mean of log pi - log start over whole answers, in nats.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import rillflow

sys.path.append(str(Path(__file__).parents[1]))
from intervals import interval

SMALLEST = []
SLOW = ["--seeds 0"]  # trains seven policies

RECIPE = Path(__file__).parents[2] / "recipes" / "warp"
ROUNDS, POLICIES, STEPS, ETA = 3, 2, 20, 0.5
ANSWERS, LONGEST = 16, 4
"""Answers to each sum, and their largest number of tokens."""


def judged(folder: Path, start: Path) -> dict[str, float]:
    """Return reward and divergence of a model's answers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    policy, first = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (folder, start))
    texts = [f"{one}+{two}=" for one in range(10) for two in range(10)]
    right = [str(one + two) for one in range(10) for two in range(10) for _ in range(ANSWERS)]
    rows = torch.tensor([tokenizer(text)["input_ids"] for text in texts]).repeat_interleave(ANSWERS, 0)
    begin = rows.shape[1]
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(0)
        for _ in range(LONGEST):
            chances = policy(rows).logits[:, -1].softmax(-1)
            rows = torch.cat([rows, torch.multinomial(chances, 1, generator=generator)], 1)
        answers = rows[:, begin:]
        ends = answers == tokenizer.eos_token_id
        own = ends.cumsum(1) - ends.long() == 0  # up to the first end token, which belongs to the answer
        apart = (_logprobs(policy, rows, begin) - _logprobs(first, rows, begin)) * own
    said = tokenizer.batch_decode(answers.masked_fill(~own, tokenizer.eos_token_id), skip_special_tokens=True)
    return {
        "reward": mean(float(text == answer) for text, answer in zip(said, right, strict=True)),
        "kl": float(apart.sum(1).mean()),
    }


def _logprobs(model: Any, rows: Tensor, begin: int) -> Tensor:
    """Return [B, T] log probabilities of the tokens from ``begin`` on."""
    logits = model(rows).logits[:, begin - 1 : -1].log_softmax(-1)
    found: Tensor = logits.gather(2, rows[:, begin:, None]).squeeze(2)
    return found


def measured(folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """Return every point of both fronts, by name."""
    spec = importlib.util.spec_from_file_location("warp_recipe", RECIPE / "warp.py")
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    how: Mapping[str, Any] = {"rounds": ROUNDS, "policies": POLICIES, "eta": ETA, "seed": seed}
    starts = recipe.warp(folder, **how, settings={"algorithm.steps": STEPS}, quiet=True)
    found = {f"WARP, after round {number}": judged(each, starts[0]) for number, each in enumerate(starts)}
    found["the start"] = found.pop("WARP, after round 0")
    merged = starts[-1].with_name(f"{starts[-1].name}-merged")
    found[f"WARP, merged in round {ROUNDS}"] = judged(merged, starts[0])
    settings = {
        "policy.model.path": str(starts[0].absolute()),
        "run.seed": seed,
        "run.checkpoint_every": STEPS,
        "run.keep_checkpoints": ROUNDS + 1,
        "algorithm.reference": "first",
        "algorithm.steps": ROUNDS * STEPS,
    }
    run = rillflow.train(RECIPE / "run.toml", settings=settings, dir=folder / "one", quiet=True)
    for step in range(STEPS, ROUNDS * STEPS + 1, STEPS):
        found[f"one run, {step} steps"] = judged(run.checkpoint(step), starts[0])
    return found


def table(every: Sequence[Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return a line for each point, with means over seeds."""
    lines = ["| model | reward | divergence, nats an answer |", "|---|---|---|"]
    for name in sorted(every[0]):
        cells = [interval([each[name][what] for each in every]) for what in ("reward", "kl")]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return lines


def main() -> None:
    """Run every seed; print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of starts and runs")
    parser.add_argument("--write", type=Path, help="the page to write")
    given = parser.parse_args()
    every = []
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as name:
            every.append(measured(Path(name) / "warp", seed))
        print(seed, every[-1], flush=True)
    text = "\n".join(
        [
            "# WARP's front",
            "",
            f"`python benchmarks/algorithms/warp.py --seeds {' '.join(map(str, given.seeds))}`, "
            f"{os.cpu_count()} cores, "
            f"Python {platform.python_version()}, torch {version('torch')}: {ROUNDS} rounds of "
            f"{POLICIES} policies, {STEPS} steps each, eta {ETA:g}. Means over seeds with 95% intervals.",
            "",
            *table(every),
            "",
        ]
    )
    print(text)
    if given.write is not None:
        given.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Judges: the effect of reading both orders, and the cost of trusting a small reward model.

    position   a judge of two answers (56 thousand parameters) trains on pairs of 90 sums and judges those of
               10 others: how often its verdict changes with the order, and how often it is right
    believed   a reward model that saw few wrong answers (8 per sum) scores a policy: its score (the proxy)
               and the share of right answers (gold) over the steps, at several KL weights
    averaged   the same without KL, scored by one of three reward models that were trained separately from one
               start, or by the average of their weights (WARM, arXiv 2401.12187)

    python benchmarks/services/judges.py --write benchmarks/results/judges.md     # half an hour

Each finished run adds a line to the kept file. The same command continues after the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.app.trained import model_directory
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import load_model
from rillflow.rewards.judge_prompt import kept_frame
from rillflow.roles.judge import Judge
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.trained_role import Training
from rillflow.runs.layout import rollout_files
from rillflow.runs.reader import read_metrics, read_rollouts
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.preference import PREFERENCES
from rillflow.tasks.task import open_task
from rillflow.training.config import TrainConfig
from rillflow_merging.command import merge_models
from rillflow_merging.merge import MergeSettings

sys.path.append(str(Path(__file__).parents[1]))
from intervals import interval

SMALLEST = ["--only position --seeds 0 --judge-steps 6"]
NEEDS = ["rillflow_merging"]

RECIPES = Path(__file__).parents[2] / "recipes"
WINDOW = 5
"""Steps in the means at the beginning and at the end."""
WRONG = 8
"""Wrong answers per sum that the reward model sees."""
PRICES = (0.0, 0.1, 0.5)
"""KL weights; 0 becomes 1e-9, so that the divergence is still measured."""
ORDERS = ("random", "both")
"""Orders in which training shows a pair: one random order, or both."""
PART = ("position", "believed", "averaged")
BEGUN, APART, RATES = 100, 60, (1e-3, 1.5e-3, 2e-3)
"""Averaged reward models: shared first steps, then steps and learning rate of each one alone."""


def main() -> None:
    """Run what is missing in the kept file; print or write the tables."""
    arguments = _arguments()
    found = (
        [json.loads(line) for line in arguments.keep.read_text().splitlines()]
        if arguments.keep.exists()
        else []
    )
    for wanted in _wanted(arguments):
        if any(all(each.get(key) == value for key, value in wanted.items()) for each in found):
            continue
        with tempfile.TemporaryDirectory() as folder:
            measure = {"position": position, "believed": believed, "averaged": averaged}[wanted["part"]]
            made = measure(Path(folder), wanted)
        found.append({**wanted, **made})
        print(json.dumps(found[-1]), flush=True)
        with arguments.keep.open("a") as kept:
            kept.write(json.dumps(found[-1]) + "\n")
    text = "\n".join(tables(found, arguments))
    print(text)
    if arguments.write is not None:
        arguments.write.write_text(text + "\n")


def _wanted(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for seed in arguments.seeds:
        if "position" in arguments.only:
            yield from (
                {"part": "position", "seed": seed, "steps": arguments.judge_steps, "orders": orders}
                for orders in ORDERS
            )
        if "believed" in arguments.only:
            yield {"part": "believed", "seed": seed, "steps": arguments.steps, "prices": [*PRICES]}
        if "averaged" in arguments.only:
            yield {"part": "averaged", "seed": seed, "steps": arguments.steps, "rates": [*RATES]}


def _run(recipe: str, folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    given = {**settings, "run.dir": str(folder / name)}
    loaded = load_recipe(RECIPES / recipe, given)
    return Path(launch(loaded, quiet=True).run)


def position(folder: Path, wanted: Mapping[str, Any]) -> dict[str, float]:
    """Return a judge's accuracy, bias and contradictions on held-out pairs, each in both orders."""
    steps, seed = wanted["steps"], wanted["seed"]
    settings = {"run.seed": seed, "algorithm.steps": steps, "algorithm.orders": wanted["orders"]}
    settings["algorithm.prompts_per_step"] = 64 if wanted["orders"] == "both" else 128  # as many rows
    run = _run("pairwise/run.toml", folder, "judge", {**settings, "evaluate": None})
    model = ModelConfig(path=str(model_directory(run, "judge").absolute()))
    loaded = load_model(model, seed=0, device=torch.device("cpu"), base=Path())
    frame = kept_frame(loaded.module.config.to_dict())
    assert frame is not None
    judge = Judge(ModelShard.whole(loaded), Training(config=TrainConfig(), seed=0), frame=frame)
    source = TaskConfig(source=str(RECIPES / "preference/pairs.jsonl"), held_out=10)
    task = open_task(source, PREFERENCES, base=Path(), seed=seed)
    apart = {pair.key for pair in task.held_out}
    whole = open_task(source.model_copy(update={"held_out": 0}), PREFERENCES, base=Path(), seed=seed).train
    pairs = [pair for pair in whole if pair.key in apart]
    texts = ([str(pair.prompt) for pair in pairs], [str(pair.completion) for pair in pairs])
    _, said = judge.compared(*texts, [pair.others[0] for pair in pairs])
    first, second = said.likely + said.bias, said.likely - said.bias
    return {
        "pairs": len(pairs),
        "contradiction": float(said.contradicts.double().mean()),
        "bias": float(said.bias.mean()),
        "right_first": float((first > 0.5).double().mean()),
        "right_second": float((second > 0.5).double().mean()),
        "right_both": float((said.likely > 0.5).double().mean()),
    }


def believed(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return proxy, gold and divergence of a policy, step by step, for every KL weight."""
    source = _few_pairs(folder, wanted["seed"])
    scorer = _run("preference/run.toml", folder, "scorer", {**source, "algorithm.steps": 120})
    return {str(price): _trained(folder, wanted, scorer, price) for price in PRICES}


def averaged(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same for one reward model and for the average of several."""
    source = _few_pairs(folder, wanted["seed"])
    start = _run("preference/run.toml", folder, "start", {**source, "algorithm.steps": BEGUN})
    path = {"policy.model.new": None, "policy.model.path": str(_scorer(start))}
    scorers = [
        _run(
            "preference/run.toml",
            folder,
            f"scorer-{number}",
            {
                **source,
                **path,
                "policy.lr": rate,
                "algorithm.steps": APART,
                "run.seed": 100 * wanted["seed"] + number,
            },
        )
        for number, rate in enumerate(RATES, 1)
    ]
    merge_models([_scorer(run) for run in scorers], folder / "average", MergeSettings())
    middle = scorers[len(RATES) // 2]
    return {
        "one": _trained(folder, wanted, middle, 0.0),
        "average": _trained(folder, wanted, folder / "average", 0.0),
    }


def _scorer(run: Path) -> Path:
    return model_directory(run, "reward_model").absolute()


def _few_pairs(folder: Path, seed: int) -> dict[str, Any]:
    """Return the settings of a task with few wrong answers per sum."""
    lines = [json.loads(line) for line in (RECIPES / "preference/pairs.jsonl").read_text().splitlines()]
    random, by_prompt = Random(seed), dict[str, list[dict[str, str]]]()
    for line in lines:
        by_prompt.setdefault(line["prompt"], []).append(line)
    few = [each for rows in by_prompt.values() for each in random.sample(rows, WRONG)]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in few))
    return {"task.source": str(folder / "pairs.jsonl"), "run.seed": seed}


def _trained(folder: Path, wanted: Mapping[str, Any], scorer: Path, price: float) -> dict[str, list[float]]:
    """Train a policy on a reward model's scores; return proxy, gold and divergence of each step."""
    settings = {"run.seed": wanted["seed"], "reward.model": str(scorer), "algorithm.steps": wanted["steps"]}
    settings |= {"algorithm.prompts_per_step": 20, "algorithm.loss.kl": price or 1e-9, "evaluate": None}
    run = _run("preference/use.toml", folder, f"policy-{scorer.name}-{price}", settings)
    metrics = [each.metrics for each in read_metrics(run) if each.phase == "grpo"]
    gold = [
        mean(float(row.completion == row.columns["answer"]) for row in read_rollouts(run, step))
        for step in rollout_files(run)
    ][-wanted["steps"] :]
    return {
        "proxy": [each["reward/score/mean"].value for each in metrics],
        "gold": gold,
        "kl": [each["policy/kl/mean"].value for each in metrics],
    }


def tables(found: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> list[str]:
    """Return the lines of the page."""
    seeds = " ".join(map(str, arguments.seeds))
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    lines = [
        "# Judges: both orders, and a reward model that is believed too much",
        "",
        f"`python benchmarks/services/judges.py --seeds {seeds} --steps {arguments.steps} --judge-steps "
        f"{arguments.judge_steps}`, {os.cpu_count()} cores, {versions}. Means over seeds, with 95% intervals "
        "by Student's t.",
    ]
    judged = [each for each in found if each["part"] == "position"]
    if judged:
        lines += ["", "## Position", "", *_position_table(judged)]
    hacked = [each for each in found if each["part"] == "believed"]
    if hacked:
        lines += ["", "## A small reward model", "", *_believed_table(hacked, arguments.steps)]
    many = [each for each in found if each["part"] == "averaged"]
    if many:
        lines += ["", "## The average of three reward models", "", *_averaged_table(many, arguments.steps)]
    return lines


def _position_table(judged: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "A judge is asked about pairs of ten sums that it has not seen. One order: the verdict is what it "
        "says of the two as shown; both: the mean of what it says of them in both.",
        "",
        "| shown in training | verdict turns with the order | right, the right answer first | second "
        "| right, both orders | mean bias to the first |",
        "|---|---|---|---|---|---|",
    ]
    for orders, called in (("random", "one order a pair, drawn"), ("both", "both orders")):
        rows = [each for each in judged if each["orders"] == orders]
        names = ("contradiction", "right_first", "right_second", "right_both", "bias")
        cells = [interval([each[name] for each in rows]) for name in names]
        lines.append(f"| {called} | {' | '.join(cells)} |")
    apart = [abs(each["right_first"] - each["right_second"]) for each in judged]
    gained = [each["right_both"] - (each["right_first"] + each["right_second"]) / 2 for each in judged]
    return [
        *lines,
        "",
        f"By where the right answer stands, one order's accuracy differs by {interval(apart)}; that of both "
        "orders by 0, for the verdict is the same whichever is shown first. Both orders are right more often "
        f"than one order in the mean by {interval(gained)}.",
    ]


def _believed_table(hacked: Sequence[Mapping[str, Any]], steps: int) -> list[str]:
    lines = [
        f"The reward model learnt from {WRONG} wrong answers a sum, in 120 steps. Proxy is its score of "
        f"sampled answers, gold the share of right ones, of the first {WINDOW} and the last {WINDOW} "
        f"of {steps} steps; divergence is that of the last, in nats a token.",
        "",
        "| `loss.kl` | proxy first | last | gold first | last | gold's change | divergence |",
        "|---|---|---|---|---|---|---|",
    ]
    change = {price: _gained([each[str(price)] for each in hacked]) for price in PRICES}
    lines += [f"| {price:g} | {_cells([each[str(price)] for each in hacked])} |" for price in PRICES]
    kept = [
        f"{interval([b - a for a, b in zip(change[0.0], change[price], strict=True)])} at {price:g}"
        for price in PRICES[1:]
    ]
    return [
        *lines,
        "",
        f"By a price gold ends higher, of the same reward models and seeds: {', '.join(kept)}.",
    ]


def _averaged_table(many: Sequence[Mapping[str, Any]], steps: int) -> list[str]:
    lines = [
        f"Three reward models from one start ({BEGUN} steps), {APART} steps each at rates {RATES[0]:g} to "
        f"{RATES[-1]:g}, as above; a policy is scored by the middle one, or by all three merged, "
        f"for {steps} steps.",
        "",
        "| scored by | proxy first | last | gold first | last | gold's change | divergence |",
        "|---|---|---|---|---|---|---|",
        *(f"| {name} | {_cells([each[name] for each in many])} |" for name in ("one", "average")),
    ]
    both = [_gained([each[name] for each in many]) for name in ("one", "average")]
    apart = [more - less for less, more in zip(*both, strict=True)]
    won = sum(each > 0 for each in apart)
    told = f"By the average gold ends higher by {interval(apart)}, on {won} of {len(apart)} seeds."
    return [*lines, "", told]


def _gained(runs: Sequence[Mapping[str, Sequence[float]]]) -> list[float]:
    """Return the gold at the end minus the gold at the beginning of every run."""
    return [mean(run["gold"][-WINDOW:]) - mean(run["gold"][:WINDOW]) for run in runs]


def _cells(runs: Sequence[Mapping[str, Sequence[float]]]) -> str:
    """Return a row's cells: proxy and gold at beginning and end, gold's change, the last divergence."""
    ends = [(name, part) for name in ("proxy", "gold") for part in (slice(WINDOW), slice(-WINDOW, None))]
    cells = [interval([mean(run[name][part]) for run in runs]) for name, part in ends]
    cells += [interval(_gained(runs)), interval([mean(run["kl"][-WINDOW:]) for run in runs])]
    return " | ".join(cells)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PART, default=PART, help="which parts")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="one run each")
    parser.add_argument("--steps", type=int, default=40, help="of a policy that believes")
    parser.add_argument("--judge-steps", type=int, default=200, help="of a judge")
    parser.add_argument("--keep", type=Path, default=Path("judges.jsonl"), help="what is done, a line a run")
    parser.add_argument("--write", type=Path, help="where the tables are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Tables of published asynchronous steps, simulated, and the signs of all published pairs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise, permutations
from pathlib import Path

from published import asynchronous, verl
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.hardware import shipped_stacks
from rillflow_planner.simulator.simulate import simulate

FITS = Path(__file__).parents[2] / "results/fits.json"
SIGNS: dict[str, list[tuple[float, float]]] = defaultdict(list)
"""Published and predicted change of each pair, by kind; the tables fill it."""


def _simulated_s(row: verl.Row, mean: float) -> float:
    """Seconds of one of verl's steps, simulated."""
    step = verl.problem(row, mean)
    return simulate(step, CostModel(step), verl.plan(row), steps=12 if row.is_apart else 2).settled_step_s


def verl_lines() -> list[str]:
    """verl's published steps, and its required batches with equal and with longer answers."""
    mean = json.loads(FITS.read_text("utf-8"))["verl"]["values"]["mean"]
    lines = [
        "## verl, in step and fully asynchronous",
        "",
        "Seconds of a step with the shipped `verl` factors, and the mean length of their fit "
        f"({mean:.0f} tokens). staleness_threshold is the plan's `freshness`, require_batches its `streams`.",
        "",
        "| training + generating | published | simulated | error |",
        "|---|---|---|---|",
    ]
    found = {row: _simulated_s(row, mean) for row in verl.ROWS}
    for row, spent in found.items():
        lines.append(f"| {row.name} | {row.step_s:.0f} | {spent:.0f} | {spent / row.step_s - 1:+.0%} |")
    for one, other in permutations(verl.ROWS, 2):
        if what := verl.change(one, other):
            kind = "verl, 7B: " + ("more devices" if " to " in what and "stal" not in what else "asynchrony")
            SIGNS[kind].append((other.step_s - one.step_s, found[other] - found[one]))
    lines += [
        "",
        "require_batches, 64 + 64, staleness 0.5. The page says that answers grew longer the fewer batches "
        "were taken at once; no lengths are published. With the lengths above for all three, and with those "
        "with which the planner computes the published update:",
        "",
        "| required | published | update | lengths alike | error | mean by the update | simulated | error |",
        "|---" * 8 + "|",
    ]
    spent_s = []
    for row in verl.REQUIRED:
        own = verl.mean_of(row)
        alike, spent = _simulated_s(row, mean), _simulated_s(row, own)
        spent_s.append(spent)
        cells = (f"{one:.0f} | {one / row.step_s - 1:+.0%}" for one in (alike, spent))
        first, second = cells
        lines.append(
            f"| {row.required} | {row.step_s:.0f} | {row.update_s:.0f} | {first} | {own:.0f} | {second} |"
        )
    for (one, before), (other, after) in pairwise(zip(verl.REQUIRED, spent_s, strict=True)):
        SIGNS["verl, 7B: required batches, lengths by the update"].append(
            (other.step_s - one.step_s, after - before)
        )
    return [*lines, ""]


def pair_lines() -> list[str]:
    """Published pairs of other models and stacks."""
    lines = [
        "## Ahead or in step, other pairs",
        "",
        "Seconds of a step on both sides; `benchmarks/planner/published/asynchronous.py` has each with its "
        "source and what is assumed. None of them is in a fit. Lengths by the published mean, or, if there "
        "is none, by the update of the first side.",
        "",
        "| pair | mean | published | computed | simulated | published change | computed | simulated |",
        "|---" * 8 + "|",
    ]
    for pair in asynchronous.PAIRS:
        sides = (pair.one, pair.other)
        found = [[one.step_s for one in sides]]
        found += [[run(one) for one in sides] for run in (pair.computed_s, pair.simulated_s)]
        changes = [other / one - 1 for one, other in found]
        seconds = " | ".join(f"{one:.0f}, {other:.0f}" for one, other in found)
        shown = " | ".join(f"{change:+.0%}" for change in changes)
        lines.append(f"| {pair.name} | {pair.mean_tokens:.0f} | {seconds} | {shown} |")
        kind = f"{pair.name.split(',')[0].split(' ')[0]}, other pairs, "
        SIGNS[kind + "computed"].append((changes[0], changes[1]))
        SIGNS[kind + "simulated"].append((changes[0], changes[2]))
    return [*lines, ""]


def sign_lines(signs: Mapping[str, list[tuple[float, float]]]) -> list[str]:
    """Signs of all pairs of the tables above."""
    lines = ["## Signs", "", "| pairs | right sign |", "|---|---|"]
    for name, pairs in signs.items():
        right = sum((told < 0) == (mine < 0) for told, mine in pairs)
        lines.append(f"| {name} | {right} of {len(pairs)} |")
    shipped = shipped_stacks()["nemo-rl"].published
    assert shipped is not None and shipped.ahead is not None and shipped.doubled is not None
    for what, gain in (("ahead", shipped.ahead), ("twice the devices", shipped.doubled)):
        lines.append(f"| NeMo-RL, {what}, computed with the model left out | {gain.right} of {gain.pairs} |")
    return [*lines, "", "NeMo-RL's pairs: [planner.md](planner.md).", ""]

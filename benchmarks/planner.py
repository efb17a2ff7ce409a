"""What was published about steps, what was fitted of it, and what the cost model predicts of the rest.

    python benchmarks/planner.py --write benchmarks/results/planner.md
    python benchmarks/planner.py --speed

Every row that is known stays in the tables, right or wrong. Bold rows were fitted. The settings, their
sources and what is assumed stand at the head of each file in ``benchmarks/published``.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from published import hybridflow, nemo, tails

from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.factors import Factors

COMMAND = "python benchmarks/planner.py --write benchmarks/results/planner.md"
WITHIN = (0.15, 0.3)
"""The median and the worst error aimed at."""


def main() -> None:
    """Write the tables, or time the cost model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="a markdown file for the tables")
    parser.add_argument("--speed", action="store_true", help="time the cost model alone")
    chosen = parser.parse_args()
    if chosen.speed:
        print("\n".join(speed_lines()))
        return
    errors: list[float] = []
    seconds = [*nemo_lines(errors), *verl_lines(errors), *rollpacker_lines(errors)]
    lines = [
        "# Published steps, and what the cost model predicts",
        "",
        f"`{COMMAND}`, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}. "
        "Bold: fitted. Seconds unless said. Which settings, sources and assumptions: the heads of "
        "`benchmarks/published/*.py`.",
        "",
        "All rows in seconds together: " + _summary(errors),
        "",
        *seconds,
        *areal_lines(),
        *mesh_lines(),
        *placement_lines(),
        *speed_lines(),
    ]
    text = "\n".join(lines) + "\n"
    if chosen.write:
        chosen.write.write_text(text, "utf-8")
    else:
        print(text)


def nemo_lines(all_errors: list[float]) -> list[str]:
    """The table of NeMo-RL's steps."""
    rows = nemo.rows()
    fitted = [row for row in rows if row.is_fitted]
    values = nemo.fit(fitted)
    lines = [
        f"## NeMo-RL 0.4 to 0.7: {len(rows)} steps, {len(fitted)} fitted",
        "",
        "One set of factors for all models, devices and releases: "
        + ", ".join(f"{name} {value:.3g}" for name, value in values.items())
        + ".",
        "",
        "| release | device | model | ahead | devices | published | predicted | error | generate | score "
        "| train | refit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors, steps = [], {}
    for row in rows:
        parts = nemo.predict(row, values)
        steps[row] = parts.step
        error = parts.step / row.step_s - 1
        if not row.is_fitted:
            errors.append(abs(error))
        mark = "**" if row.is_fitted else ""
        lines.append(
            f"| {row.release} | {row.device} | {mark}{row.model}{mark} | {row.ahead} | {row.devices} "
            f"| {row.step_s:g} | {parts.step:.1f} | {error:+.0%} | {parts.generate:.1f} | {parts.score:.1f} "
            f"| {parts.train:.1f} | {parts.refit:.1f} |"
        )
    all_errors.extend(errors)
    return [*lines, "", _summary(errors), "", *_signs(rows, steps), ""]


def _signs(rows: Sequence[nemo.Row], steps: dict[nemo.Row, float]) -> list[str]:
    """Does doubling, or running ahead, gain what was published?"""
    lines = ["| what changed | published | predicted | same sign |", "|---|---|---|---|"]
    for one in rows:
        for other in rows:
            alike = (one.release, one.device, one.model, one.limit) == (
                other.release,
                other.device,
                other.model,
                other.limit,
            )
            doubles = one.ahead == other.ahead == 0 and other.devices == 2 * one.devices
            ahead = one.ahead == 0 and other.ahead == 1 and other.devices == one.devices
            if not alike or not (doubles or ahead):
                continue
            what = f"{one.devices} to {other.devices} devices" if doubles else f"ahead on {one.devices}"
            published, predicted = other.step_s / one.step_s - 1, steps[other] / steps[one] - 1
            is_same = (published < 0) == (predicted < 0)
            lines.append(
                f"| {one.release} {one.device} {one.model}, {what} | {published:+.0%} | {predicted:+.0%} "
                f"| {'yes' if is_same else '**no**'} |"
            )
    return lines


def verl_lines(all_errors: list[float]) -> list[str]:
    """The table of verl's steps."""
    fit = tails.fit_verl()
    lines = [
        "## verl, Qwen2.5-Math-7B on H20, up to 28k tokens: 6 steps",
        "",
        "Fitted: the stages of 64 in step, the update of 128 in step and of 16 + 16: mean "
        f"{fit.mean:.0f} tokens in step and {fit.ahead_mean:.0f} ahead, train_flops "
        f"{fit.factors.train_flops:.2f}, score_flops {fit.factors.score_flops:.2f}, decode_launch_s "
        f"{fit.factors.decode_launch_s:.2g}; sigma {fit.sigma:g} is assumed. Published: predicted by stage.",
        "",
        "| devices | published step | predicted | error | generate | score | update |",
        "|---|---|---|---|---|---|---|",
    ]
    errors, steps = [], {}
    for row in tails.VERL:
        parts = tails.predict_verl(row, fit)
        steps[row.training, row.is_ahead] = parts.step
        error = parts.step / row.step_s - 1
        is_fitted = row in (tails.VERL[1], tails.VERL[3])
        if not is_fitted:
            errors.append(abs(error))
        where = f"{row.training} + {row.training} ahead" if row.is_ahead else f"{row.training} in step"
        exposed = f"({row.generate_s:g} exposed)" if row.is_ahead else f"{row.generate_s:g}"
        mark = "**" if is_fitted else ""
        lines.append(
            f"| {mark}{where}{mark} | {row.step_s:g} | {parts.step:.0f} | {error:+.0%} "
            f"| {exposed}: {parts.generate:.0f} | {row.score_s:g}: {parts.score:.0f} "
            f"| {row.update_s:g}: {parts.update:.0f} |"
        )
    all_errors.extend(errors)
    doubled = steps[128, False] / steps[64, False] - 1
    return [
        *lines,
        "",
        _summary(errors),
        "",
        "Doubling 64 to 128 in step: published -2% over the whole run (-17% over its first 100 steps), "
        f"predicted {doubled:+.0%}. Half the devices ahead against all in step: faster in all three, "
        "published and predicted.",
        "",
    ]


def areal_lines() -> list[str]:
    """The shape of throughput over the freshness bound."""
    predicted = tails.predict_areal(Factors(decode_row_s=2e-5))
    published = tails.AREAL_BOUNDS
    return [
        "## AReaL, 1.5B on 8 devices: throughput against bound 0, nothing fitted",
        "",
        "| bound | " + " | ".join(str(bound) for bound in published) + " |",
        "|---|" + "---|" * len(published),
        "| published | " + " | ".join(f"{rate / published[0]:.2f}" for rate in published.values()) + " |",
        "| predicted | " + " | ".join(f"{gain:.2f}" for gain in predicted.values()) + " |",
        "",
    ]


def rollpacker_lines(all_errors: list[float]) -> list[str]:
    """The table of over-sampled rounds."""
    fit = tails.fit_rollpacker()
    lines = [
        "## RollPacker, Qwen2.5-7B up to 8k on 16 H800: rollout",
        "",
        f"Fitted on 4 of 8: median {fit.response.median:g}, sigma {fit.response.sigma:g}, of which the "
        f"prompt's part is {fit.shared:g}, decode_launch_s {fit.factors.decode_launch_s:.2g}.",
        "",
        "| prompts begun | answers begun | published | predicted | error |",
        "|---|---|---|---|---|",
    ]
    errors = []
    for row in tails.ROLLPACKER:
        predicted = tails.predict_rollpacker(row, fit)
        error = predicted / row.seconds - 1
        if not row.is_fitted:
            errors.append(abs(error))
        mark = "**" if row.is_fitted else ""
        lines.append(
            f"| {mark}{row.prompts:g}{mark} | {mark}{row.answers:g}{mark} | {row.seconds:g} "
            f"| {predicted:.1f} | {error:+.0%} |"
        )
    all_errors.extend(errors)
    return [*lines, "", _summary(errors), ""]


def mesh_lines() -> list[str]:
    """Generation meshes on 16 devices."""
    lines = [
        "## HybridFlow, 16 A100 trained at tp 8, dp 2: generation and transition by generate_tp",
        "",
        "| model | 1 | 2 | 4 | 8 | best | against 8 | published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    published = {"Llama-7B": "2, -60.3%", "Llama-13B": "4, -36.4%"}
    for model, best in published.items():
        found = hybridflow.meshes(model)
        least = min(found, key=lambda size: found[size])
        cells = " | ".join(f"{found[size]:.0f}" if size in found else "no room" for size in (1, 2, 4, 8))
        lines.append(f"| {model} | {cells} | {least} | {found[least] / found[8] - 1:+.0%} | {best} |")
    return [*lines, ""]


def placement_lines() -> list[str]:
    """The best placement by model and size."""
    lines = [
        "## HybridFlow, PPO on machines of 8 A100: which placement wins",
        "",
        "Seconds of the best plan of each placement: all together; split into actor + reference and critic "
        "+ reward; each apart. Published: the best of these, as section 8.3 says in words; the last models "
        "are those of its figure 13. That all are together on 64 was in view when the share of the links was "
        "chosen; the last models were not.",
        "",
        "| actor, critic | devices | published | of the three | together | split | apart | best of all | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    hits = asked = 0
    for model, judge in hybridflow.MODELS:
        for devices in hybridflow.SIZES:
            found = hybridflow.placed(model, judge, devices)
            names = f"{model}, {judge}"
            if found is None:
                lines.append(f"| {names} | {devices} | | nothing fits | | | | | |")
                continue
            known = hybridflow.PUBLISHED.get((model, judge), {}).get(devices, "")
            asked, hits = asked + bool(known), hits + (known == found.least)
            cells = " | ".join(_seconds(one) for one in (found.colocated_s, found.split_s, found.apart_s))
            lines.append(
                f"| {names} | {devices} | {known} | {found.least} | {cells} | {found.best} "
                f"| {found.best_s:.1f} |"
            )
    return [*lines, "", f"Of {asked} published, the same of the three wins in {hits}.", ""]


def speed_lines() -> list[str]:
    """What the cost model itself takes."""
    lines = [
        "## What asking takes",
        "",
        "| devices | pools asked for | options found | all, s | one, ms |",
        "|---|---|---|---|---|",
    ]
    for devices in (128, 1024):
        step = hybridflow.problem("Llama-7B", devices)
        costs, begun = CostModel(step), time.process_time()
        sizes = step.hardware.fleets[0].sizes
        found = [len(costs.options(unit, "a100", size)) for unit in step.units for size in sizes]
        took = time.process_time() - begun
        lines.append(
            f"| {devices} | {len(found)} | {sum(found)} | {took:.2f} | {1e3 * took / len(found):.2f} |"
        )
    return [*lines, ""]


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < float("inf") else "-"


def _summary(errors: Iterable[float]) -> str:
    found = sorted(errors)
    near, far = (sum(error <= bound for error in found) for bound in WITHIN)
    return (
        f"{len(found)} predicted: median error {statistics.median(found):.0%}, worst {found[-1]:.0%}; within "
        f"{WITHIN[0]:.0%}: {near}, within {WITHIN[1]:.0%}: {far}."
    )


if __name__ == "__main__":
    main()

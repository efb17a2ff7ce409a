"""What was published about steps, what the planner makes of it, and how far off each factor set is.

    python benchmarks/planner.py --write benchmarks/results/planner.md      # with the factors as shipped
    python benchmarks/planner.py --fit nemo-rl                              # anew, with rows left out
    python benchmarks/planner.py --fit nemo-rl --go-on --seconds 100        # what a stopped one has left

Every row is a cluster's file, a workload and a plan (``benchmarks/published``); ``evaluate`` is what
``rillflow plan`` calls. Every row that is known stays in the tables, right or wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import median

import numpy as np
from published import hybridflow, nemo, verl
from published.fitting import Fit, Values, spread, summary

from rillflow_planner.hardware import Accuracy, shipped_stacks

SMALLEST = [""]
NEEDS = ["rillflow_planner"]

ROOT = Path(__file__).resolve().parent
COMMAND = "python benchmarks/planner.py --write benchmarks/results/planner.md"
FITS = ROOT / "results/fits.json"
"""Measured over predicted of rows left out, by stack and by what was left out; ``--fit`` writes them."""
DRAWS, DRAWN = 15, 10
"""Fits to so many rows drawn at random, and how many each has."""
NEMO: Fit[nemo.Row] = Fit(ratios=lambda row, values: [nemo.step_s(row, values) / row.step_s], free=nemo.FREE)
VERL: Fit[verl.Row] = Fit(ratios=verl.ratios, free=verl.FREE)
HEAD = ["| left out | fits | rows | median error | worst | within 15% | within 30% |", "|---" * 7 + "|"]


def main() -> None:
    """Write the tables, or fit a stack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="a markdown file for the tables")
    parser.add_argument("--fit", choices=("nemo-rl", "verl"), help="fit a stack, and with rows left out")
    parser.add_argument("--go-on", action="store_true", help="with the fits that one before had left")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fit after so many")
    chosen = parser.parse_args()
    if chosen.fit:
        fit_stack(chosen.fit, go_on=chosen.go_on, seconds=chosen.seconds)
        return
    fits = json.loads(FITS.read_text("utf-8"))
    lines = [
        "# Published steps, and what the planner predicts",
        "",
        f"`{COMMAND}`, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}. "
        "Each row is a cluster's file, a workload and a plan (`benchmarks/published`), and goes through "
        "`evaluate`, as `rillflow plan` does, with the factors as shipped. Seconds unless said.",
        "",
        *nemo_lines(fits["nemo-rl"]),
        *verl_lines(fits["verl"]),
        *mesh_lines(),
        *placement_lines(),
    ]
    text = "\n".join(lines) + "\n"
    if chosen.write:
        chosen.write.write_text(text, "utf-8")
    else:
        print(text)


def fit_stack(name: str, *, go_on: bool, seconds: float) -> None:
    """Fit to all rows; then with some left out, written to ``FITS`` as soon as each is known."""
    how = {"go_on": go_on, "until": time.monotonic() + seconds}
    if name == "verl":
        _fit(name, VERL, verl.ROWS, {"each row left out": [[row] for row in verl.ROWS]}, **how)
        return
    rows = nemo.rows()
    parts = {
        what: [[row for row in rows if is_held(row)] for is_held in held]
        for what, held in nemo.LEFT_OUT.items()
    }
    drawn = [random.Random(seed).sample(rows, DRAWN) for seed in range(DRAWS)]
    others = [[row for row in rows if row not in some] for some in drawn]
    _fit(name, NEMO, rows, {**parts, f"all but {DRAWN} drawn at random": others}, **how)


def _fit(
    name: str,
    fit: Fit,  # type: ignore[type-arg]
    rows: Sequence,  # type: ignore[type-arg]
    parts: dict[str, list],  # type: ignore[type-arg]
    *,
    go_on: bool,
    until: float,
) -> None:
    known = json.loads(FITS.read_text("utf-8"))
    found = known[name] if go_on else {}
    if not found:
        before = known.get(name, {}).get("values")
        values = min((fit.values(rows, begin) for begin in (None, before)), key=partial(fit.residue, rows))
        found = {"values": values, "at_bound": fit.at_bound(values), "rows": len(rows)}
    for what, held in parts.items():
        done = found.setdefault(what, {"fits": 0, "ratios": []})
        for part in held[done["fits"] :]:
            FITS.write_text(json.dumps({**known, name: found}, indent=1) + "\n", "utf-8")
            if time.monotonic() > until:
                print(f"stopped at {what}, {done['fits']} of {len(held)}; --go-on goes on")
                return
            done["ratios"] += [round(ratio, 4) for ratio in fit.left_out(rows, part, found["values"])]
            done["fits"] += 1
        print(what, summary(done["ratios"]), spread(done["ratios"]), flush=True)
    FITS.write_text(json.dumps({**known, name: found}, indent=1) + "\n", "utf-8")
    print(json.dumps(found["values"], indent=1))


def claimed(fit: dict[str, Values | dict]) -> Accuracy:  # type: ignore[type-arg]
    """What a stack claims: the errors of all its rows left out, however they were."""
    ratios = [ratio for part in fit.values() if isinstance(part, dict) for ratio in part.get("ratios", [])]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    low, high = spread(ratios)
    return Accuracy(
        median=round(median(errors), 2),
        worst=round(errors[-1], 2),
        low=round(low, 2),
        high=round(high, 2),
    )


def error_lines(fit: dict, fitted: Sequence[float], name: str) -> list[str]:  # type: ignore[type-arg]
    """The table of a stack's errors, fitted and left out, and what it claims."""
    rows = [f"| nothing: all fitted | 1 | {summary(fitted)} |"]
    for what, part in fit.items():
        if isinstance(part, dict) and "ratios" in part:
            rows.append(f"| {what} | {part['fits']} | {summary(part['ratios'])} |")
    told = claimed(fit)
    shipped = shipped_stacks()[name].accuracy
    assert shipped == told, f"stacks.toml has {shipped} for {name}, left out were {told}"
    return [
        *HEAD,
        *rows,
        "",
        f"Claimed of `{name}`, all of those left out together: median error {told.median:.0%}, worst "
        f"{told.worst:.0%}; of ten steps one takes under {told.low:.2f} of what is predicted, one over "
        f"{told.high:.2f}. {len(fit['values'])} values; at a bound: {', '.join(fit['at_bound']) or 'none'}.",
        "",
    ]


def nemo_lines(fit: dict) -> list[str]:  # type: ignore[type-arg]
    """NeMo-RL's steps."""
    rows = nemo.rows()
    found = {row: nemo.predict(row) for row in rows}
    ratios = [one.step_s / row.step_s for row, one in found.items()]
    lines = [f"## NeMo-RL 0.4 to 0.7: {len(rows)} steps", "", *error_lines(fit, ratios, "nemo-rl")]
    lines += [
        "| release | device | model | ahead | devices | published | predicted | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, one in found.items():
        lines.append(
            f"| {row.release} | {row.device} | {row.model} | {row.ahead} | {row.devices} "
            f"| {row.step_s:g} | {one.step_s:.1f} | {one.step_s / row.step_s - 1:+.0%} |"
        )
    lines += ["", "Does doubling, or running ahead, gain what was published?", ""]
    lines += ["| what changed | published | predicted | same sign |", "|---|---|---|---|"]
    for one, other in permutations(rows, 2):
        what = _changed(one, other)
        if what:
            told, mine = other.step_s / one.step_s - 1, found[other].step_s / found[one].step_s - 1
            is_same = "yes" if (told < 0) == (mine < 0) else "**no**"
            lines.append(
                f"| {one.release} {one.device} {one.model}, {what} | {told:+.0%} | {mine:+.0%} | {is_same} |"
            )
    return [*lines, ""]


def _changed(one: nemo.Row, other: nemo.Row) -> str:
    """What differs between two rows that differ in one thing: twice the devices, or a step ahead."""
    alike: Callable[[nemo.Row], object] = lambda row: (row.release, row.device, row.model, row.limit)  # noqa: E731
    if alike(one) != alike(other) or one.ahead:
        return ""
    if not other.ahead and other.devices == 2 * one.devices:
        return f"{one.devices} to {other.devices} devices"
    return f"ahead on {one.devices}" if other.ahead == 1 and other.devices == one.devices else ""


def verl_lines(fit: dict) -> list[str]:  # type: ignore[type-arg]
    """verl's steps."""
    mean = fit["values"]["mean"]
    found = {row: verl.predict(row, mean) for row in verl.ROWS}
    ratios = [one.step_s / row.step_s for row, one in found.items()]
    lines = [
        "## verl, Qwen2.5-Math-7B on H20, up to 28k tokens: 6 steps",
        "",
        f"One mean for all rows, {mean:.0f} tokens, fitted too; sigma {verl.SIGMA:g} is assumed.",
        "",
        *error_lines(fit, ratios, "verl"),
        "| devices | published step | predicted | error |",
        "|---|---|---|---|",
    ]
    for row, one in found.items():
        where = f"{row.training} + {row.training} ahead" if row.is_ahead else f"{row.training} in step"
        lines.append(f"| {where} | {row.step_s:g} | {one.step_s:.0f} | {one.step_s / row.step_s - 1:+.0%} |")
    steps = {(row.training, row.is_ahead): one.step_s for row, one in found.items()}
    doubled = steps[128, False] / steps[64, False] - 1
    return [
        *lines,
        "",
        "Doubling 64 to 128 in step: published -2% over the whole run (-17% over its first 100 steps), "
        f"predicted {doubled:+.0%}.",
        "",
    ]


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
        "Seconds of the best plan found of each placement: all together; split into actor + reference and "
        "critic + reward; each apart. Published: the best of these, as section 8.3 says in words; the last "
        "models are those of its figure 13. That all are together on 64 was in view when the share of the "
        "links was chosen; the last models were not.",
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


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < float("inf") else "-"


if __name__ == "__main__":
    main()

"""What was published about steps, what the planner makes of it, and how far off each factor set is.

    python benchmarks/planner/planner.py --write benchmarks/results/planner.md  # with the factors as shipped
    python benchmarks/planner/planner.py --fit nemo-rl                              # anew, with rows left out
    python benchmarks/planner/planner.py --search  # best layouts for rows left out

Every row of NeMo-RL is a command of ``rillflow plan`` with its layout (``published``); ``search``
is what the command calls without a layout. Every row that is known stays in the tables, right or wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from published import asynchronous, hybridflow, measured, nemo, verl
from published.fitting import Fit, held, spread, summary

from rillflow.errors import PlanError
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.hardware import Accuracy, Gain, Published, UnfittedErrors, shipped_stacks
from rillflow_planner.search import search

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SLOW = [""]
NEEDS = ["rillflow_planner"]

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python benchmarks/planner/planner.py --write benchmarks/results/planner.md"
FITS = ROOT / "results/fits.json"
"""Measured over predicted of rows left out, by stack and by what was left out; ``--fit`` writes them."""
STACKS = ("nemo-rl", "nemo-rl-dtensor", "verl", measured.OWN)
NEMO: Fit[nemo.Row] = Fit(ratios=nemo.ratios, free=nemo.FREE)
VERL: Fit[verl.Row | measured.MeasuredRow] = Fit(ratios=verl.ratios, free=verl.FREE)
OWN: Fit[measured.MeasuredRow] = Fit(ratios=measured.own_ratios, free=measured.OWN_FREE)
HEAD = ["| left out | fits | rows | median error | worst | within 15% | within 30% |", "|---" * 7 + "|"]


def main() -> None:
    """Write the tables, or fit a stack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="a markdown file for the tables")
    parser.add_argument("--fit", choices=STACKS, help="fit a stack, then again with rows left out")
    parser.add_argument("--search", action="store_true", help="search the best layout for every row left out")
    chosen = parser.parse_args()
    if chosen.fit:
        fit_stack(chosen.fit)
        return
    if chosen.search:
        search_left_out()
        return
    fits = json.loads(FITS.read_text("utf-8"))
    lines = [
        "# Published steps, and what the planner predicts",
        "",
        f"`{COMMAND}`, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}. "
        "Each row of NeMo-RL is a command of `rillflow plan` (`benchmarks/planner/published`), with its "
        "prediction. Seconds unless said.",
        "",
        *nemo_lines(fits["nemo-rl"]),
        *dtensor_lines(fits["nemo-rl-dtensor"]),
        *verl_lines(fits["verl"]),
        *own_lines(fits[measured.OWN]),
        *other_lines(),
        *mesh_lines(),
        *placement_lines(),
    ]
    text = measured_at.below_title("\n".join(lines) + "\n", measured_at.line())
    if chosen.write:
        chosen.write.write_text(text, "utf-8")
    else:
        print(text)


def fit_stack(name: str) -> None:
    """Fit to all rows, then with parts left out; every fit begins at the expected values."""
    if name == "verl":
        _fit(name, VERL, verl.FITTED, verl.LEFT_OUT)
        return
    if name == measured.OWN:
        _fit(name, OWN, [row for row in measured.rows() if row.stack == name], {})
        return
    if name == "nemo-rl":
        rows = nemo.fitted()
        _fit(name, NEMO, rows, {what: _parts(rows, held) for what, held in nemo.LEFT_OUT.items()})
        return
    others, rows = json.loads(FITS.read_text("utf-8"))["nemo-rl"]["values"], nemo.dtensor()
    fit = Fit(ratios=lambda row, values: nemo.ratios(row, others | values), free=nemo.DTENSOR_FREE)
    models = sorted({row.model for row in rows})
    _fit(name, fit, rows, {"each model": [[row for row in rows if row.model == one] for one in models]})


def _parts(rows: Sequence[nemo.Row], held: Sequence[nemo.Held]) -> list[list[nemo.Row]]:
    return [[row for row in rows if is_held(row)] for is_held in held]


def _fit(name: str, fit: Fit[Any], rows: Sequence[Any], parts: dict[str, list[Any]]) -> None:
    values = fit.values(rows)
    bounds = {"at_bound": fit.at_bound(values), "loose": fit.loose(rows, values)}
    found = {"values": values, **bounds, "left_out": {}}
    for what, every in parts.items():
        fits = []
        for part in every:
            known = fit.values([row for row in rows if row not in part])
            told = {str(rows.index(row)): [round(one, 4) for one in fit.ratios(row, known)] for row in part}
            fits.append({"values": known, "ratios": told})
        found["left_out"][what] = fits
        ratios = [one[0] for fit_ in fits for one in fit_["ratios"].values()]
        print(what, summary(ratios), spread(ratios), flush=True)
    known = json.loads(FITS.read_text("utf-8"))
    FITS.write_text(json.dumps(known | {name: found}, indent=1) + "\n", "utf-8")


def search_left_out() -> None:
    """Search the best layout for every row of NeMo-RL, with the factors of the fit without its model."""
    known = json.loads(FITS.read_text("utf-8"))
    rows, parts = nemo.fitted(), []
    for part in known["nemo-rl"]["left_out"]["each model"]:
        found = {}
        for place in part["ratios"]:
            row = rows[int(place)]
            best = min(_searched(row, part["values"], recomputes) for recomputes in (False, True))
            found[place] = [round(best / row.step_s, 4)] if best < float("inf") else []
            print(row.name, row.ahead, row.devices, found[place], flush=True)
        parts.append({"ratios": found})
    known["nemo-rl"]["searched"] = parts
    FITS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


def _searched(row: nemo.Row, values: dict[str, float], recomputes: bool) -> float:
    """Return the seconds of the best layout; infinite if none fits."""
    step = nemo.statement(row).problem
    hardware = replace(step.hardware, factors=nemo.factors_of(row, values))
    step = replace(step, hardware=hardware, recomputes=recomputes)
    try:
        return search(step, CostModel, freshness=(row.ahead,), kept=1).best[0].evaluation.step_s
    except PlanError:
        return float("inf")


Part = dict[str, list[float]]
"""Predicted over measured of the step and the stages of rows that were left out together, by row."""


def parts_of(fit: dict[str, Any]) -> list[Part]:
    """Return all parts that were left out of a fit."""
    return [part["ratios"] for parts in fit["left_out"].values() for part in parts]


def accuracy(parts: Sequence[Part], *, is_searched: bool = False) -> Accuracy:
    """Return the errors of rows left out; for searches around the median, which removes their bias."""
    steps = [[ratios[0] for ratios in part.values() if ratios] for part in parts]
    stages = [[one for ratios in part.values() for one in ratios[1:]] for part in parts]
    every = [ratio for part in steps for ratio in part]
    bias = 1 / median(every) if is_searched else 1.0
    errors = sorted(abs(bias * ratio - 1) for ratio in every)
    numbers = [
        *spread(every),
        held(steps),
        bias,
        *(spread([one for part in stages for one in part]) if any(stages) else (0.0, 0.0)),
    ]
    names = ("low", "high", "held", "bias", "stage_low", "stage_high")
    more = {name: round(float(one), 2) for name, one in zip(names, numbers, strict=True)}
    return Accuracy(median=round(median(errors), 2), worst=round(errors[-1], 2), **more)


def nemo_pairs() -> Iterator[tuple[nemo.Row, nemo.Row, str]]:
    """Yield pairs of rows that differ in one thing: twice the devices, or a step ahead."""
    for one, other in permutations(nemo.fitted(), 2):
        alike = [(row.name, row.limit, row.dtype) for row in (one, other)]
        if alike[0] == alike[1] and not one.ahead:
            if not other.ahead and other.devices == 2 * one.devices:
                yield one, other, f"{one.devices} to {other.devices} devices"
            elif other.ahead == 1 and other.devices in (one.devices, 2 * one.devices):
                yield one, other, f"ahead on {other.devices}, in step on {one.devices}"


def changes(fit: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the published and the predicted change of a step of every pair, with its model left out."""
    rows = nemo.fitted()
    ratios = {
        int(place): one[0] for part in fit["left_out"]["each model"] for place, one in part["ratios"].items()
    }
    left = {rows[place]: ratio for place, ratio in ratios.items()}
    return {
        f"{one.name}, {what}": (
            other.step_s / one.step_s - 1,
            other.step_s * left[other] / (one.step_s * left[one]) - 1,
        )
        for one, other, what in nemo_pairs()
    }


def gain(pairs: Sequence[tuple[float, float]]) -> Gain:
    """Return the errors of predicted changes."""
    errors = [abs(mine - told) for told, mine in pairs]
    right = sum((told < 0) == (mine < 0) for told, mine in pairs)
    return Gain(median=round(median(errors), 2), worst=round(max(errors), 2), right=right, pairs=len(pairs))


def claimed(name: str, fit: dict[str, Any]) -> Published:
    """Return what a stack claims, all of it of rows left out."""
    found = {"placed": accuracy(parts_of(fit)), "searched": None, "doubled": None, "ahead": None}
    if name == "nemo-rl":
        found["searched"] = accuracy([one["ratios"] for one in fit["searched"]], is_searched=True)
        pairs = changes(fit)
        found["doubled"] = gain([one for what, one in pairs.items() if ", ahead on" not in what])
        found["ahead"] = gain([one for what, one in pairs.items() if ", ahead on" in what])
    return replace(shipped_stacks()[name].published, **found)


def error_lines(fit: dict[str, Any], fitted: Sequence[float], name: str) -> list[str]:
    """Return the table of a stack's errors, fitted and left out, and what it claims."""
    rows = [f"| nothing: all fitted | 1 | {summary(fitted)} |"]
    for what, parts in fit["left_out"].items():
        ratios = [one[0] for part in parts for one in part["ratios"].values()]
        rows.append(f"| {what} | {len(parts)} | {summary(ratios)} |")
    told = claimed(name, fit)
    shipped = shipped_stacks()[name].published
    assert shipped == told, f"stacks.toml has {shipped} for {name}, left out were {told}"
    lines = [*HEAD, *rows, ""]
    for what, one in (("given layouts", told.placed), ("the best layout of a search", told.searched)):
        if one is not None:
            lines += [
                f"Claimed of `{name}` for {what}: median error {one.median:.0%}, worst {one.worst:.0%}; of "
                f"ten steps one takes under {one.low:.2f} of what is predicted, one over {one.high:.2f}. The "
                f"range of the other parts holds {one.held:.0%} of the steps of each part left out.",
                "",
            ]
    bounds, loose = (", ".join(fit[key]) or "none" for key in ("at_bound", "loose"))
    return [*lines, f"{len(fit['values'])} values; at a bound: {bounds}; hardly determined: {loose}.", ""]


def nemo_lines(fit: dict[str, Any]) -> list[str]:
    """Return the tables of NeMo-RL's steps."""
    rows = nemo.fitted()
    found = {row: nemo.predict(row) for row in rows}
    ratios = [one.step_s / row.step_s for row, one in found.items()]
    left = {
        int(place): one for part in fit["left_out"]["each model"] for place, one in part["ratios"].items()
    }
    best = {int(place): one for part in fit["searched"] for place, one in part["ratios"].items()}
    bias = claimed("nemo-rl", fit).searched.bias  # type: ignore[union-attr]
    lines = [f"## NeMo-RL 0.3 to 0.7, Megatron: {len(rows)} steps", "", *error_lines(fit, ratios, "nemo-rl")]
    lines += [
        "Errors: of all rows fitted; with the row's model left out; of the best layout of a search with its "
        f"model left out, times {bias:.2f}.",
        "",
        "| step | ahead | devices | published | fitted | model left out | searched |",
        "|---|---|---|---|---|---|---|",
    ]
    for place, (row, one) in enumerate(found.items()):
        searched = f"{bias * best[place][0] - 1:+.0%}" if best[place] else "nothing fits"
        lines.append(
            f"| {row.name} | {row.ahead} | {row.devices} | {row.step_s:g} "
            f"| {one.step_s / row.step_s - 1:+.0%} | {left[place][0] - 1:+.0%} | {searched} |"
        )
    lines += ["", "Stages, with the row's model left out:", ""]
    lines += ["| step | generate | score | update | refit |", "|---|---|---|---|---|"]
    inside = count = 0
    told = claimed("nemo-rl", fit).placed
    assert told is not None
    for place, row in enumerate(rows):
        cells = dict(zip(row.stages_s, left[place][1:], strict=True))
        inside += sum(told.stage_low <= 1 / one <= told.stage_high for one in cells.values())
        count += len(cells)
        if cells:
            shown = " | ".join(f"{cells[stage] - 1:+.0%}" if stage in cells else "" for stage in nemo.STAGES)
            lines.append(f"| {row.name}, {row.devices} | {shown} |")
    stages = [[one for ratios in part.values() for one in ratios[1:]] for part in parts_of(fit)]
    lines += [
        "",
        f"{inside} of {count} are within the range of {told.stage_low:.2f} to {told.stage_high:.2f} "
        f"times; the range of the other parts holds {held(stages):.0%} of those of each part left out.",
        "",
    ]
    lines += ["Does doubling, or running ahead, gain what was published? With the model left out:", ""]
    lines += ["| what changed | published | predicted | same sign |", "|---|---|---|---|"]
    for what, (published, mine) in changes(fit).items():
        is_same = "yes" if (published < 0) == (mine < 0) else "**no**"
        lines.append(f"| {what} | {published:+.0%} | {mine:+.0%} | {is_same} |")
    shipped = claimed("nemo-rl", fit)
    assert shipped.doubled is not None and shipped.ahead is not None
    return [
        *lines,
        "",
        f"Twice the devices: {shipped.doubled.text}. Ahead: {shipped.ahead.text}.",
        "",
        *command_lines(rows),
        *not_fitted_lines(),
    ]


def command_lines(rows: Sequence[nemo.Row]) -> list[str]:
    """Return the command of every row, in the order of the table."""
    commands = [f"rillflow {' '.join(nemo.command(row))}" for row in rows]
    return ["The command of each row of the first table:", "", "```text", *commands, "```", ""]


def not_fitted_lines() -> list[str]:
    """Return the rows that no fit has, because what they did is not modelled."""
    lines = ["Not fitted:", "", "| step | devices | published | predicted |", "|---|---|---|---|"]
    lines += [
        f"| {row.name} | {row.devices} | {row.step_s:g} | {nemo.predict(row).step_s:.0f} |"
        for row in nemo.rows()
        if row.source.startswith("DAPO")
    ]
    return [*lines, ""]


def dtensor_lines(fit: dict[str, Any]) -> list[str]:
    """Return the tables of NeMo-RL's steps with the other training backend."""
    rows = nemo.dtensor()
    found = {row: nemo.predict(row) for row in rows}
    megatron = json.loads(FITS.read_text("utf-8"))["nemo-rl"]["values"]
    left = {
        int(place): one for part in fit["left_out"]["each model"] for place, one in part["ratios"].items()
    }
    ratios = [one.step_s / row.step_s for row, one in found.items()]
    lines = [f"## NeMo-RL 0.3, DTensor: {len(rows)} steps", "", *error_lines(fit, ratios, "nemo-rl-dtensor")]
    lines += [
        "| step | devices | published | fitted | model left out | by the factors of Megatron |",
        "|---" * 6 + "|",
    ]
    for place, (row, one) in enumerate(found.items()):
        other = nemo.ratios(row, megatron)[0] - 1
        lines.append(
            f"| {row.name} | {row.devices} | {row.step_s:g} | {one.step_s / row.step_s - 1:+.0%} "
            f"| {left[place][0] - 1:+.0%} | {other:+.0%} |"
        )
    return [*lines, ""]


def verl_lines(fit: dict[str, Any]) -> list[str]:
    """Return the tables of verl's steps."""
    mean = fit["values"]["mean"]
    found = {row: verl.predict(row, mean) for row in verl.ROWS}
    ratios = [one.step_s / row.step_s for row, one in found.items()]
    ratios += [measured.ratios(row)[0] for row in verl.OTHERS]
    left = [one[0] for part in fit["left_out"]["each row"] for one in part["ratios"].values()]
    devices: list[float | None] = [one[0] for one in fit["left_out"]["H100"][0]["ratios"].values()]
    lines = [
        f"## verl, up to 28k tokens on H20, and others on H100: {len(verl.FITTED)} steps",
        "",
        f"One mean for all rows on H20, {mean:.0f} tokens, fitted too; sigma {verl.SIGMA:g} is assumed. "
        "Apart: training takes 4 minibatches at once, and staleness_threshold is stated as freshness, in "
        "steps.",
        "",
        *error_lines(fit, ratios, "verl"),
        "| devices | published step | fitted | row left out | H100 left out |",
        "|---|---|---|---|---|",
    ]
    apart = [None] * len(verl.ROWS) + devices
    for row, *cells in zip(verl.FITTED, ratios, left, apart, strict=True):
        shown = " | ".join("" if ratio is None else f"{ratio - 1:+.0%}" for ratio in cells)
        lines.append(f"| {row.name} | {row.step_s:g} | {shown} |")
    lines += ["", "| what changed | published | predicted | same sign |", "|---|---|---|---|"]
    for one, other in permutations(verl.ROWS, 2):
        if what := verl.change(one, other):
            told, mine = other.step_s / one.step_s - 1, found[other].step_s / found[one].step_s - 1
            is_same = "yes" if (told < 0) == (mine < 0) else "**no**"
            lines.append(f"| {what} | {told:+.0%} | {mine:+.0%} | {is_same} |")
    return [*lines, ""]


def own_lines(fit: dict[str, Any]) -> list[str]:
    """Return the table of Rillflow's own steps on accelerators."""
    rows = [row for row in measured.rows() if row.stack == measured.OWN]
    bounds, loose = (", ".join(fit[key]) or "none" for key in ("at_bound", "loose"))
    return [
        f"## Rillflow on accelerators: {len(rows)} measurements",
        "",
        "One model of 0.5 billion parameters on one type of device. All rows are fitted and none is left "
        "out, so no range follows.",
        "",
        f"{len(fit['values'])} values; at a bound: {bounds}; hardly determined: {loose}.",
        "",
        *measured.lines(rows),
    ]


def other_lines() -> list[str]:
    """Return the table of other stacks, devices and precisions, predicted with the nearest set."""
    rows = other_rows()
    for name in ("nemo-rl", "verl", "areal"):
        known = shipped_stacks()[name].published
        assert known == replace(known, **unfitted(name)), f"{known} for {name} are not {unfitted(name)}"
    return [
        f"## Other stacks, devices and precisions: {len(rows)} steps",
        "",
        "These steps are in no fit; the nearest factor set predicts them. A plan for such a step gives these "
        "errors in its first line.",
        "",
        *measured.lines(rows),
    ]


def other_rows() -> list[measured.MeasuredRow]:
    """Return the rows that no set was fitted to."""
    return [row for row in measured.rows() if row.stack != measured.OWN and row not in verl.OTHERS]


def unfitted(stack: str) -> dict[str, UnfittedErrors]:
    """Return the errors of steps of another kind than those that a set was fitted to."""
    if stack == "verl":
        (part,) = json.loads(FITS.read_text("utf-8"))[stack]["left_out"]["H100"]
        ratios = [1 / one[0] for one in part["ratios"].values()]
        return {"unfitted": _span("of verl and EasyR1 on H100, left out of the fit,", ratios)}
    if stack == "areal":
        pairs = [pair for pair in asynchronous.PAIRS if pair.name.startswith("AReaL")]
        runs = [(pair, run) for pair in pairs for run in (pair.one, pair.other)]
        ratios = [run.step_s / pair.computed_s(run) for pair, run in runs]
        return {"unfitted": _span("of AReaL on H800", ratios)}
    rows = [row for row in other_rows() if row.stack == stack]
    found = {row: row.step_s / measured.predict(row)["step"] for row in rows}
    float8 = [ratio for row, ratio in found.items() if row.dtype == "float8"]
    float8 += [row.step_s / nemo.predict(row).step_s for row in nemo.fitted() if row.dtype == "float8"]
    others = [ratio for row, ratio in found.items() if row.dtype != "float8"]
    return {
        "unfitted": _span("of RLinf on H100 and Miles on H200", others),
        "float8": _span("in FP8", float8),
    }


def _span(of: str, ratios: Sequence[float]) -> UnfittedErrors:
    return UnfittedErrors(of=of, steps=len(ratios), low=round(min(ratios), 2), high=round(max(ratios), 2))


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
        "models are those of its figure 13. Factors of NeMo-RL's steps, without its overheads.",
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

"""Table: the results of a sweep by case, ranked, as text, JSON and CSV.

The result of a run is its last evaluation on held-out rows. A case has the mean over its finished runs, with
Student's 95% interval over seeds: mean -+ t s / sqrt(n), with t for n - 1 degrees of freedom.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any

from rillflow.formulas.interval import mean_interval
from rillflow.runs.json_lines import JSON
from rillflow_parts.sweeps.plan import SweepRun

INTERVAL = "Student's 95% interval of the mean over seeds"


class RunState(StrEnum):
    """State of a run of a sweep."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """State and result of one run."""

    run: SweepRun
    """The run."""
    state: RunState
    """Its state."""
    step: int = 0
    """Step of its last held-out result."""
    value: float | None = None
    """That result; None without one."""
    measure: str = ""
    """``accuracy`` or ``mean reward``."""
    why: str = ""
    """Error of a failed run, reason of a stopped one."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Results of one case."""

    case: str
    """Its name."""
    settings: Mapping[str, Any]
    """Its settings."""
    results: tuple[RunResult, ...]
    """Its runs."""

    @property
    def values(self) -> list[float]:
        """Results of its finished runs."""
        return [each.value for each in self.finished if each.value is not None]

    @property
    def finished(self) -> list[RunResult]:
        """Its finished runs."""
        return [each for each in self.results if each.state is RunState.FINISHED]

    @property
    def mean(self) -> float | None:
        """Mean result over its finished runs; None without one."""
        return fmean(self.values) if self.values else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of the mean; None for fewer than two different results."""
        is_share = all(each.measure == "accuracy" for each in self.finished)
        return mean_interval(self.values, (0.0, 1.0)) if is_share else mean_interval(self.values)

    @property
    def notes(self) -> list[str]:
        """Runs that are not finished, with the reason."""
        return [
            f"seed {each.run.seed} {each.state}" + (f": {each.why}" if each.why else "")
            for each in self.results
            if each.state is not RunState.FINISHED
        ]


def ranked(results: Sequence[RunResult]) -> list[CaseResult]:
    """Return the cases, those with the best mean first and those without a result last."""
    cases: dict[str, list[RunResult]] = {}
    for each in results:
        cases.setdefault(each.run.case, []).append(each)
    found = [
        CaseResult(case=case, settings=runs[0].run.settings, results=tuple(runs))
        for case, runs in cases.items()
    ]
    return sorted(found, key=lambda each: (each.mean is None, -(each.mean or 0.0)))


def as_text(cases: Sequence[CaseResult]) -> str:
    """Return the table, and a line for each run that is not finished."""
    names = {each.measure for case in cases for each in case.finished} - {""}
    head = ("", "case", f"held-out {' / '.join(sorted(names)) or 'result'}", "95% interval", "seeds")
    rows = [head]
    for place, case in enumerate(cases, 1):
        ends = case.interval
        rows.append(
            (
                f"{place}" if case.mean is not None else "",
                case.case,
                "-" if case.mean is None else f"{case.mean:.4g}",
                "-" if ends is None else f"[{ends[0]:.4g}, {ends[1]:.4g}]",
                f"{len(case.finished)}/{len(case.results)}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([*lines, *(f"{case.case} {note}" for case in cases for note in case.notes)])


def as_json(name: str, cases: Sequence[CaseResult]) -> dict[str, JSON]:
    """Return the table as a record."""
    return {
        "sweep": name,
        "interval": INTERVAL,
        "cases": [
            {
                "case": case.case,
                "settings": dict(case.settings),
                "mean": case.mean,
                "interval": case.interval,
                "runs": [_record(each) for each in case.results],
            }
            for case in cases
        ],
    }


def _record(result: RunResult) -> dict[str, JSON]:
    return {
        "run": str(result.run.path),
        "seed": result.run.seed,
        "state": str(result.state),
        "measure": result.measure,
        "value": result.value,
        "step": result.step,
        "why": result.why,
    }


def as_csv(cases: Sequence[CaseResult]) -> str:
    """Return one line per run, with a column for each setting."""
    keys = list(dict.fromkeys(key for case in cases for key in case.settings))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = ("run", "seed", "state", "measure", "value", "step", "why")
    writer.writerow(["case", *keys, *names])
    for case in cases:
        for each in case.results:
            record = _record(each)
            cells = [case.settings.get(key, "") for key in keys]
            writer.writerow([case.case, *cells, *(record[name] for name in names)])
    return out.getvalue()

"""API: everything the page shows, as JSON.

    GET /api/runs, /api/runs/RUN, /api/configs, /api/curves       runs, their settings and metrics
    GET /api/rollouts, /api/rollout, /api/prompt                  rows that are searched, one row, one prompt
    GET /api/timeline, /api/events                                spans; news as server-sent events

docs/watch.md describes each. A handler runs in a thread of its own; it reads files, and keeps only metrics
and the offsets of spans.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache
from threading import Semaphore
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rillflow.errors import RillflowError
from rillflow.runs.curves import MetricColumns, plain
from rillflow.runs.reader import EvaluationRecord
from rillflow.runs.run_data import phases_of
from rillflow.serving.http_body import Declined
from rillflow_parts.report.curves import CURVES
from rillflow_parts.report.measured import measured_bars, measured_of
from rillflow_parts.report.timeline import SHOWN_STEPS, Bar, merged
from rillflow_parts.watch.access import error_response, json_response
from rillflow_parts.watch.asked import LARGEST, Asked
from rillflow_parts.watch.index import Index
from rillflow_parts.watch.indexing import IndexingProcess
from rillflow_parts.watch.search import Query, search
from rillflow_parts.watch.shown import files_of, short_row, short_rows, whole_row
from rillflow_parts.watch.step_files import StepFiles
from rillflow_parts.watch.watched_runs import WatchedRun, WatchedRuns, finite, flat

MOST_RUNS, MOST_METRICS, MOST_POINTS, MOST_ROWS, MOST_STEPS = 100, 200, 10_000, 500, 100
DEEPEST = 100_000
"""Largest ``offset`` of a page of rows."""
NEWS_S = 2.0
"""Seconds between two looks for grown runs."""
MOST_SPAN_STEPS = 50
"""Most steps of a timeline."""
FINEST = 4000
"""Equal bars that are closer than this part of a timeline are one."""
AT_ONCE = 2
"""Searches that run at once; others wait."""


class Api:
    """The handlers.

    Args:
        runs: the watched runs.
        indexing: the process that indexes rollouts.
    """

    def __init__(self, runs: WatchedRuns, indexing: IndexingProcess) -> None:
        self._runs, self._indexing = runs, indexing
        self._searching = Semaphore(AT_ONCE)

    def routes(self) -> list[Route]:
        """Return the routes below ``/api``."""
        handlers: dict[str, Callable[[Request], Any]] = {
            "/api/runs": self.list_runs,
            "/api/runs/{run}": self.run,
            "/api/configs": self.configs,
            "/api/curves": self.curves,
            "/api/rollouts": self.rollouts,
            "/api/rollout": self.rollout,
            "/api/prompt": self.prompt,
            "/api/timeline": self.timeline,
        }
        routes = [Route(path, _answered(handler)) for path, handler in handlers.items()]
        return [*routes, Route("/api/events", self.events)]

    def list_runs(self, _: Request) -> list[dict[str, Any]]:
        """Return a row for every run."""
        return [run.row() for run in self._runs.all()]

    def run(self, request: Request) -> dict[str, Any]:
        """Return the settings, starts, evaluations and metric names of a run."""
        run = self._run(request.path_params["run"])
        small = run.small()
        with run.lock:
            metrics = run.metrics()
            names, damaged = metrics.names, [error.what for error in metrics.damaged[:20]]
            evaluations = _evaluations(small.evaluations, metrics)
            phases = [
                {"name": each.name, "first": each.first, "last": each.last} for each in phases_of(metrics)
            ]
        return {
            **run.row(),
            "config": flat(small.config),
            "changes": [
                {"after_step": start.get("after_step"), "changes": start["changes"]}
                for start in small.starts
                if start.get("changes")
            ],
            "starts": list(small.starts),
            "evaluations": evaluations,
            "metrics": [
                {
                    "name": name,
                    "reduction": kind,
                    "title": _titles().get(name, ""),
                    "help": _help().get(name, ""),
                }
                for name, kind in names.items()
            ],
            "phases": phases,
            "versions": small.starts[-1].get("versions", {}) if small.starts else {},
            "problems": [*small.problems, *damaged],
        }

    def configs(self, request: Request) -> dict[str, Any]:
        """Return the settings in which runs differ."""
        runs = self._several(request)
        configs = {run.name: flat(run.small().config) for run in runs}
        keys = dict.fromkeys(key for config in configs.values() for key in config)
        values = {key: {name: config.get(key) for name, config in configs.items()} for key in keys}
        differing = {
            key: each for key, each in values.items() if len(set(map(json.dumps, each.values()))) > 1
        }
        differences = [{"key": key, "values": each} for key, each in differing.items()]
        return {"same": len(values) - len(differing), "differences": differences}

    def curves(self, request: Request) -> dict[str, Any]:
        """Return metrics of runs over steps, steps of the last phase, seconds or tokens."""
        asked = Asked(request.query_params)
        names = asked.names("metrics", MOST_METRICS)
        axis: Any = asked.one_of("x", ("step", "phase", "seconds", "tokens"))
        points = asked.whole("points", 1000, 2, MOST_POINTS)
        low, high = asked.number("from"), asked.number("to")
        found = []
        for run in self._several(request):
            with run.lock:
                metrics = run.metrics()
                curves = [(name, metrics.curve(name, axis)) for name in names]
            for name, whole in curves:
                part = whole.between(low, high)
                curve, is_full = part.shortened(points), len(part) <= points
                told = {each: plain(vars(curve)[each]) for each in ("x", "y", "low", "high")}
                found.append({"run": run.name, "metric": name, "is_full": is_full, **told})
            self._runs.trim()
        return {"curves": found}

    def rollouts(self, request: Request) -> dict[str, Any]:
        """Return one page of the rows that a search finds."""
        asked = Asked(request.query_params)
        run = self._run(asked.text("run"))
        sort = asked.one_of("sort", ("-step", "step", "reward", "-reward", "length", "-length"))
        first, last = asked.steps("step")
        prompt = asked.text("prompt")
        query = Query(
            text=asked.text("q"),
            first_step=first,
            last_step=last,
            outcome=asked.text("outcome"),
            finish=asked.text("finish"),
            reward_min=asked.number("reward_min"),
            reward_max=asked.number("reward_max"),
            prompt=asked.whole("prompt", None) if prompt else None,
            sort=sort.removeprefix("-"),  # type: ignore[arg-type]
            is_descending=sort[0] == "-",
        )
        offset, limit = asked.whole("offset", 0, 0, DEEPEST), asked.whole("limit", 50, 1, MOST_ROWS)
        index = self._index(run)
        with self._searching:
            found = search(index, query, offset + limit)
        rows = short_rows(run.path, index, found.rows[offset:].tolist(), query.text)
        return {
            "total": found.total,
            "is_total_exact": found.is_total_exact,
            "took_s": round(found.took_s, 4),
            "rows": rows,
            "indexed": {
                "rows": len(index),
                "to_step": int(index.blocks[-1]["step"]) if len(index.blocks) else 0,
                "of_step": run.last_line().get("step", 0),
            },
        }

    def rollout(self, request: Request) -> dict[str, Any]:
        """Return one row with its tokens, and the other rows of its group."""
        asked = Asked(request.query_params)
        run = self._run(asked.text("run"))
        names = ("step", "epoch", "prompt", "sample")
        step, epoch, prompt, sample = (asked.whole(name, None, -1) for name in names)
        return {"run": run.name, **whole_row(run.path, step, epoch, prompt, sample)}

    def prompt(self, request: Request) -> dict[str, Any]:
        """Return a prompt's answers over time."""
        asked = Asked(request.query_params)
        run, prompt = self._run(asked.text("run")), asked.whole("prompt", None)
        epoch = asked.whole("epoch", None) if asked.text("epoch") not in ("", "*") else None
        index = self._index(run)
        own = np.flatnonzero(index.column("prompt", 0, len(index)) == prompt)
        if epoch is not None:
            own = own[index.column("epoch", 0, len(index))[own] == epoch]
        if not len(own):
            raise LookupError(f"prompt {prompt}")
        blocks = np.unique(np.searchsorted(index.blocks["first"], own, "right") - 1)
        steps = index.blocks["step"][blocks]
        chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_STEPS)).astype(int))
        told, text = [], ""
        for step in steps[chosen].tolist():
            with StepFiles(files_of(run.path, step)) as files:
                places = np.flatnonzero(files.ids[:, 1] == prompt).tolist()
                rows = [short_row(files, step, place) for place in places]
            text = rows[0]["prompt_text"] if rows else text
            told.append({"step": step, "rows": rows})
        return {"prompt": prompt, "prompt_text": text, "num_steps": len(steps), "steps": told}

    def timeline(self, request: Request) -> dict[str, Any]:
        """Return the work and the waits of every rank during some steps, by default the last ones."""
        asked = Asked(request.query_params)
        run = self._run(asked.text("run"))
        with run.lock:
            stages = run.stages()
            known = stages.steps
            first, last = asked.whole("from", 0), asked.whole("to", LARGEST)
            inside = known[(known >= first) & (known <= last)]
            if not len(inside):
                raise LookupError("step with a span in this range")
            shown = SHOWN_STEPS if not asked.text("from") else MOST_SPAN_STEPS
            inside = inside[-shown:]
            found = measured_of(stages, int(inside[0]), int(inside[-1]))
        lanes: dict[str, list[Bar]] = {}
        for bar in measured_bars(found):
            lanes.setdefault(f"{bar.pool} {bar.lane.removeprefix('rank').strip()}", []).append(bar)
        gap_s = (found.end_s - found.start_s) / FINEST
        return {
            "first": found.first,
            "last": found.last,
            "steps": [int(known[0]), int(known[-1])],
            "start_s": found.start_s,
            "end_s": found.end_s,
            "lanes": [
                {"name": name, "bars": [_bar(bar) for bar in merged(bars, gap_s)]}
                for name, bars in lanes.items()
            ],
        }

    async def events(self, request: Request) -> Response:
        """Send a line whenever one of some runs has grown."""
        try:
            runs = await run_in_threadpool(self._several, request)
        except RillflowError as error:
            return error_response(error)
        return StreamingResponse(_news(runs), media_type="text/event-stream")

    def _index(self, run: WatchedRun) -> Index:
        return Index(self._indexing.folder(run.path, run.identity()))

    def _run(self, name: str) -> WatchedRun:
        try:
            return self._runs.one(name)
        except LookupError:
            raise Declined(404, f"there is no run {name[:80]!r}", fix="reload the list of runs") from None

    def _several(self, request: Request) -> list[WatchedRun]:
        return [self._run(name) for name in Asked(request.query_params).names("runs", MOST_RUNS)]


def _answered(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Return a handler whose result is sent as JSON, and its errors with their status."""

    async def answer(request: Request) -> Response:
        try:
            return json_response(await run_in_threadpool(handler, request))
        except LookupError as error:
            return error_response(Declined(404, f"there is no {error.args[0]}"))
        except OSError as error:
            why = "the run was deleted, moved or rewound during the request, or may not be read"
            return error_response(Declined(404, f"cannot read a file of the run: {error}", why=why))
        except RillflowError as error:
            return error_response(error)

    return answer


async def _news(runs: list[WatchedRun]) -> AsyncIterator[str]:
    known: dict[str, object] = {run.name: run.updated() for run in runs}
    yield ": open\n\n"
    while True:
        await asyncio.sleep(NEWS_S)
        for run in runs:
            updated = await run_in_threadpool(run.updated)
            if known[run.name] == updated:
                continue
            known[run.name] = updated
            told = {
                "run": run.name,
                "steps": run.last_line().get("step", 0),
                "updated": updated,
            }
            yield f"data: {json.dumps(told)}\n\n"


@cache
def _help() -> Mapping[str, str]:
    """Return a sentence about each metric that the report has a curve for."""
    return {name: curve.hint for curve in CURVES for name in curve.metrics}


@cache
def _titles() -> dict[str, str]:
    """Return the report's title of each metric that it has a curve for."""
    return {name: curve.title for curve in CURVES for name in curve.metrics}


def _bar(bar: Bar) -> dict[str, Any]:
    return {
        "from_s": round(bar.start_s, 6),
        "to_s": round(bar.end_s, 6),
        "kind": "wait" if bar.is_idle else "stage",
        "name": bar.stage,
        "step": bar.step,
    }


def _evaluations(every: Sequence[EvaluationRecord], metrics: MetricColumns) -> list[dict[str, Any]]:
    """Return evaluations with their places on the axes; one before the last phase has no step of it."""
    steps, seconds, tokens = metrics.steps, metrics.seconds, metrics.places("tokens")
    before = metrics.before_last_phase
    rows = np.searchsorted(steps, [each.step for each in every], "right") - 1
    return [
        {
            "step": each.step,
            "phase": each.step - before if each.step >= before else None,
            "seconds": finite(seconds[row].item()) if row >= 0 else 0.0,
            "tokens": tokens[row].item() if row >= 0 else 0.0,
            "set": each.set,
            "name": each.name,
            "value": finite(each.value),
            "interval": None if each.interval is None else [finite(end) for end in each.interval],
            "count": each.count,
            "more": dict(each.more),
        }
        for each, row in zip(every, rows.tolist(), strict=True)
    ]

"""Gathering the last rows of a step on few replicas: measured seconds beside the simulator's.

    4 real processes ─ 64 rows ─> generate, sleeping ─┬─ today: each rank scores its own rows at their end
                                                      └─ R, m: the last R rows gather, the others score

    python benchmarks/streaming/gathering.py --write benchmarks/results/gathering.md
    python benchmarks/streaming/gathering.py --thresholds 0 0.2 --scorers 1 --lengths two-point --token-ms 1

An engine whose decoding steps sleep, and scorers that sleep for every row, run on the ranks of one pool. Rows
move through Ray's object store with caches of 1 KiB a token. Lengths come from three distributions. R goes in
steps of 5% of the batch; m is the simulator's best for it. The simulator is told the sleeps and the lengths,
nothing that was measured. R = 0 in the simulator is a step in which scoring begins after the last row has
ended; in today's step each rank scores its own rows as soon as they have ended, which is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import exp
from pathlib import Path
from random import Random
from typing import Any

from gathering_roles import FLAT_ROWS, TOKEN_S, Scorer, sampler, token_s

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.gathering import CALLS, Gathering, GatherRule
from rillflow.controller.source import DataStream, GroupSampling
from rillflow.controller.streamed_stages import SharedRanks, before_updates, streamed_stages
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.metrics import Metric
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.roles.sampler import Sampler
from rillflow.workers.backend import Backend, Pool
from rillflow.workers.endpoint import endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from rillflow.workers.pending import wait_for
from rillflow_planner.gathering import GatheringGain, Tail, gathered

sys.path.append(str(Path(__file__).parents[1]))
from measured_at import below_title, line

SMALLEST = ["--backend inline --thresholds 0 0.2 --scorers 1 --lengths two-point --token-ms 1 --row-ms 1"]
SLOW = ["--thresholds 0 0.2 --scorers 1 --lengths two-point --token-ms 1 --row-ms 1"]  # starts Ray
NEEDS = ["rillflow_planner"]

REPLICAS, ROWS = 4, 64
SCORERS = ("reference", "critic", "reward_model")
SHARES = [each / 20 for each in range(21)]
"""Thresholds, as shares of the batch."""
TIE = 0.05
"""Thresholds whose seconds differ by less than this share are alike; the lowest of them is the best."""
LONGEST = 400
WAIT_S = 600.0


def lengths_of(kind: str) -> list[int]:
    """Return the tokens of every row of the batch."""
    chance = Random(f"rows of {kind}")
    if kind == "two-point":
        return [350 if chance.random() < 0.1 else 50 for _ in range(ROWS)]
    sigma = float(kind.split()[1])
    median = {0.6: 80, 1.2: 40}[sigma]
    return [max(1, min(LONGEST, round(median * exp(chance.gauss(0, sigma))))) for _ in range(ROWS)]


KINDS = ("log-normal 0.6", "log-normal 1.2", "two-point")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A step."""

    seconds: float
    """From its first token to its last score."""
    metrics: Mapping[str, Metric]
    """Metrics of the source; empty without one."""

    def of(self, name: str) -> str:
        """Return a metric as text; a dash without it."""
        return f"{self.metrics[name].value:.3g}" if name in self.metrics else "-"


class Ranks:
    """The processes, with a sampler and three scorers each."""

    def __init__(self, backend: Backend) -> None:
        backend.open([Pool(name="main", size=REPLICAS, takes_device=False)])
        self.backend, mesh = backend, Mesh.of(dp=REPLICAS)
        how: dict[str, Any] = {"mesh": mesh, "pool": "main", "backend": backend}
        groups = {"policy": Group("policy", {}, **how)}
        groups["sampler"] = Group("sampler", endpoints_of(Sampler), of="policy", **how)
        groups |= {name: Group(name, endpoints_of(Scorer), **how) for name in SCORERS}
        groups["sampler"].start(sampler)
        for name in SCORERS:
            groups[name].start(Scorer)
        self.groups, self.executor = groups, GroupExecutor(groups, backend)
        self._replicas = [(rank,) for rank in range(REPLICAS)]

    def today(self, prompts: Batch, scorers: int, row_s: float) -> Measured:
        """Return a step in order: each rank scores its own rows when they have ended."""
        began = time.monotonic()
        rows = self.groups["sampler"].call("generate", prompts, samples=1)
        wait_for(
            [self.groups[name].call("score", rows, row_s=row_s) for name in SCORERS[:scorers]] or [rows],
            WAIT_S,
        )
        return Measured(seconds=time.monotonic() - began, metrics={})

    def gathered(self, prompts: Batch, scorers: int, row_s: float, rule: GatherRule) -> Measured:
        """Return a step whose last rows gather."""
        shared = SharedRanks(pool="main", copies=dict.fromkeys(SCORERS, 1), busy=set())
        calls: dict[str, Any] = {"policy.generate": [(["data"], {"samples": 1})]}
        calls |= {f"{name}.score": [(["policy.generate"], {"row_s": row_s})] for name in SCORERS[:scorers]}
        source = Gathering(
            self.executor,
            DataStream(take=lambda _: prompts, state=dict),
            how=GroupSampling(
                groups=ROWS, samples=1, sampling=None, replicas=self._replicas, deadline_s=WAIT_S
            ),
            rule=rule,
            step_groups=ROWS,
            most_rows=ROWS,
            streamed=streamed_stages(
                before_updates(calls, self.executor),
                self.executor,
                changing=(),
                most=ROWS // CALLS,
                step_rows=ROWS,
                shared=shared,
            ),
            shared=shared,
        )
        began = time.monotonic()
        data = source.take(1, ROWS)
        seconds = time.monotonic() - began
        made = source.rows(self.groups["sampler"], "generate", [data], {})
        assert made is not None
        made.wait(WAIT_S)
        return Measured(seconds=seconds, metrics=source.opened().measured)


def prompts_of(lengths: Sequence[int]) -> Batch:
    """Return a prompt of one token for each row."""
    columns = Ragged.from_text([json.dumps({"length": each}) for each in lengths])
    ids = row_ids([RowId(0, place, 0) for place in range(len(lengths))])
    return Batch(ids=ids, fields={"tokens": Ragged.from_rows([[5]] * len(lengths)), "columns": columns})


def tail_of(lengths: Sequence[int], scorers: int, row_s: float) -> Tail:
    """Return the batch as the simulator takes it: its replicas deal rows out in turn, ours in blocks."""
    share = len(lengths) // REPLICAS
    dealt = tuple(lengths[one * share + place] for place in range(share) for one in range(REPLICAS))
    return Tail(
        lengths=dealt,
        replicas=REPLICAS,
        token_s=token_s,
        most_rows=FLAT_ROWS,
        score_row_s=scorers * row_s,
        send_row_s=0.0,
        reread_row_s=0.0,
    )


def predicted(tail: Tail, rows: int) -> GatheringGain:
    """Return the simulated step with the best number of replicas for a threshold."""
    if not rows:
        return gathered(tail, 0, 0)
    counts = range(tail.least_replicas(rows), REPLICAS)
    return min((gathered(tail, rows, count) for count in counts), key=lambda each: each.total_s)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A threshold: simulated and measured."""

    rows: int
    """R."""
    told: GatheringGain
    """Result of the simulator."""
    made: list[Measured]
    """Measurements, one for each round."""

    @property
    def seconds(self) -> float:
        """Median of the measured seconds."""
        return statistics.median(each.seconds for each in self.made)


def sweep(ranks: Ranks, kind: str, scorers: int, how: argparse.Namespace) -> list[Line]:
    """Measure a distribution of lengths and a number of scorers at every threshold."""
    lengths, row_s = lengths_of(kind), how.row_ms / 1000
    prompts, tail = prompts_of(lengths), tail_of(lengths, scorers, row_s)
    lines = []
    for share in how.thresholds:
        rows = round(share * ROWS)
        told = predicted(tail, rows)
        if rows:
            # The rule gathers below its threshold, the simulator at it.
            rule = GatherRule(rows=rows + 1, replicas=told.replicas, with_caches=True)
            made = [ranks.gathered(prompts, scorers, row_s, rule) for _ in range(how.rounds)]
        else:
            made = [ranks.today(prompts, scorers, row_s) for _ in range(how.rounds)]
        lines.append(Line(rows=rows, told=told, made=made))
        print(
            f"{kind}, {scorers} scorers, R {rows}: {told.total_s:.2f} s told, {lines[-1].seconds:.2f} s",
            flush=True,
        )
    return lines


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a table of one sweep."""
    yield (
        "| R | m | simulated s | measured s | measured / simulated | rows moved | they waited, s "
        "| idle in the tail |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for each in lines:
        last = each.made[-1]
        cells = [f"{each.rows / ROWS:.0%}", str(each.told.replicas or "-")]
        cells += [
            f"{each.told.total_s:.2f}",
            f"{each.seconds:.2f}",
            f"{each.seconds / each.told.total_s:.2f}",
        ]
        cells += [
            last.of("gather/rows/sum"),
            last.of("gather/wait_seconds/max"),
            last.of("gather/idle/share"),
        ]
        yield f"| {' | '.join(cells)} |"


def best(lines: Sequence[Line], seconds: Callable[[Line], float]) -> Line:
    """Return the lowest threshold that is as fast as the fastest."""
    least = min(map(seconds, lines))
    return next(each for each in lines if seconds(each) <= least * (1 + TIE))


def summary(found: Mapping[tuple[str, int], Sequence[Line]]) -> Iterator[str]:
    """Yield a table of the best thresholds."""
    yield (
        "| lengths | scorers | today, s | simulated best R | measured best R "
        "| measured s at the simulated best | least measured s | today / simulated best |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for (kind, scorers), lines in found.items():
        today = lines[0].seconds
        told = best(lines, lambda each: each.told.total_s)
        made = best(lines, lambda each: each.seconds)
        cells = [kind, str(scorers), f"{today:.2f}", f"{told.rows / ROWS:.0%}", f"{made.rows / ROWS:.0%}"]
        least = min(each.seconds for each in lines)
        cells += [f"{told.seconds:.2f}", f"{least:.2f}", f"{today / told.seconds:.2f}"]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, help="steps of each, of which the median counts")
    parser.add_argument("--thresholds", type=float, nargs="+", default=SHARES, help="shares of the batch")
    parser.add_argument("--scorers", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--lengths", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--token-ms", type=float, default=12.0, help="a decoding step")
    parser.add_argument("--row-ms", type=float, default=40.0, help="a row of one scorer")
    parser.add_argument("--backend", choices=["ray", "inline"], default="ray")
    parser.add_argument("--write", type=Path, help="a page of results")
    how = parser.parse_args()
    os.environ[TOKEN_S] = str(how.token_ms / 1000)
    if how.backend == "ray":
        from rillflow.workers.start import ray_backend

        backend: Backend = ray_backend(WAIT_S)
    else:
        backend = InlineBackend(WAIT_S)
    try:
        ranks = Ranks(backend)
        ranks.today(prompts_of([5] * ROWS), 3, 0.0)  # imports and first calls
        warm_up = prompts_of([5 + 25 * (place % 16 == 0) for place in range(ROWS)])
        ranks.gathered(warm_up, 3, 0.0, GatherRule(rows=ROWS // 2, replicas=1, with_caches=True))
        found = {
            (kind, scorers): sweep(ranks, kind, scorers, how)
            for kind in how.lengths
            for scorers in how.scorers
        }
    finally:
        backend.close()
    page = [
        "# Gathering the last rows of a step",
        "",
        "What is measured, and how: the head of `benchmarks/streaming/gathering.py`.",
        "",
        f"- command: `python {' '.join(['benchmarks/streaming/gathering.py', *sys.argv[1:]])}`",
        f"- machine: {os.cpu_count()} cores, {platform.machine()}; {REPLICAS} processes on "
        f"{'Ray ' + version('ray') if how.backend == 'ray' else 'threads'}",
        f"- {ROWS} rows; {how.token_ms:g} ms a decoding step, {how.row_ms:g} ms a row and scorer; "
        f"rounds: {how.rounds}, medians",
        "- R = 0%: simulated, scoring begins after the last row; measured, today's step",
        f"- the best R is the lowest whose seconds are within {TIE:.0%} of the least",
        "",
        *summary(found),
    ]
    for (kind, scorers), lines in found.items():
        page += ["", f"## {kind}, {scorers} scorers", "", *table(lines)]
    text = below_title("\n".join(page) + "\n", line())
    print(text)
    if how.write:
        how.write.write_text(text)


if __name__ == "__main__":
    main()

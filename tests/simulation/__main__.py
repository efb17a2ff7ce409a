"""Run seeds of the simulation: python -m tests.simulation --seeds 1000 [--from N] [--trace] [--coverage]."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import coverage

MEASURED = "rillflow.controller"


def main() -> int:
    """Run the seeds; return 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.split(":")[0])
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds (100)")
    parser.add_argument("--from", dest="first", type=int, default=0, help="first seed (0)")
    parser.add_argument("--trace", action="store_true", help="print every event of every seed")
    parser.add_argument("--coverage", action="store_true", help=f"print the coverage of {MEASURED}")
    asked = parser.parse_args()
    with measured(asked.coverage):
        return run(range(asked.first, asked.first + asked.seeds), is_traced=asked.trace)


def run(seeds: range, *, is_traced: bool) -> int:
    """Run seeds until all are done or Ctrl-C; print the failing ones and a summary."""
    import torch

    from tests.simulation.seeds import ran

    torch.set_num_threads(1)
    began, failed, ends, faults = time.monotonic(), list[int](), Counter[str](), Counter[str]()
    done = compared = 0
    for seed in seeds:
        try:
            outcome = ran(seed)
        except KeyboardInterrupt:
            break
        done += 1
        compared += outcome.is_compared
        for start in outcome.starts:
            ends[start.end.partition(":")[0]] += 1
            struck = (line.split("FAULT ")[1] for line in start.trace if "FAULT" in line)
            faults.update(" ".join(each.split()[:2]) for each in struck)
        if is_traced or outcome.problems:
            print(outcome.story)
        if outcome.problems:
            failed.append(seed)
            print(f"repeat it: python -m tests.simulation --seeds 1 --from {seed} --trace", flush=True)
    print(
        f"{done} seeds, {ends.total()} starts in {time.monotonic() - began:.0f} s; "
        f"{compared} compared bit by bit; {len(failed)} failed{f': {failed}' if failed else ''}"
    )
    print(f"faults: {dict(faults.most_common())}")
    print(f"ends: {dict(ends.most_common())}")
    return int(bool(failed))


@contextmanager
def measured(is_asked: bool) -> Iterator[None]:
    """Print the coverage of the controller at the end, if requested."""
    if not is_asked:
        yield
        return
    found = coverage.Coverage(data_file=None, source=[MEASURED], branch=True)
    with found.collect():
        yield
    found.report(show_missing=True, file=sys.stdout)


sys.exit(main())

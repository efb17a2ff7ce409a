"""Run seeds of the simulation: python -m tests.simulation --seeds 1000 [--from N] [--trace]."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch

from tests.simulation.seeds import ran


def main() -> int:
    """Run the seeds; return 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds (100)")
    parser.add_argument("--from", dest="first", type=int, default=0, help="first seed (0)")
    parser.add_argument("--trace", action="store_true", help="print every event of every seed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    began, failed, ends, faults, starts, compared = time.monotonic(), [], Counter[str](), Counter[str](), 0, 0
    for seed in range(asked.first, asked.first + asked.seeds):
        outcome = ran(seed)
        starts += len(outcome.starts)
        compared += outcome.is_compared
        for start in outcome.starts:
            ends[start.end.partition(":")[0]] += 1
            struck = (line.split("FAULT ")[1] for line in start.trace if "FAULT" in line)
            faults.update(" ".join(each.split()[:2]) for each in struck)
        if asked.trace or outcome.problems:
            print(outcome.story)
        if outcome.problems:
            failed.append(seed)
            print(f"reproduce: python -m tests.simulation --seeds 1 --from {seed} --trace", flush=True)
    took = time.monotonic() - began
    print(
        f"{asked.seeds} seeds, {starts} starts in {took:.0f} s; {compared} compared bit by bit; "
        f"{len(failed)} failed{f': {failed}' if failed else ''}"
    )
    print(f"faults: {dict(faults.most_common())}")
    print(f"ends: {dict(ends.most_common())}")
    return bool(failed)


sys.exit(main())

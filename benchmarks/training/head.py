"""Head and loss of a large vocabulary: logits in slices against whole logits and against torch's own loss.

    hidden [N, D] ─ head [V, D] ─ log probabilities, entropy ─ backward ─> gradients of hidden and head

    python benchmarks/training/head.py
    python benchmarks/training/head.py --tokens 2048 --write benchmarks/results/head.md

Each way runs in its own process. Its peak is the growth of resident memory (VmHWM) above what the process
holds before: hidden states, head and the head's gradient. float32, one thread, seconds are medians. Linux
only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

SMALLEST = []
SLOW = ["--tokens 64"]  # starts a process for each of eight cells, with a vocabulary of full size

VOCABULARY, WIDTH = 151_936, 896
WAYS = {
    "slices": "Rillflow, logits in slices of 2^26",
    "whole": "Rillflow, whole logits",
    "torch whole": "torch cross_entropy of whole logits, no entropy",
    "torch fused": "torch linear_cross_entropy, no entropy",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--write", help="a file for the table")
    arguments = parser.parse_args()
    from importlib.metadata import version

    lines = [
        "# Head and loss of a large vocabulary",
        "",
        "<!-- not run: four gigabytes, and a quiet machine -->",
        "```console",
        f"$ python benchmarks/training/head.py --tokens {arguments.tokens} "
        f"--write benchmarks/results/head.md",
        "```",
        "",
        f"{arguments.tokens:,} tokens, vocabulary {VOCABULARY:,}, hidden size {WIDTH}, float32, one thread "
        f"of {os.cpu_count()} cores, torch {version('torch')}; forward and backward, medians of "
        f"{arguments.repeats}. The gradient of the head's weight was there before; one more is in every row, "
        f"{VOCABULARY * WIDTH * 4 / 2**20:,.0f} MiB.",
        "",
        "| head and loss | peak on top | seconds | scored alone: peak | seconds |",
        "|---|---|---|---|---|",
    ]
    context = multiprocessing.get_context("spawn")
    for way, name in WAYS.items():
        cells = []
        for is_trained in (True, False):
            with context.Pool(1) as pool:
                peak, seconds = pool.apply(measured, (way, arguments.tokens, arguments.repeats, is_trained))
            cells.append(f"{peak / 2**20:,.0f} MiB | {seconds:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if arguments.write:
        Path(arguments.write).write_text("\n".join(lines) + "\n")


def measured(way: str, tokens: int, repeats: int, is_trained: bool) -> tuple[int, float]:
    """Return the peak bytes above the start, and the median seconds."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = torch.empty(VOCABULARY, WIDTH).normal_(0, 0.02).requires_grad_()
    hidden = torch.randn(tokens, WIDTH).requires_grad_()
    ids = torch.randint(VOCABULARY, (tokens,))
    weight.grad = torch.zeros_like(weight)
    seconds, most = [], 0
    for _ in range(repeats):
        Path("/proc/self/clear_refs").write_text("5")
        before, began = status("VmRSS"), time.perf_counter()
        with torch.set_grad_enabled(is_trained):
            total = loss(way, hidden, weight, ids)
        if is_trained:
            total.backward()
        seconds.append(time.perf_counter() - began)
        most = max(most, status("VmHWM") - before)
    return most, statistics.median(seconds)


def loss(way: str, hidden: Any, weight: Any, ids: Any) -> Any:
    """Return a sum of log probabilities and, if the way has them, of entropies."""
    from torch.nn import functional

    from rillflow.formulas.logprobs import HeadLogits, token_logprobs

    if way == "torch fused":
        return functional.linear_cross_entropy(hidden, weight, ids, reduction="sum")
    if way == "torch whole":
        return functional.cross_entropy(hidden @ weight.T, ids, reduction="sum")
    logits = HeadLogits(hidden=hidden, weight=weight) if way == "slices" else hidden @ weight.T
    found = token_logprobs(logits, ids)
    return -found.logprobs.sum() - 0.01 * found.entropy.sum()


def status(name: str) -> int:
    """Return a memory figure of this process in bytes, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


if __name__ == "__main__":
    main()

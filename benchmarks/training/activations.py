"""Peak activation memory of a long row under tensor parallelism, with and without sequence parallelism.

    python benchmarks/training/activations.py            # two processes per case, about a minute

    a decoder of random weights ─ forward and backward over one row ─> peak resident memory above weights
                                                                       and gradients

Each case runs in its own processes, so that peaks do not mix. The smallest peak of the rounds counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from weights.loading import forgotten, resident

SMALLEST = []
SLOW = ["--tokens 64"]  # starts six processes

RANKS = 2
MIB = 2**20
CASES = [
    ("kept", False, False),
    ("kept, tokens shared out", True, False),
    ("computed a second time", False, True),
    ("computed a second time, tokens shared out", True, True),
]


def passes(said: Any, rank: int, meeting: str, tokens: int, sequence: bool, recompute: bool) -> None:
    """Run one rank: put its peak bytes above the start and its seconds of a forward and backward pass."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, Qwen2Config

    from rillflow.models.attention import ATTENTION, register
    from rillflow.placement.mesh import Mesh
    from rillflow.records.batch import Batch, row_ids
    from rillflow.records.ragged import Ragged
    from rillflow.records.row import RowId
    from rillflow.sharding.mesh import rank_groups
    from rillflow.sharding.module import Parallel
    from rillflow.training.recompute import Recompute
    from rillflow.workers.collectives import ProcessRanks

    torch.set_num_threads(1)
    ranks = ProcessRanks.join(rank, RANKS, dist.FileStore(meeting, RANKS), deadline_s=600)
    groups = rank_groups(Mesh.of(dp=1, pp=1, tp=RANKS), ranks)
    register()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
    )
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    parallel = Parallel(module, groups, sequence=sequence)
    row = Ragged.from_rows([torch.randint(0, 256, (tokens,)).tolist()])
    mask = Ragged.from_rows([[False] * (tokens - 8) + [True] * 8], torch.bool)
    part = Batch(ids=row_ids([RowId(0, 0, 0)]), fields={"tokens": row, "loss_mask": mask})
    again = Recompute(module, whole=False) if recompute else None
    grown, seconds = [], []
    for _ in range(3):  # the first pass allocates the gradients
        base, began = forgotten(), time.monotonic()
        if again is not None:
            with again:
                parallel.run([part], 1, lambda _, output: output.sum(), lambda: None)
        else:
            parallel.run([part], 1, lambda _, output: output.sum(), lambda: None)
        seconds.append(time.monotonic() - began)
        grown.append(resident("VmHWM") - base)
    said.put((min(grown[1:]), median(seconds[1:])))


def together(tokens: int, sequence: bool, recompute: bool) -> tuple[int, float]:
    """Return the larger peak of the ranks in bytes, and the longer time in seconds."""
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (str(Path(meeting) / "meeting"), tokens, sequence, recompute)
        ranks = [context.Process(target=passes, args=(said, rank, *arguments)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        found = [said.get(timeout=600) for _ in ranks]
        for rank in ranks:
            rank.join()
    return max(peak for peak, _ in found), max(seconds for _, seconds in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args().tokens
    print(f"one row of {tokens} tokens, 8 layers of 512, tp {RANKS}, float32, {os.cpu_count()} cores\n")
    print("| activations | peak a rank, MiB | of the first | seconds |\n|---|---|---|---|")
    first = 0
    for name, sequence, recompute in CASES:
        peak, seconds = together(tokens, sequence, recompute)
        first = first or peak
        print(f"| {name} | {peak / MIB:.0f} | {peak / first:.2f} | {seconds:.2f} |")


if __name__ == "__main__":
    main()

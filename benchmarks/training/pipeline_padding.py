"""Wasted work of pipeline stages: padding tokens of micro-batches, and idle stages.

    micro-batch 0  ######....      every micro-batch is padded to the packed tokens of the longest one;
                1  #########.      a shared prompt is packed once, so equal budgets give unequal lengths
                2  ##########

    python benchmarks/training/pipeline_padding.py        # a few seconds

No model runs: rows are random, and are split and packed as in a trainer.
"""

from __future__ import annotations

import argparse

import torch

from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.sharding.packed_rows import lay_out
from rillflow.training.scorer import micro_batches

SMALLEST = ["--prompts 4 --samples 2 --prompt 16 --answer 16"]


def drawn(prompts: int, samples: int, prompt: int, answer: int, seed: int = 0) -> Batch:
    """Return rows whose answer lengths are exponential, clamped at four times their mean."""
    generator = torch.Generator().manual_seed(seed)
    texts, masks, ids = [], [], []
    for place in range(prompts):
        start = torch.randint(0, 30_000, (prompt,), generator=generator).tolist()
        lengths = torch.empty(samples).exponential_(1 / answer, generator=generator).clamp(1, 4 * answer)
        for sample, length in enumerate(lengths.long().tolist()):
            texts.append(start + torch.randint(0, 30_000, (length,), generator=generator).tolist())
            masks.append([False] * prompt + [True] * length)
            ids.append(RowId(0, place, sample))
    tokens, mask = Ragged.from_rows(texts), Ragged.from_rows(masks, torch.bool)
    return Batch(ids=row_ids(ids), fields={"tokens": tokens, "loss_mask": mask})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--samples", type=int, default=8)
    options.add_argument("--prompt", type=int, default=256)
    options.add_argument("--answer", type=int, default=512)
    given = options.parse_args()
    rows = drawn(given.prompts, given.samples, given.prompt, given.answer)
    print("| budget | micro-batches | filler tokens | waiting, 2 stages | 4 stages |\n|---|---|---|---|---|")
    for budget in (4096, 8192, 16384, 32768):
        parts = [rows.select(part) for part in micro_batches(rows, budget)]
        sizes = [lay_out(part, torch.device("cpu"), back=1).size for part in parts]
        filler = 1 - sum(sizes) / (max(sizes) * len(sizes))
        waits = [(stages - 1) / (len(parts) + stages - 1) for stages in (2, 4)]
        print(f"| {budget} | {len(parts)} | {filler:.0%} | {waits[0]:.0%} | {waits[1]:.0%} |")


if __name__ == "__main__":
    main()

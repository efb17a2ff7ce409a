"""Cost of an update if rows share their prompt, compared with rows that have their own prompts.

    python benchmarks/training/shared_prompts.py
    python benchmarks/training/shared_prompts.py --prompt 256 --write benchmarks/results/shared_prompts.md

64 rows of 32 prompt and 64 answer tokens, a model of the size of ``grpo_step.py``, one optimiser step.
Settings take turns. A cell is the median of CPU seconds, which vary less than wall-clock time on a busy
machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config

from rillflow.formulas.config import PolicyLossConfig
from rillflow.models.attention import ATTENTION, register
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.sharding.packed_rows import pack
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss
from rillflow.training.trainer import Trainer

SMALLEST = []
SLOW = ["--steps 1 --prompt 4"]  # its model and rows have full size

ROWS, ANSWER, VOCABULARY = 64, 64, 256
SAMPLES = (1, 2, 4, 8, 16)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    trainer = make_trainer()
    loss = PolicyLoss(PolicyLossConfig(), max_tokens=ANSWER)
    batches = {samples: make_rows(samples, arguments.prompt) for samples in SAMPLES}
    said = {samples: trainer.scorer.logprobs(rows) for samples, rows in batches.items()}
    batches = {k: rows.with_fields(sampler_logprobs=said[k]) for k, rows in batches.items()}
    seconds: dict[int, list[float]] = {samples: [] for samples in SAMPLES}
    for _ in range(arguments.steps + 1):
        for samples, rows in batches.items():
            began = time.process_time()
            trainer.update(rows, loss)
            seconds[samples].append(time.process_time() - began)
    medians = {samples: statistics.median(times[1:]) for samples, times in seconds.items()}
    table = _table(batches, medians, arguments)
    print(table)
    if arguments.write:
        Path(arguments.write).write_text(table + "\n")


def make_trainer() -> Trainer:
    """Return a trainer of a Qwen2 with 3.3 million random parameters."""
    register()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    return Trainer(module, TrainConfig(tokens_per_micro_batch=1 << 20), total_steps=1000)


def make_rows(samples: int, prompt: int) -> Batch:
    """Return random rows in groups of ``samples`` that share a prompt."""
    prompts = torch.randint(0, VOCABULARY, (ROWS // samples, prompt)).repeat_interleave(samples, 0)
    tokens = torch.cat([prompts, torch.randint(0, VOCABULARY, (ROWS, ANSWER))], 1)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, prompt:] = True
    lengths = torch.full((ROWS,), tokens.shape[1])
    return Batch(
        ids=row_ids([RowId(0, row // samples, row % samples) for row in range(ROWS)]),
        fields={
            "tokens": Ragged(values=tokens.flatten(), lengths=lengths),
            "loss_mask": Ragged(values=mask.flatten(), lengths=lengths),
            "advantages": torch.randn(ROWS),
        },
    )


def _table(batches: dict[int, Batch], medians: dict[int, float], arguments: argparse.Namespace) -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    lines = [
        "# An update of rows that share prompts",
        "",
        f"`python {' '.join(sys.argv)}`, {os.cpu_count()} cores, {arguments.threads} thread(s), "
        f"{versions}, transformers {transformers.__version__}; medians of {arguments.steps} updates after "
        "the first.",
        "",
        "| rows of a prompt | tokens | packed tokens | CPU s | of alone |",
        "|---|---|---|---|---|",
    ]
    for samples, rows in batches.items():
        tokens = rows.ragged("tokens")
        sizes = f"{len(tokens.values)} | {len(pack(tokens).tokens)}"
        share = medians[samples] / medians[1]
        lines.append(f"| {samples} | {sizes} | {medians[samples]:.3f} | {share:.2f} |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of an update by how many rows share a prompt.")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=5, help="updates after the first")
    parser.add_argument("--threads", type=int, default=1, help="threads")
    parser.add_argument("--write", help="file for the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()

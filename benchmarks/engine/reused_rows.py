"""Rows of wrong log probabilities where cache rows are reused in every way, with passes rounded as on CUDA.

    random events ─ tests/unit/rollout/reused_rows.py ─> rows ─ plain pass of their version ─> deviations

    python benchmarks/engine/reused_rows.py --rows 100000 --write benchmarks/results/reused_rows.md

A history is an engine with its own cache size and number of rows. Rows arrive in time, fork from beginnings
of others, take further turns, are cancelled, wait again and move with their caches; weights are replaced in
between. A row is wrong if a recorded log probability deviates by more than 1e-5 in float32. Exit status 1
means that one is.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from rillflow.models.attention import ATTENTION, register  # noqa: E402
from tests.unit.rollout.reused_rows import CONTEXT, Reuse, engine_of, round_passes  # noqa: E402

SMALLEST = ["--rows 40 --events 10", "--rows 20 --events 10 --dtype bfloat16 --plain"]

POSITION_BYTES = 2 * 2 * (8 + 8) * 4
"""Bytes of a cache position of the model."""
MOST = 1e-5
"""Largest deviation in float32."""


@dataclass(kw_only=True)
class Total:
    """Sums over histories."""

    rows: int = 0
    """Rows with a sampled token."""
    turns: int = 0
    """Rows of several turns."""
    wrong: int = 0
    """Rows that deviate by more than ``MOST``."""
    largest: float = 0.0
    """Largest deviation in nats."""
    passes: int = 0
    """Passes that only feed rows, if rounded."""
    padded: int = 0
    """Passes with padding rows."""
    copies: int = 0
    """Cache rows copied to others."""
    requeued: int = 0
    """Rows that waited again."""
    versions: int = 0
    """Weights that rows were sampled with."""

    def add(self, reuse: Reuse) -> None:
        """Add a history's rows."""
        deviations = [
            gap for row, gap in zip(reuse.ended, reuse.deviations(), strict=True) if any(row.loss_mask)
        ]
        self.rows += len(deviations)
        self.turns += sum(row.loss_mask.count(True) > 0 and _turns(row.loss_mask) > 1 for row in reuse.ended)
        self.wrong += sum(not gap <= MOST for gap in deviations)
        self.largest = max(self.largest, *deviations, 0.0)
        self.copies, self.requeued = self.copies + reuse.copied, self.requeued + reuse.requeued
        self.versions += len(reuse.plain)


def _turns(mask: tuple[bool, ...]) -> int:
    """Return the number of sampled parts of a row."""
    return sum(own and not before for before, own in zip((False, *mask), mask, strict=False))


def module_of(dtype: torch.dtype) -> nn.Module:
    """Return a fresh tiny model whose tokens have different probabilities."""
    register()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    module: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)
    return module.to(dtype)


def measured(rows: int, events: int, dtype: str, *, is_rounded: bool) -> Total:
    """Run histories until there are enough rows."""
    total, seed = Total(), 0
    while total.rows < rows:
        chance, module = Random(seed), module_of(getattr(torch, dtype))
        gib = chance.choice([None, None, 600, 1200, 4800])
        engine = engine_of(
            module,
            max_rows=chance.choice([5, 12, 20, 48, 90]),
            cache_gib=None if gib is None else gib * POSITION_BYTES * 1.5 / 2**30,
        )
        passes = round_passes(engine) if is_rounded else None
        reuse = Reuse(module=module, engine=engine, chance=chance, most_samples=32, is_cache_compared=False)
        reuse.run(events)
        total.add(reuse)
        if passes is not None:
            total.passes, total.padded = total.passes + passes.passes, total.padded + passes.padded
        seed += 1
    return total


def page(total: Total, arguments: argparse.Namespace, seconds: float) -> str:
    """Return the results page."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    command = " ".join(["python benchmarks/engine/reused_rows.py", *sys.argv[1:]])
    kind = "as on a CPU" if arguments.plain else "rounded as on CUDA"
    lines = [
        "# Rows sampled while cache rows are reused",
        "",
        measured_at.line(),
        "",
        f"`{command}`; {os.cpu_count()} cores, one thread, {versions}, {seconds / 60:.0f} minutes.",
        "",
        f"A model of 2 layers in {arguments.dtype}, passes {kind}. Rows arrive in time, fork, take turns, "
        "are cancelled, wait again and move with their caches; weights are replaced in between. Each row is "
        "compared with a plain pass of the weights that sampled it.",
        "",
        "| | |",
        "|---|---|",
        f"| rows | {total.rows:,} |",
        f"| rows of several turns | {total.turns:,} |",
        f"| rows with a log probability that deviates by more than {MOST:g} | {total.wrong:,} |",
        f"| largest deviation, nats | {total.largest:.2g} |",
        f"| passes that only feed rows; with padding rows | {total.passes:,}; {total.padded:,} |",
        f"| copies of cache rows | {total.copies:,} |",
        f"| rows that waited again | {total.requeued:,} |",
        f"| weight versions | {total.versions:,} |",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1000, help="least number of rows")
    parser.add_argument("--events", type=int, default=200, help="events of a history")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--plain", action="store_true", help="do not round passes")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    total = measured(arguments.rows, arguments.events, arguments.dtype, is_rounded=not arguments.plain)
    text = page(total, arguments, time.perf_counter() - begun)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
    if arguments.dtype == "float32" and total.wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Exact differences of published weights: their bytes beside the entropy bound, and their speed.

    float32 weights ─ AdamW ─ bfloat16 copy ─┬─ Delta ─> bytes, receiver's bits
                                             ├─ positions as int32, values as bfloat16 ─> bytes
                                             └─ XOR with the last copy ─ zstd ─> bytes

    python benchmarks/links/delta.py --write benchmarks/results/link_delta.md    # 5 min

The model has a decoder's feed-forward blocks and learns random targets; its matrices have a standard
deviation of 0.02. Every tensor has a payload of its own, with its header. For a tensor of n elements, m of
them changed, p = m / n, the bound is n H(p) + m H(steps) bits: the positions as independent draws with
probability p, and the empirical entropy of the differences of the ordered bit patterns. It assumes that
elements are independent; correlated ones may take less.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import zstandard
from torch import Tensor, nn

from rillflow.sharding.codec import State
from rillflow_links.codecs.delta import Delta, ordered
from rillflow_links.codecs.payload import host_bits

sys.path.insert(0, str(Path(__file__).parents[1]))
from measured_at import below_title, line

SMALLEST = ["--rates 1e-5 --steps 3 --width 32 --mebibytes 1"]
NEEDS = ["rillflow_links"]
BATCH, STANDARD_DEVIATION = 64, 0.02


@dataclass(kw_only=True)
class Published:
    """Figures of all publishes with one learning rate, the first whole one left out."""

    rate: float
    """Learning rate."""
    whole: int
    """Bytes of all weights in bfloat16."""
    changed: list[float] = field(default_factory=list)
    """Changed share of the elements, for each publish."""
    sent: list[int] = field(default_factory=list)
    """Bytes of the differences, for each publish."""
    bound: list[float] = field(default_factory=list)
    """Entropy bound in bytes, for each publish."""
    naive: list[int] = field(default_factory=list)
    """Bytes of int32 positions and bfloat16 values, for each publish."""
    xor: list[int] = field(default_factory=list)
    """Bytes of the compressed XOR, for each publish."""
    is_equal: bool = False
    """Whether the receiver's weights equal the sender's, bit for bit, after the last publish."""

    def row(self) -> str:
        """Return the line of the table."""
        sent, bound = statistics.fmean(self.sent), statistics.fmean(self.bound)
        naive, xor = statistics.fmean(self.naive), statistics.fmean(self.xor)
        ratio = f"{sent / bound:.2f}" if bound else "-"
        return (
            f"| {self.rate:g} | {100 * statistics.fmean(self.changed):.2f}% | {self.whole / sent:.1f}x | "
            f"{sent:,.0f} | {bound:,.0f} | {ratio} | {naive / sent:.1f}x | {xor / sent:.1f}x | "
            f"{'yes' if self.is_equal else 'NO'} |"
        )


def model_of(width: int) -> nn.Sequential:
    """Return two blocks of linear layers and norms."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for _ in range(2):
        blocks += [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    model = nn.Sequential(*blocks)
    for each in model.parameters():
        if each.dim() == 2:
            nn.init.normal_(each, std=STANDARD_DEVIATION)
    return model


def entropy_bytes(counts: np.ndarray) -> float:
    """Return the bytes of an ideal code of symbols with these counts."""
    shares = counts[counts > 0] / counts.sum() if counts.sum() else np.ones(1)
    return float(-(shares * np.log2(shares)).sum() * counts.sum() / 8)


def bound_bytes(new: Tensor, base: Tensor) -> tuple[float, int]:
    """Return the bound of a tensor's difference in bytes, and the number of changed elements."""
    new_bits, base_bits = host_bits(new), host_bits(base)
    changed = new_bits != base_bits
    count = int(changed.sum())
    places = entropy_bytes(np.array([count, changed.size - count]))
    steps = ordered(new_bits[changed]) - ordered(base_bits[changed])
    return places + entropy_bytes(np.unique(steps, return_counts=True)[1]), count


def published(rate: float, steps: int, width: int) -> Published:
    """Train a model, publish it after every step, and compare the sizes."""
    model, codec = model_of(width), Delta(10**9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(width, width, generator=generator) / math.sqrt(width)
    held = [each.detach().to(torch.bfloat16).zero_() for each in model.parameters()]
    ends: list[tuple[State, State]] = [({}, {}) for _ in held]
    whole = sum(each.nbytes for each in held)
    figures, coder = Published(rate=rate, whole=whole), zstandard.ZstdCompressor(level=1)
    for step in range(steps + 1):
        exported = [each.detach().to(torch.bfloat16) for each in model.parameters()]
        totals = dict.fromkeys(("sent", "bound", "count", "xor"), 0.0)
        for new, into, (sender, receiver) in zip(exported, held, ends, strict=True):
            if step:
                bound, count = bound_bytes(new, into)
                xor = host_bits(new) ^ host_bits(into)
                totals["bound"] += bound
                totals["count"] += count
                totals["xor"] += len(coder.compress(xor.tobytes()))
            payload = codec.encode(new, sender)
            codec.decode(payload, into, receiver)
            totals["sent"] += payload.numel()
        if step:
            figures.changed.append(2 * totals["count"] / whole)
            figures.sent.append(int(totals["sent"]))
            figures.bound.append(totals["bound"])
            figures.naive.append(int(6 * totals["count"]))
            figures.xor.append(int(totals["xor"]))
        inputs = torch.randn(BATCH, width, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs @ teacher).square().mean().backward()
        optimizer.step()
    figures.is_equal = all(
        torch.equal(one.view(torch.int16), two.view(torch.int16))
        for one, two in zip(held, exported, strict=True)
    )
    return figures


def speeds(share: float, mebibytes: int) -> str:
    """Return the line of encode and decode times for a changed share."""
    count = mebibytes * 2**19
    generator = torch.Generator().manual_seed(2)
    first = (torch.randn(count, generator=generator) * STANDARD_DEVIATION).to(torch.bfloat16)
    signs = torch.randint(0, 2, (count,), generator=generator, dtype=torch.int16) * 2 - 1
    steps = signs * (torch.rand(count, generator=generator) < share)
    second = (first.view(torch.int16) + steps.to(torch.int16)).view(torch.bfloat16)
    codec, sender, receiver, held = Delta(10**9), State(), State(), torch.empty_like(first)
    codec.decode(codec.encode(first, sender), held, receiver)
    began = (time.perf_counter(), time.process_time())
    payload = codec.encode(second, sender)
    encoded = (time.perf_counter(), time.process_time())
    codec.decode(payload, held, receiver)
    decoded = (time.perf_counter(), time.process_time())
    assert torch.equal(held.view(torch.int16), second.view(torch.int16))
    scale = 1e8 / first.nbytes
    cells = [f"{scale * (two - one):.2f}" for one, two in zip(began, encoded, strict=True)]
    cells += [f"{scale * (two - one):.2f}" for one, two in zip(encoded, decoded, strict=True)]
    return f"| {100 * share:g}% | {' | '.join(cells)} | {first.nbytes / payload.numel():.1f}x |"


def page(rates: Sequence[float], steps: int, width: int, mebibytes: int) -> str:
    """Return the page."""
    lines = [
        "# Exact differences of published weights",
        "",
        f"`python benchmarks/links/delta.py --rates {' '.join(f'{each:g}' for each in rates)} "
        f"--steps {steps} --width {width}`, one thread, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"zstandard {zstandard.__version__}. Bytes are means over {steps} publishes, headers included.",
        "",
        "| learning rate | changed | whole / sent | sent bytes | bound, bytes | sent / bound | "
        "naive / sent | XOR + zstd / sent | same bits at the end |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rate in rates:
        lines.append(published(rate, steps, width).row())
        print(lines[-1], flush=True)
    lines += [
        "",
        "The bound of a tensor is n H(p) bits for the positions and m H(steps) for the values: n elements, "
        "m of them changed, p = m / n, and the empirical entropy of the differences of the ordered bits. "
        "Naive is an int32 position and a bfloat16 value for each changed element.",
        "",
        f"## Seconds for 100 MB, from one bfloat16 tensor of {mebibytes} MiB, one round",
        "",
        "| changed | encode | of it CPU | decode | of it CPU | whole / sent |",
        "|---|---|---|---|---|---|",
    ]
    for share in (0.01, 0.03, 0.1, 0.4):
        lines.append(speeds(share, mebibytes))
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--mebibytes", type=int, default=64, help="size of the tensor that is timed")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = page(arguments.rates, arguments.steps, arguments.width, arguments.mebibytes)
    if arguments.write:
        arguments.write.write_text(below_title(text, line()), "utf-8")


if __name__ == "__main__":
    main()

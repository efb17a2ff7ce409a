"""The measurements behind the engine's choices: attention over a cache, sampling, and batch-invariant bits.

    python benchmarks/engine/engine_choices.py

1. Attention of one query per row over a KV cache, in microseconds per layer. The timing cycles through the
   caches of four layers, as a forward pass does.
2. Drawing one token for each of 16 rows from a large vocabulary: CPU milliseconds of one thread. Other ways
   are shares of plain sampling, measured in turn. Logits range from nearly flat to those of a trained model.
3. Log probabilities of 64 tokens of that vocabulary and their gradients, by rows per chunk: CPU milliseconds.
4. Whether a row of a matrix product gets the same bits in every place, next to any other rows, on 1 and 2
   threads, and with any number of rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from rillflow.formulas.logprobs import token_logprobs
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.sampling import DrawSettings, draw

SMALLEST = []
SLOW = ["--repeats 1"]  # its vocabulary has full size

LAYERS = 4
ATTENTION = (
    (64, 2, 2, 64, 80),
    (64, 2, 2, 64, 33),
    (64, 2, 2, 64, 300),
    (64, 4, 1, 64, 96),
    (16, 8, 4, 128, 400),
)
LINEAR = (
    (256, 256),
    (128, 256),
    (768, 256),
    (256, 768),
    (64, 32),
    (100, 48),
    (1000, 96),
    (5000, 128),
    (18992, 64),
)
VOCABULARY, DRAWN = 151_936, 16
DEVIATIONS = (0.1, 1.0, 3.0, 5.0, 8.0)
CHUNKS = (1, 2, 4, 8, 16, 64)
ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 31, 32, 48, 64, 65, 100, 128, 256)


@dataclass(frozen=True, kw_only=True)
class Caches:
    """Queries, keys and values of rows that decode one token each."""

    query: Tensor
    """[rows, heads, group, size]."""
    keys: Tensor
    """[rows, heads, length, size]: the part of a longer cache that is read."""
    values: Tensor
    """[rows, heads, length, size]."""
    bias: Tensor
    """[rows, 1, 1, length]."""


def products(caches: Caches) -> Tensor:
    """Attend with query heads grouped under their key head, by two batched matrix products."""
    rows, heads = caches.query.shape[:2]
    bias = caches.bias[:, 0].repeat_interleave(heads, 0)
    scores = torch.baddbmm(
        bias, caches.query.flatten(0, 1), caches.keys.flatten(0, 1).transpose(1, 2), alpha=0.1
    )
    return torch.bmm(scores.softmax(-1), caches.values.flatten(0, 1)).view(rows, heads, -1)


def grouped(caches: Caches) -> Tensor:
    """Attend with PyTorch's attention; the query heads of a key head become additional queries."""
    found = scaled_dot_product_attention(caches.query, caches.keys, caches.values, caches.bias, scale=0.1)
    return found.flatten(2)


def repeated(caches: Caches) -> Tensor:
    """Attend with PyTorch's attention, called as a module would call it."""
    query = caches.query.flatten(1, 2)[:, :, None]
    keys, values = caches.keys, caches.values
    found = scaled_dot_product_attention(query, keys, values, caches.bias, scale=0.1, enable_gqa=True)
    return found.view(len(query), keys.shape[1], -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=30, help="timings of each way to attend (30)")
    repeats = parser.parse_args().repeats
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.get_num_threads()} threads\n")
    print("| rows, key heads, group, head size, positions | type | products | grouped | repeated |")
    print("|---|---|---|---|---|")
    for shape, dtype in itertools.product(ATTENTION, (torch.float32, torch.bfloat16)):
        layers = [caches_of(shape, dtype) for _ in range(LAYERS)]
        times = [microseconds(way, layers, repeats) for way in (products, grouped, repeated)]
        print(
            f"| {', '.join(map(str, shape))} | {dtype} | "
            + " | ".join(f"{time:.0f}" for time in times)
            + " |"
        )
    print(
        "\n| deviation of the logits | tokens that hold 0.95 | plain | top-k 50 | top-p 0.95 | a whole sort |"
    )
    print("|---|---|---|---|---|---|")
    for deviation in DEVIATIONS:
        print(drawing(deviation, repeats))
    print("\n| rows of a chunk | milliseconds |\n|---|---|")
    for rows, milliseconds in chunks(max(1, repeats // 3)).items():
        print(f"| {rows} | {milliseconds:.0f} |")
    print("\n| type | bits depend on | with so many rows |\n|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for question, rows in rounding(dtype).items():
            print(f"| {dtype} | {question} | {', '.join(map(str, sorted(rows))) or 'none'} |")


def caches_of(shape: tuple[int, ...], dtype: torch.dtype) -> Caches:
    """Return random caches of which attention reads only the first positions."""
    rows, heads, group, size, length = shape
    whole = [torch.randn(rows, heads, -(-length // 128) * 128, size, dtype=dtype) for _ in range(2)]
    return Caches(
        query=torch.randn(rows, heads, group, size, dtype=dtype),
        keys=whole[0][:, :, :length],
        values=whole[1][:, :, :length],
        bias=torch.zeros(rows, 1, 1, length, dtype=dtype),
    )


def microseconds(way: Callable[[Caches], Tensor], layers: list[Caches], repeats: int) -> float:
    """Return the median time per layer, in microseconds."""
    seconds = []
    with torch.inference_mode():
        for _ in range(repeats + 3):
            begin = time.perf_counter()
            for layer in layers:
                way(layer)
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[3:]) / len(layers) * 1e6


def drawing(deviation: float, repeats: int) -> str:
    """Time the ways of sampling; return one line of their table."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(DRAWN, VOCABULARY, generator=random) * deviation
    uniforms = torch.rand(DRAWN, generator=random, dtype=torch.float64)
    ways = [SamplingConfig(), SamplingConfig(top_k=50), SamplingConfig(top_p=0.95)]
    settings = [DrawSettings.of([way] * DRAWN, logits.device) for way in ways]
    seconds: list[list[float]] = [[] for _ in ways]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(repeats):
        for own, way in zip(seconds, settings, strict=True):
            begin = time.process_time()
            draw(logits, way, uniforms)
            own.append(time.process_time() - begin)
    begin = time.process_time()
    mass = logits.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    whole = time.process_time() - begin
    torch.set_num_threads(threads)
    plain, *others = (statistics.median(own) for own in seconds)
    shares = " | ".join(f"{other / plain:.2f}" for other in (*others, whole))
    held = float((mass < 0.95).sum(-1).float().mean()) + 1
    return f"| {deviation:g} | {held:,.0f} | {plain * 1e3:.1f} ms | {shares} |"


def chunks(repeats: int) -> dict[int, float]:
    """Return median CPU milliseconds of log probabilities and their gradient, by rows per chunk."""
    logits = torch.randn(CHUNKS[-1], VOCABULARY, requires_grad=True)
    tokens = torch.zeros(CHUNKS[-1], dtype=torch.int64)
    seconds: dict[int, list[float]] = {rows: [] for rows in CHUNKS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(repeats):
        for rows, own in seconds.items():
            begin = time.process_time()
            token_logprobs(logits, tokens, chunk=rows * VOCABULARY).logprobs.sum().backward()
            own.append(time.process_time() - begin)
            logits.grad = None
    torch.set_num_threads(threads)
    return {rows: statistics.median(own) * 1e3 for rows, own in seconds.items()}


def rounding(dtype: torch.dtype) -> dict[str, set[int]]:
    """Return the row counts at which a linear layer's row changes its bits, by the cause of the change."""
    found: dict[str, set[int]] = {
        "its place": set(),
        "other rows": set(),
        "1 or 2 threads": set(),
        "rows": set(),
    }
    for index, (out, size) in enumerate(LINEAR):
        random = torch.Generator().manual_seed(index)
        weight = torch.randn(out, size, generator=random).to(dtype)
        row = torch.randn(size, generator=random).to(dtype)
        wanted = linear(row.expand(64, size).contiguous(), weight)[0]
        for rows in ROWS:
            alike = row.expand(rows, size).contiguous()
            beside = torch.randn(rows, size, generator=random).to(dtype)
            beside[rows // 2] = row
            by_threads = []
            for threads in (1, 2):
                torch.set_num_threads(threads)
                result = linear(alike, weight)
                by_threads.append(result[0])
                found["its place"] |= {rows} if bool((result != result[:1]).any()) else set()
                other = linear(beside, weight)[rows // 2]
                found["other rows"] |= {rows} if not torch.equal(other, result[rows // 2]) else set()
            found["1 or 2 threads"] |= {rows} if not torch.equal(*by_threads) else set()
            found["rows"] |= {rows} if not torch.equal(by_threads[0], wanted) else set()
    return found


if __name__ == "__main__":
    main()

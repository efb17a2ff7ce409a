"""A mixture of experts against a dense decoder with the same active parameters: training and generation.

    python benchmarks/training/mixtures.py --write benchmarks/results/mixtures.md    # two minutes, one thread

    rows ── Trainer.update ───────────> seconds of a step         experts by grouped products, as in a run,
    prompts ── NativeEngine.generate ─> seconds of their rows     and by the module's own loop

    prompts ── NativeEngine ─> rows, with and without routes ── Scorer ─> |trainer - sampler| of their tokens

The three take turns; figures are medians. A token uses two of 16 experts, each half as wide as the dense
layer. In generation, few rows already read nearly all experts' weights, and grouping cannot avoid that.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from rillflow.models.attention import ATTENTION, register
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.sharding.mesh import rank_groups
from rillflow.sharding.module import Parallel
from rillflow.training.config import TrainConfig
from rillflow.training.loss import SupervisedLoss
from rillflow.training.trainer import Trainer
from rillflow.workers.collectives import Ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/distributed"))
from processes import together

SMALLEST = []
SLOW = ["--rounds 1"]  # sizes are those of the page

EXPERTS, CHOSEN, WIDTH = 16, 2, 768
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "intermediate_size": WIDTH,
}
MIXED = {"moe_intermediate_size": WIDTH // CHOSEN, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
KINDS = {"dense": "", "mixture, grouped": "grouped_mm", "mixture, the module's loop": "eager"}
ROWS = [(64, 64), (16, 128), (8, 512)]
"""Rows of a step, and tokens of each."""


def module(experts: str) -> Any:
    """Return a decoder with random weights; ``experts`` names the implementation of its experts, if any."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, **MIXED, norm_topk_prob=True) if experts else Qwen3Config(**SIZES)
    found = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    if experts:
        found.set_experts_implementation(experts)
    return found.eval()


def rows(count: int, tokens: int) -> Batch:
    """Return random rows; all tokens but the first are loss tokens."""
    draw = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, 512, (count, tokens), generator=draw).tolist()
    mask = [[False] + [True] * (tokens - 1)] * count
    return Batch(
        ids=row_ids([RowId(0, row, 0) for row in range(count)]),
        fields={"tokens": Ragged.from_rows(drawn), "loss_mask": Ragged.from_rows(mask, torch.bool)},
    )


def prompts(count: int) -> Batch:
    """Return random prompts of 16 tokens."""
    whole = rows(count, 16)
    columns = Ragged.from_text(["{}"] * count)
    return Batch(ids=whole.ids, fields={"tokens": whole.ragged("tokens"), "columns": columns})


def in_turn(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each, after one warm-up round."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            spent[name].append(time.perf_counter() - began)
    return {name: median(each[1:]) for name, each in spent.items()}


def lines(rounds: int) -> list[str]:
    """Return the rows of the table."""
    found = []
    for count, tokens in ROWS:
        steps: dict[str, Callable[[], object]] = {}
        for name, experts in KINDS.items():
            trainer = Trainer(module(experts), TrainConfig(lr=1e-4), total_steps=1000)
            batch = rows(count, tokens)
            steps[name] = lambda trainer=trainer, batch=batch: trainer.update(batch, SupervisedLoss())  # type: ignore[misc]
        found.append((f"a step of {count} rows of {tokens}", in_turn(steps, rounds)))
    for count in (8, 64, 256):
        asked: dict[str, Callable[[], object]] = {}
        for name, experts in KINDS.items():
            config = RolloutConfig(max_tokens=64, max_rows=count)
            engine = NativeEngine(module(experts), config, stop_tokens=frozenset(), seed=0, context=512)
            asked[name] = lambda engine=engine, count=count: engine.generate(prompts(count))  # type: ignore[misc]
        found.append((f"{count} rows of 64 sampled", in_turn(asked, rounds)))
    table = []
    for what, seconds in found:
        dense, grouped, loop = (seconds[name] for name in KINDS)
        ratios = f"{grouped / dense:.2f} | {loop / dense:.2f}"
        table.append(f"| {what} | {dense:.3f} | {grouped:.3f} | {loop:.3f} | {ratios} |")
    return table


def replayed() -> list[str]:
    """Return the cost of recording and replaying routes, and the gap between trainer and sampler."""
    table = []
    for dtype in (torch.float32, torch.bfloat16):
        made = module("grouped_mm").to(dtype)
        with torch.no_grad():
            for name, weight in made.named_parameters():
                if weight.dim() > 1 and "embed" not in name:
                    weight.mul_(3.0)  # fresh weights give every token nearly the same probability
        seconds, rollouts = dict[bool, float](), dict[bool, Batch]()
        for records in (False, True):
            config = RolloutConfig(max_tokens=64, max_rows=64, replay_routing=records or None)
            engine = NativeEngine(made, config, stop_tokens=frozenset(), seed=0, context=512)
            engine.generate(prompts(64))
            began = time.perf_counter()
            rollouts[records] = engine.generate(prompts(64))
            seconds[records] = time.perf_counter() - began
        found = rollouts[True]
        plain = found.only(*(name for name in found.fields if name != "routes"))
        mask = found.ragged("loss_mask").values
        sampler = found.ragged("sampler_logprobs").values[mask]
        scorer = Trainer(made, TrainConfig(), total_steps=1).scorer
        routes = found.ragged("routes").values
        for name, rows_, took in (("chosen anew", plain, seconds[False]), ("replayed", found, seconds[True])):
            began = time.perf_counter()
            gaps = (scorer.logprobs(rows_).values[mask] - sampler).abs()
            scored = time.perf_counter() - began
            held = routes[0].nbytes if rows_ is found else 0
            apart = f"{float(gaps.mean()):.2g} | {float(gaps.max()):.2g}"
            kind = str(dtype).removeprefix("torch.")
            table.append(f"| {kind} | {name} | {apart} | {took:.2f} | {scored:.2f} | {held} |")
    return table


def _stepped(ranks: Ranks, ep: int, rounds: int) -> tuple[float, int, int]:
    """Run a rank; return median seconds of a step, bytes of its weights, bytes that it sends for experts."""
    torch.set_num_threads(1)
    register()
    made = module("grouped_mm")
    parallel = Parallel(made, rank_groups(Mesh.of(dp=2, pp=1, tp=1), ranks, ep=ep))
    trainer = Trainer(made, TrainConfig(lr=1e-4), total_steps=1000, parallel=parallel)
    batch = rows(32, 64).select(list(range(ranks.rank, 32, 2)))
    seconds = in_turn({"step": lambda: trainer.update(batch, SupervisedLoss())}, rounds)["step"]
    held = sum(weight.nbytes for weight in parallel.local_weights().values())
    sent = 4 * 2 * SIZES["num_hidden_layers"] * 16 * 63 * CHOSEN * SIZES["hidden_size"] * 4 // 2
    return seconds, held, sent if ep > 1 else 0


def shared_out(rounds: int) -> list[str]:
    """Return the rows for two ranks with different rows: all experts on each, or half of them."""
    table = []
    for ep in (1, 2):
        found = together(2, _stepped, ep, rounds)
        seconds, held = max(each[0] for each in found), found[0][1]
        weights = f"{held / 2**20:.1f} | {4 * held / 2**20:.1f}"
        table.append(f"| {ep} | {seconds:.2f} | {weights} | {found[0][2] / 2**20:.1f} |")
    return table


def main() -> None:
    """Measure all tables; print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--write", type=Path, help="the page to write; printed if left out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    register()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    page = [
        "# A mixture of experts against a dense decoder of as many active parameters",
        "",
        f"`python benchmarks/training/mixtures.py --rounds {given.rounds}`, "
        f"one thread of {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}, {versions}; {EXPERTS} experts, "
        f"{CHOSEN} a token; sizes are at the head of the script.",
        "",
        "| what | dense, s | mixture, s | by its own loop, s | mixture / dense | loop / dense |",
        "|---|---|---|---|---|---|",
        *lines(given.rounds),
        "",
        "64 rows of 64 tokens sampled, then scored by the trainer: how far the log probabilities of both are "
        "apart where routers choose anew, and where routes are replayed (`rollout.replay_routing`).",
        "",
        "| arithmetic | routes | mean gap | largest gap | sampling, s | scoring, s | bytes a token |",
        "|---|---|---|---|---|---|---|",
        *replayed(),
        "",
        "A step of 32 rows of 64 tokens on two ranks of one machine, over loopback, one thread each: all "
        "experts on each rank, and half of them (`placement.train_parallel.main = { dp = 1, ep = 2 }`). "
        "Sent: half of the copies of a rank's tokens, there and back, forward and backward.",
        "",
        "| ep | a step, s | weights a rank, MiB | with gradients and moments | sent for experts, MiB |",
        "|---|---|---|---|---|",
        *shared_out(given.rounds),
        "",
    ]
    if given.write:
        given.write.write_text("\n".join(page), "utf-8")
    else:
        sys.stdout.write("\n".join(page))


if __name__ == "__main__":
    main()

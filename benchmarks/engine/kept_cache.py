"""Rows that continue with newer weights: the error of a kept KV cache, and the cost of recomputing it.

    python benchmarks/engine/kept_cache.py

The quickstart trains for some steps. Then 256 of its prompts sample four tokens with one checkpoint and
continue with a newer one. The KV cache is kept (``schedule.keep_cache``) or recomputed.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import load_model
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs import layout
from rillflow.runs.reader import read_rollouts

SMALLEST = ["--set warm_start.steps=1 --set algorithm.prompts_per_step=4 --set policy.warmup_steps=0"]

ROOT = Path(__file__).parents[2]
KEPT = (
    "run.checkpoint_every=1",
    "run.keep_checkpoints=9",
    "algorithm.steps=8",
    "evaluate=none",
    "run.threads=1",
)
"""Settings of the run, which keep its last checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Switched:
    """Rows whose weights changed; values are nats of every token after the change."""

    moved: list[float]
    """Differences between the old and the new weights' log probabilities."""
    off: list[float]
    """Differences between the sampler's log probabilities and those of the new weights."""
    seconds: float
    """Seconds of the first pass after the change."""


def switched(before: Path, after: Path, prompts: Sequence[tuple[int, ...]], *, keep: bool) -> Switched:
    """Sample rows whose weights change after four tokens."""
    old, new = (
        load_model(
            ModelConfig(path=str(each / "policy")), seed=0, device=torch.device("cpu"), base=each
        ).module
        for each in (before, after)
    )
    config = RolloutConfig(max_tokens=9, max_rows=len(prompts)).with_kept_cache(keep)
    module = copy.deepcopy(old)
    engine = NativeEngine(module, config, stop_tokens=frozenset(), seed=1, context=16)
    for place, prompt in enumerate(prompts):
        engine.add(Rollout.start(RowId(0, place, 0), prompt))
    for _ in range(4):
        engine.step()
    module.load_state_dict(new.state_dict())
    engine.load(1, dict(module.named_parameters()))
    began = time.perf_counter()
    ended = engine.step()
    seconds = time.perf_counter() - began
    while engine.has_work:
        ended += engine.step()
    off, moved = [], []
    for row in ended:
        places = [place for place, version in enumerate(row.versions) if version == 1]
        chances = [log_probabilities(each, row.tokens)[places] for each in (new, old)]
        off += [
            abs(float(chance) - row.logprobs[place]) for chance, place in zip(chances[0], places, strict=True)
        ]
        moved += (chances[0] - chances[1]).abs().tolist()
    return Switched(moved=moved, off=off, seconds=seconds)


def log_probabilities(module: torch.nn.Module, tokens: Sequence[int]) -> Tensor:
    """Return [T] each token's log probability in a pass over the whole row; 0 for the first token."""
    row = torch.tensor([tokens])
    with torch.no_grad():
        said = module(input_ids=row, use_cache=False).logits[0].log_softmax(-1)
    return torch.cat([torch.zeros(1), said[:-1].gather(1, row[0, 1:, None])[:, 0]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting")
    more = parser.parse_args().set
    print(
        "| versions newer | the policy moved, nats a token | kept: off by, mean | largest "
        "| read again: largest | first pass after, kept | read again |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        loaded = load_recipe(ROOT / "recipes/arithmetic/run.toml", [f"run.dir='{run}'", *KEPT, *more])
        launch(loaded, quiet=True)
        steps = sorted((run / layout.CHECKPOINTS).glob("step-*"))
        rows = read_rollouts(run, max(layout.rollout_files(run)))[:256]
        prompts = [row.tokens[: row.versions.index(max(row.versions))] for row in rows]
        for newer in (1, 4):
            kept, again = (
                switched(steps[-1 - newer], steps[-1], prompts, keep=keep) for keep in (True, False)
            )
            print(
                f"| {newer} | {statistics.fmean(kept.moved):.4f} | {statistics.fmean(kept.off):.4f} "
                f"| {max(kept.off):.4f} | {max(again.off):.6f} | {1000 * kept.seconds:.0f} ms "
                f"| {1000 * again.seconds:.0f} ms |"
            )
    print(f"\nrillflow {version('rillflow')}, torch {version('torch')}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()

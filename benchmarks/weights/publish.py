"""Seconds of a publish to a sampler on its own ranks, compared with a transfer of the same weights by disk.

    trainer's rank ── digests, packed buckets as references ──> sampler's rank ── digests compared ──> served
    weights ── safetensors on the disk, SHA-256 ──────────────> read again, SHA-256 compared       (the peer)

    python benchmarks/weights/publish.py
    python benchmarks/weights/publish.py --sizes 7M 85M --steps 5 --write results.md
    python benchmarks/weights/publish.py --exposed --sizes 85M     seconds that a publish delays a step

Every figure comes from whole runs through the code of `rillflow run` (GRPO; one rank trains, one samples), in
one process and on Ray. Seconds are medians of the runs' spans: from the first digest until the last rank has
compared its own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.runs.formatting import size
from rillflow.runs.reader import SpanRecord, read_metrics, read_spans

SMALLEST = ["--sizes tiny --backends inline --steps 2"]
SLOW = ["--sizes tiny --backends ray --steps 2"]  # starts Ray

SIZES = {"tiny": (32, 2), "7M": (256, 8), "85M": (768, 12)}
"""Hidden size and layers of each model."""
RECIPE = """
[run]
threads = 1
checkpoint_minutes = 0
[task]
source = "arithmetic"
digits = 1
size = 80
held_out = 10
[policy]
model.new = { hidden = HIDDEN, layers = LAYERS, heads = 8, context = 16, alphabet = "0123456789+-*=" }
[rollout]
max_tokens = 2
[evaluate]
problems = 0
[algorithm]
name = "grpo"
steps = STEPS
prompts_per_step = 2
samples_per_prompt = 2
[placement]
pools = { main = 1, answers = 1 }
roles = { sampler = "answers" }
"""
TRAINER, SAMPLER = ("policy.publish", "policy.send"), ("sampler.receive", "sampler.serve")
"""Stages of a publish ahead on either side.

The trainer computes digests and packs; the sampler receives and compares.
"""
EXPOSED: dict[str, tuple[str, ...]] = {
    "in step": (),
    "one version ahead": ('schedule={mode="ahead",freshness=1}',),
    "ready first, each of two replicas": (
        'schedule={mode="ahead",freshness=1}',
        "schedule.mode=ready_first",
        "placement.pools={ main = 1, answers = 2 }",
    ),
}
PUBLISH = ("policy.digest", "policy.send", "sampler.receive", "policy.publish")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["7M", "85M"])
    parser.add_argument("--backends", nargs="+", choices=("inline", "ray"), default=["inline", "ray"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--write", help="a file for the table")
    parser.add_argument("--exposed", action="store_true", help="in step and ahead, on Ray")
    arguments = parser.parse_args()
    if arguments.exposed:
        print("\n".join(_exposed(arguments.sizes, arguments.steps)))
        return
    lines = [
        "# A publish to a sampler on ranks of its own",
        "",
        f"`python benchmarks/weights/publish.py`, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"ray {version('ray')}, float32; one rank trains and one answers, one thread each; medians after the "
        "first step.",
        "",
        "| parameters | weights | backend | publish | digest, send, receive, serve | by the disk, hashed "
        "| disk / publish |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in arguments.sizes:
        for backend in arguments.backends:
            with tempfile.TemporaryDirectory() as folder:
                lines.append(_line(name, backend, Path(folder), arguments.steps))
                print(lines[-1], flush=True)
    print("\n".join(lines))
    if arguments.write:
        Path(arguments.write).write_text("\n".join(lines) + "\n")


def _line(name: str, backend: str, folder: Path, steps: int) -> str:
    run = _run(name, folder, steps, f"placement.backend={backend}")
    spans = [span for span in read_spans(run) if span.stage in PUBLISH and span.step > 1]
    seconds = [_seconds([span for span in spans if span.step == step]) for step in range(2, steps + 1)]
    parts = [statistics.median(span.duration_s for span in spans if span.stage == stage) for stage in PUBLISH]
    weights = next((run / "checkpoints").rglob("policy/model.safetensors"))
    disk = statistics.median(_by_disk(weights, folder / "copy.safetensors") for _ in range(5))
    whole = statistics.median(seconds)
    told = ", ".join(f"{part:.3f}" for part in parts)
    return (
        f"| {name} | {size(weights.stat().st_size)} | {backend} | {whole:.3f} s | {told} | {disk:.3f} s "
        f"| {disk / whole:.1f}x |"
    )


def _run(name: str, folder: Path, steps: int, *settings: str) -> Path:
    hidden, layers = SIZES[name]
    text = RECIPE.replace("HIDDEN", str(hidden)).replace("LAYERS", str(layers)).replace("STEPS", str(steps))
    (folder / "run.toml").write_text(text)
    loaded = load_recipe(folder / "run.toml", [f'run.dir="{folder / "run"}"', *settings])
    launch(loaded, quiet=True)
    return folder / "run"


def _exposed(sizes: Sequence[str], steps: int) -> Iterator[str]:
    """Yield the seconds in which a publish keeps the trainer from training and the sampler from sampling.

    In step, both wait from the first digest until the last comparison. Ahead, each side waits for its own
    work. The sampler also waits while it has no rows until the version that it needs is packed. With two
    replicas that take weights in turn, each one waits half of their joint time.
    """
    yield "| parameters | | trainer | sampler | a step |"
    yield "|---|---|---|---|---|"
    for name in sizes:
        for mode, settings in EXPOSED.items():
            with tempfile.TemporaryDirectory() as folder:
                run = _run(name, Path(folder), steps, "placement.backend=ray", *settings)
                spans, metrics = read_spans(run), read_metrics(run)
            taken = statistics.median(one.metrics["run/step_seconds/mean"].value for one in metrics[2:])
            if "replica" in mode:
                sides = [_busy(spans, TRAINER), _busy(spans, SAMPLER) / 2]
            elif settings:
                sides = [_busy(spans, TRAINER), _busy(spans, SAMPLER) + _kept_waiting(spans)]
            else:
                each = [span for span in spans if span.stage in PUBLISH]
                whole = [
                    _seconds([span for span in each if span.step == step]) for step in range(3, steps + 1)
                ]
                sides = [statistics.median(whole)] * 2
            told = " | ".join(f"{side:.3f} s" for side in sides)
            yield f"| {name} | {mode} | {told} | {taken:.2f} s |"


def _busy(spans: Sequence[SpanRecord], stages: Sequence[str]) -> float:
    """Return the median seconds of a step in which ranks worked on these stages."""
    by_step: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.stage in stages:
            by_step[span.step] += sum(each.duration_s for each in span.ranks)
    return statistics.median(by_step.values())


def _kept_waiting(spans: Sequence[SpanRecord]) -> float:
    """Return the median seconds from the sampler's last work, or the update's end, to the first bucket."""
    found = []
    for span in (one for one in spans if one.stage == "sampler.receive"):
        before = [
            one.start_s + one.duration_s
            for one in spans
            if (one.stage == "policy.generate" and one.step == span.step - 1)
            or (one.stage == "policy.update" and one.step == span.step - 2)
        ]
        found.append(max(0.0, span.start_s - max(before)) if len(before) == 2 else 0.0)
    return statistics.median(found)


def _seconds(spans: list[SpanRecord]) -> float:
    return max(span.start_s + span.duration_s for span in spans) - min(span.start_s for span in spans)


def _by_disk(weights: Path, copy: Path) -> float:
    """Return the seconds to write the weights to disk, hash the file, read it and hash it again."""
    tensors = load_file(weights)
    began = time.perf_counter()
    save_file(tensors, copy)
    with copy.open("rb") as file:
        os.fsync(file.fileno())
        written = hashlib.file_digest(file, "sha256").digest()
    read = {name: tensor.clone() for name, tensor in load_file(copy).items()}
    with copy.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").digest() == written and len(read) == len(tensors)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

"""GPU: what the engines do on CUDA, by the commands that users run; what is expected stands beside it.

    python benchmarks/gpu.py                        # digests, then every mesh that the devices allow
    python benchmarks/gpu.py --shape 7b --write benchmarks/results/gpu.md
    python benchmarks/gpu.py --rehearse             # the same on processors, tiny: that the script works
    python benchmarks/grpo_step.py --device cuda --shape 0.5b --dtypes bfloat16 --trl .trl/bin/python

A mesh is a run of three steps of GRPO, ``rillflow run`` on Ray with a rank a device: NCCL's sums under dp,
gathers under fsdp, all-reduces under tp, stages under pp, and where training and generation lie otherwise the
switch between them, every publish compared by its digests. Each begins from the same random weights and draws
the same tokens as far as rounding lets it, so the first step's gradient is alike under all of them.

Weights are random, of the shapes in SHAPES; words are single characters, so the vocabulary's size is the
model's and no file is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

SMALLEST = []
SLOW = ["--rehearse --ranks 1"]  # starts Ray

MESHES = {
    "one device": {},
    "dp": {"dp": 0},
    "fsdp": {"fsdp": 0},
    "fsdp, generating with tp 2": {"fsdp": 0, "generate": 2},
    "tp": {"dp": 0, "tp": 2},
    "tp, generating with tp 1": {"dp": 0, "tp": 2, "generate": 1},
    "pp": {"dp": 0, "pp": 2},
    "pp and tp": {"dp": 0, "pp": 2, "tp": 2},
}
"""Axes of training, 0 for what is left of the devices, and tp of generation."""
SHAPES = {
    "tiny": {"hidden": 64, "layers": 4, "heads": 4, "kv": 2, "inner": 128, "words": 256, "rows": 8, "new": 8},
    "0.5b": {"hidden": 896, "layers": 24, "heads": 14, "kv": 2, "inner": 4864, "words": 151_936},
    "7b": {"hidden": 3584, "layers": 28, "heads": 28, "kv": 4, "inner": 18_944, "words": 152_064},
}
"""Qwen2.5's, but for the first; ``rows`` of ``new`` tokens a step, 128 of 256 where nothing is said."""
PROMPTS = 16
"""Of a step."""


@dataclass(frozen=True, kw_only=True)
class Meshed:
    """Three steps under one mesh."""

    step_s: float
    """The last one's seconds."""
    stage_s: dict[str, float]
    """Of it, by stage."""
    gradient: float
    """The first step's norm."""
    mismatch: float
    """Divergence of the trainer from the sampler, nats a token, the largest of the three means."""


def main() -> None:
    arguments = _arguments()
    import torch

    count = arguments.ranks if arguments.rehearse else torch.cuda.device_count()
    if not count:
        raise SystemExit("torch sees no CUDA device; --rehearse runs the same on processors, tiny")
    lines = [*_head(arguments, count), "", *digests(arguments.rehearse), "", *meshes(arguments, count)]
    print("\n".join(lines))
    if arguments.write:
        Path(arguments.write).write_text("\n".join(lines) + "\n")


def digests(rehearse: bool) -> list[str]:
    """Digests beside a copy of the same bytes."""
    import torch

    from rillflow.placement.slices import Slice
    from rillflow.sharding.digest import slice_digest

    device = torch.device("cpu" if rehearse else "cuda")
    shape = (256, 4096) if rehearse else (131_072, 4096)
    values = torch.randn(shape, device=device).bfloat16()
    box = Slice(tuple((0, length) for length in shape))

    def seconds(work: Any) -> float:
        found = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
        return median(found[1:])

    own, copy = seconds(lambda: slice_digest(values, box, values.dtype)), seconds(values.clone)
    gigabytes = values.nbytes / 1e9
    return [
        "## Digests",
        "",
        f"{gigabytes:.2f} GB of bfloat16: {gigabytes / own:.1f} GB/s; a copy {gigabytes / copy:.1f} GB/s. "
        "Expected on CUDA: about a thirtieth of the copy, ten passes over eight bytes for every two.",
    ]


def meshes(arguments: argparse.Namespace, count: int) -> list[str]:
    """A run under every mesh that these devices allow."""
    lines = [
        f"## Meshes, {arguments.shape}",
        "",
        "Expected: the gradient of the first step alike down the column but for rounding; a mismatch "
        "below 0.001 nats; fsdp, tp and pp slower a step than dp where the model fits one device.",
        "",
        "| mesh | devices | s a step | by stage | gradient, first step | mismatch |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES[arguments.shape])
        for name, axes in MESHES.items():
            fixed = axes.get("pp", 1) * axes.get("tp", 1)
            needed = 1 if not axes else max(2, fixed, axes.get("generate", 1))
            if needed > count or count % fixed:
                lines.append(f"| {name} | needs {max(needed, fixed)} | not run | | | |")
                continue
            ranks = count if axes else 1
            try:
                lines.append(_row(name, ranks, meshed(Path(folder), axes, ranks, arguments)))
            except subprocess.CalledProcessError as error:
                said = (error.stderr.strip().splitlines() or ["no word"])[-1].replace("|", "/")
                lines.append(f"| {name} | {ranks} | failed: {said} | | | |")
            print(lines[-1], flush=True)
    return lines


def meshed(folder: Path, axes: dict[str, int], ranks: int, arguments: argparse.Namespace) -> Meshed:
    """Three steps under one mesh, by the command line."""
    from rillflow.runs.reader import read_metrics, read_spans

    shutil.rmtree(run := folder / "run", ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "rillflow.cli.main",
        "run",
        str(folder / "run.toml"),
        "--dir",
        str(run),
        "--quiet",
    ]
    for setting in _settings(axes, ranks, arguments.rehearse):
        command += ["--set", setting]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=arguments.deadline_s)
    steps = [record.metrics for record in read_metrics(run)]
    stages: dict[str, float] = {}
    for span in read_spans(run):
        if span.step == len(steps):
            stages[span.stage] = stages.get(span.stage, 0.0) + span.duration_s
    return Meshed(
        step_s=steps[-1]["run/step_seconds/mean"].value,
        stage_s=stages,
        gradient=steps[0]["train/grad_norm/mean"].value,
        mismatch=max(step["mismatch/kl/mean"].value for step in steps),
    )


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """Random weights in bfloat16, a tokeniser of single characters, and a recipe and its reward."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape["words"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder / "model")
    words = {chr(0x100 + index): index for index in range(min(shape["words"], 0xD000))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=chr(0x102)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=chr(0x101), pad_token=chr(0x100))
    fast.save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text(
        "\n".join(
            json.dumps({"prompt": "".join(chr(0x110 + (7 * row + place) % 90) for place in range(32))})
            for row in range(4 * PROMPTS)
        )
    )
    (folder / "reward.py").write_text(
        "def even(prompts, completions, **columns):\n"
        "    return [sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) for text in completions]\n"
    )
    rows, new = shape.get("rows", 128), shape.get("new", 256)
    (folder / "run.toml").write_text(f"""
[task]
source = "prompts.jsonl"
held_out = 2
[policy]
lr = 1e-5
model = {{ path = "model", dtype = "bfloat16" }}
[rollout]
max_tokens = {new}
max_rows = {rows}
[reward]
function = "reward.py:even"
[algorithm]
name = "grpo"
steps = 3
old_logprobs = "trainer"
prompts_per_step = {min(PROMPTS, rows // 2)}
samples_per_prompt = {max(2, rows // PROMPTS)}
""")


def _settings(axes: dict[str, int], ranks: int, rehearse: bool) -> Iterator[str]:
    yield f'run.device="{"cpu" if rehearse else "cuda"}"'
    yield 'placement.backend="ray"'
    yield "evaluate=none"
    yield f"placement.pools.main={ranks}"
    if axes:
        left = ranks // (axes.get("pp", 1) * axes.get("tp", 1))
        laid = {name: size or left for name, size in axes.items() if name != "generate"}
        sizes = ", ".join(f"{name} = {size}" for name, size in laid.items())
        yield f"placement.train_parallel.main={{ {sizes} }}"
        yield f"placement.rollout_parallel.tp={axes.get('generate', axes.get('tp', 1))}"


def _row(name: str, ranks: int, found: Meshed) -> str:
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in found.stage_s.items())
    return (
        f"| {name} | {ranks} | {found.step_s:.2f} | {stages} | {found.gradient:.4f} | {found.mismatch:.5f} |"
    )


def _head(arguments: argparse.Namespace, count: int) -> list[str]:
    import torch

    what = f"{count} processors' ranks, a rehearsal" if arguments.rehearse else torch.cuda.get_device_name()
    return [
        "# On CUDA",
        "",
        f"`{' '.join(['python', *sys.argv])}`: {what}, {count} devices, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, Python {platform.python_version()}.",
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, help="of the model (0.5b; tiny in a rehearsal)")
    parser.add_argument("--rehearse", action="store_true", help="on processors, with a tiny model")
    parser.add_argument("--ranks", type=int, default=2, help="of a rehearsal (2)")
    parser.add_argument("--deadline-s", type=float, default=600, help="longest run of one mesh (600)")
    parser.add_argument("--write", help="file for the tables")
    arguments = parser.parse_args()
    arguments.shape = arguments.shape or ("tiny" if arguments.rehearse else "0.5b")
    return arguments


if __name__ == "__main__":
    main()

"""GPU: digests, a GRPO step by stage on one device, and short runs on every mesh that the devices allow.

    python benchmarks/training/gpu.py                        # everything, 0.5 billion parameters in bfloat16
    python benchmarks/training/gpu.py --parts stages generation --shape 7b
    python benchmarks/training/gpu.py --write benchmarks/results/gpu.md
    python benchmarks/training/gpu.py --rehearse             # the same on processors, tiny: checks the script
    python benchmarks/training/grpo_step.py --device cuda --shape 0.5b --dtypes bfloat16 --trl .trl/bin/python

digests     hash 1 GB of weights; a copy of the same bytes stands beside it.
stages      one process, one device: generation, scoring and update of one step, timed apart, with the peak
            of allocated device memory in each. All weights, with gradient checkpointing, with the optimiser's
            state offloaded, LoRA, and LoRA on an int8 base.
generation  tokens a second by the number of rows, with the passes recorded by TorchScript and without.
meshes      ``rillflow run`` for three steps of GRPO: in one process on one device, on Ray with a rank a
            device on several. All meshes start from the same weights and draw the same tokens up to
            rounding, so the first step's gradient is alike.

MFU counts the matrix products and the attention of the model once (no recomputation), each prompt once, the
head at answers only, no gradients of frozen weights. Weights are random; the vocabulary is single characters.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SMALLEST = ["--rehearse --parts digests stages --steps 1"]
SLOW = ["--rehearse --parts generation meshes"]  # meshes start a process that imports everything anew

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
"""Sizes of the training axes, 0 for the remaining devices, and tp of generation."""
SHAPES = {
    "tiny": {"hidden": 64, "layers": 4, "heads": 4, "kv": 2, "inner": 128, "words": 256, "rows": 8, "new": 8},
    "0.5b": {"hidden": 896, "layers": 24, "heads": 14, "kv": 2, "inner": 4864, "words": 151_936},
    "7b": {"hidden": 3584, "layers": 28, "heads": 28, "kv": 4, "inner": 18_944, "words": 152_064},
}
"""A tiny shape and those of Qwen2.5; a step has ``rows`` rows of ``new`` tokens, 128 of 256 if left out."""
PROMPTS, PROMPT = 16, 32
"""Prompts of a step, and tokens of a prompt."""
VARIANTS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "all weights": (None, {}),
    "gradient checkpointing": (None, {"gradient_checkpointing": True}),
    "optimiser state on the host": (None, {"offload": "optimizer"}),
    "LoRA, rank 16": ("full", {}),
    "LoRA, rank 16, base int8": ("int8", {}),
}
"""The adapter's base, or None to train all weights, and settings of training."""
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 operations a second of the SXM cards, by a part of the device's name."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of one step."""

    seconds: float
    """Seconds of the stage."""
    peak: int
    """The most bytes of device memory allocated in it; 0 on processors."""
    result: Any
    """Result of the stage."""


@dataclass(frozen=True, kw_only=True)
class Meshed:
    """Three steps on one mesh."""

    step_s: float
    """Seconds of the last step."""
    stage_s: dict[str, float]
    """Seconds of the last step's stages."""
    gradient: float
    """Gradient norm of the first step."""
    mismatch: float
    """Divergence of the trainer from the sampler in nats a token, the largest of the steps' means."""


def main() -> None:
    arguments = _arguments()
    import torch

    count = arguments.ranks if arguments.rehearse else torch.cuda.device_count()
    if not count:
        raise SystemExit("torch sees no CUDA device; --rehearse runs the same on processors, tiny")
    lines = _head(arguments, count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, SHAPES[arguments.shape])
        parts: dict[str, Callable[[], Iterator[str]]] = {
            "digests": lambda: digests(arguments.rehearse),
            "stages": lambda: stages(folder, arguments),
            "generation": lambda: generation(folder, arguments),
            "meshes": lambda: meshes(folder, arguments, count),
        }
        for part in arguments.parts:
            lines.append("")
            print()
            for line in parts[part]():
                print(line, flush=True)
                lines.append(line)
                if arguments.write:  # after every line: an interrupted run leaves its finished rows
                    Path(arguments.write).write_text("\n".join(lines) + "\n")


def digests(rehearse: bool) -> Iterator[str]:
    """Time digests beside a copy of the same bytes."""
    import torch

    from rillflow.placement.slices import Slice
    from rillflow.sharding.digest import slice_digest

    device = torch.device("cpu" if rehearse else "cuda")
    shape = (256, 4096) if rehearse else (131_072, 4096)
    values = torch.randn(shape, device=device).bfloat16()
    box = Slice(tuple((0, length) for length in shape))

    def seconds(work: Callable[[], Any]) -> float:
        return median([_timed(work, device).seconds for _ in range(5)][1:])

    own, copy = seconds(lambda: slice_digest(values, box, values.dtype)), seconds(values.clone)
    gigabytes = values.nbytes / 1e9
    yield "## Digests"
    yield ""
    yield f"{gigabytes:.2f} GB of bfloat16: {gigabytes / own:.1f} GB/s; a copy {gigabytes / copy:.1f} GB/s."


def stages(folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """Time the stages of a step on one device, for every variant of training."""
    rows, new = _sizes(arguments.shape)
    yield f"## A step by stage, {arguments.shape}, one device"
    yield ""
    yield (
        f"{rows} rows of {PROMPT} prompt and at most {new} answer tokens, {_prompts(rows)} prompts, "
        f"bfloat16, 16,384 tokens a micro-batch. Medians of {arguments.steps} steps after the first. "
        "Tokens are those of answers. Peaks are of allocated memory: generation, scoring, update."
    )
    yield ""
    yield (
        "| trained | generation, s | tokens/s | scoring, s | update, s | tokens/s | MFU of the update | "
        "peaks, GiB |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, (base, settings) in VARIANTS.items():
        yield _attempt(name, partial(_stages_of, folder, arguments, base, settings))


def generation(folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """Time generation by the number of rows, with and without recorded passes."""
    import torch

    from rillflow.rollout.config import RolloutConfig
    from rillflow.rollout.native.engine import NativeEngine

    new = min(96, _sizes(arguments.shape)[1])
    model = _model(folder, arguments, None)
    yield f"## Generation, {arguments.shape}, one device"
    yield ""
    yield f"Rows of {PROMPT} prompt and at most {new} answer tokens; the second of two calls; bfloat16."
    yield ""
    yield "| rows | passes | tokens/s | ms a pass |"
    yield "|---|---|---|---|"
    for rows in (2, 4) if arguments.rehearse else (16, 128, 512):
        for after in (new // 3, math.inf):
            config = RolloutConfig(max_tokens=new, max_rows=rows)
            stop = model.tokenizer.stop_tokens
            engine = NativeEngine(
                model.module, config, stop_tokens=stop, seed=0, context=model.context, record_after=after
            )
            prompts = _some_prompts(_prompts(rows), SHAPES[arguments.shape]["words"])
            generate = partial(engine.generate, prompts, rows // _prompts(rows))
            found = [_timed(generate, torch.device(arguments.device)) for _ in range(2)][-1]
            lengths = found.result.ragged("loss_mask").sums()
            passes = "plain" if after == math.inf else "recorded"
            pace, speed = 1e3 * found.seconds / float(lengths.max()), float(lengths.sum()) / found.seconds
            yield f"| {rows} | {passes} | {speed:,.0f} | {pace:.2f} |"


def meshes(folder: Path, arguments: argparse.Namespace, count: int) -> Iterator[str]:
    """Run every mesh that these devices allow."""
    yield f"## Meshes, {arguments.shape}"
    yield ""
    yield (
        "Expected: first gradients that differ only by rounding; a mismatch below 0.001 nats; fsdp, tp and "
        "pp with a longer step than dp where the model fits one device."
    )
    yield ""
    yield "| mesh | devices | s a step | by stage | gradient, first step | mismatch |"
    yield "|---|---|---|---|---|---|"
    for name, axes in MESHES.items():
        fixed = axes.get("pp", 1) * axes.get("tp", 1)
        needed = max(2, fixed, axes.get("generate", 1)) if axes else 1
        if needed > count or (axes and count % fixed):
            there = "one device" if count == 1 else f"{count} devices"
            yield f"| {name} | needs {needed} | not run: {there} | | | |"
            continue
        ranks = count if axes else 1
        yield _attempt(f"{name} | {ranks}", partial(_cells, folder, axes, ranks, arguments))


def meshed(folder: Path, axes: dict[str, int], ranks: int, arguments: argparse.Namespace) -> Meshed:
    """Run three steps on one mesh by the command line."""
    from rillflow.runs.reader import read_metrics, read_spans

    shutil.rmtree(run := folder / "run", ignore_errors=True)
    command = [sys.executable, "-m", "rillflow.cli.main", "run", str(folder / "run.toml")]
    command += ["--dir", str(run), "--quiet"]
    for setting in _settings(axes, ranks, arguments.rehearse):
        command += ["--set", setting]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=arguments.deadline_s)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
    steps = [record.metrics for record in read_metrics(run)]
    by_stage: dict[str, float] = {}
    for span in read_spans(run):
        if span.step == len(steps):
            by_stage[span.stage] = by_stage.get(span.stage, 0.0) + span.duration_s
    return Meshed(
        step_s=steps[-1]["run/step_seconds/mean"].value,
        stage_s=by_stage,
        gradient=steps[0]["train/grad_norm/mean"].value,
        mismatch=max(step["mismatch/kl/mean"].value for step in steps),
    )


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """Write random weights in bfloat16, a tokeniser of single characters, a recipe and its reward."""
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
            json.dumps({"prompt": "".join(chr(0x110 + (7 * row + place) % 90) for place in range(PROMPT))})
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
prompts_per_step = {_prompts(rows)}
samples_per_prompt = {rows // _prompts(rows)}
""")


def _stages_of(
    folder: Path, arguments: argparse.Namespace, base: str | None, settings: dict[str, Any]
) -> str:
    """Return the cells of one variant."""
    import torch

    from rillflow.formulas import group_advantages
    from rillflow.formulas.config import PolicyLossConfig
    from rillflow.rollout.config import RolloutConfig
    from rillflow.rollout.native.engine import NativeEngine
    from rillflow.training.config import TrainConfig
    from rillflow.training.loss import PolicyLoss
    from rillflow.training.trainer import Trainer

    device, (rows, new) = torch.device(arguments.device), _sizes(arguments.shape)
    model = _model(folder, arguments, base)
    engine = NativeEngine(
        model.module,
        RolloutConfig(max_tokens=new, max_rows=rows),
        stop_tokens=model.tokenizer.stop_tokens,
        seed=0,
        context=model.context,
    )
    trainer = Trainer(model.module, TrainConfig(lr=1e-5, **settings), total_steps=100)
    loss, prompts = PolicyLoss(PolicyLossConfig(), max_tokens=new), _prompts(rows)
    steps: list[tuple[Stage, Stage, Stage]] = []
    lengths = torch.zeros(0)
    for step in range(arguments.steps + 1):
        asked = _some_prompts(prompts, SHAPES[arguments.shape]["words"], step)
        generate = _timed(partial(engine.generate, asked, rows // prompts), device)
        rollouts, lengths = generate.result, generate.result.ragged("loss_mask").sums()
        score = _timed(partial(trainer.scorer.logprobs, rollouts), device)
        rewards = rollouts.ragged("tokens").values.remainder(2).float()
        mean = rollouts.ragged("tokens").with_values(rewards).sums() / (new + PROMPT)
        valid = torch.ones(rows, dtype=torch.bool)
        advantages = group_advantages(mean, rollouts.ids[:, 1], valid, scale="std")
        aim = trainer.aim(rollouts.with_fields(advantages=advantages), loss, gap_tolerance=0.05)
        update = _timed(partial(trainer.step, aim), device)
        engine.load(step + 1, {})
        steps.append((generate, score, update))
    seconds = [median(each.seconds for each in stage) for stage in list(zip(*steps[1:], strict=True))]
    peaks = [max(each.peak for each in stage) for stage in zip(*steps, strict=True)]
    work = _update_operations(SHAPES[arguments.shape], lengths, prompts, trains_all=base is None)
    most = next((PEAKS[name] for name in PEAKS if name in arguments.name), None)
    answers = float(lengths.sum())
    shown = " / ".join(f"{peak / GIB:.1f}" for peak in peaks) if device.type == "cuda" else "-"
    return (
        f"{seconds[0]:.2f} | {answers / seconds[0]:,.0f} | {seconds[1]:.3f} | {seconds[2]:.3f} | "
        f"{answers / seconds[2]:,.0f} | {f'{work / seconds[2] / most:.0%}' if most else '-'} | {shown}"
    )


def _update_operations(shape: dict[str, int], lengths: Any, prompts: int, *, trains_all: bool) -> float:
    """Return the floating-point operations of forward and backward; see the module's docstring."""
    hidden, size = shape["hidden"], shape["hidden"] // shape["heads"]
    layer = hidden * (2 * hidden + 2 * shape["kv"] * size + 3 * shape["inner"])
    answers = float(lengths.sum())
    weights = layer * shape["layers"] * (answers + prompts * PROMPT) + hidden * shape["words"] * answers
    rows = lengths.double() + PROMPT
    attention = 6 * hidden * shape["layers"] * float((rows * rows).sum())
    return (6 if trains_all else 4) * weights + attention


def _timed(work: Callable[[], Any], device: Any) -> Stage:
    """Run ``work`` and return its time and its peak of device memory."""
    import torch

    if device.type != "cuda":
        began = time.perf_counter()
        result = work()
        return Stage(seconds=time.perf_counter() - began, peak=0, result=result)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return Stage(seconds=seconds, peak=torch.cuda.max_memory_allocated(), result=result)


def _model(folder: Path, arguments: argparse.Namespace, base: str | None) -> Any:
    """Free the memory of the last model and load the model, with an adapter over ``base`` if it is named."""
    import torch

    from rillflow.models.config import AdapterConfig, ModelConfig
    from rillflow.models.language_model import load_model

    gc.collect()  # modules and their hooks are cycles
    torch.cuda.empty_cache()
    adapter = AdapterConfig(base=base) if base else None
    config = ModelConfig(path=str(folder / "model"), dtype="bfloat16", adapter=adapter)
    return load_model(config, seed=0, device=torch.device(arguments.device), base=Path())


def _some_prompts(count: int, words: int, seed: int = 0) -> Any:
    """Return prompts of random tokens; the padding and the stop token are left out."""
    import torch

    from rillflow.records.batch import Batch, row_ids
    from rillflow.records.ragged import Ragged
    from rillflow.records.row import RowId

    tokens = torch.randint(2, words, (count, PROMPT), generator=torch.Generator().manual_seed(seed))
    return Batch(
        ids=row_ids([RowId(seed, prompt, 0) for prompt in range(count)]),
        fields={"tokens": Ragged.from_rows(tokens.tolist()), "columns": Ragged.from_text(["{}"] * count)},
    )


def _sizes(shape: str) -> tuple[int, int]:
    """Return the rows of a step and the most tokens of an answer."""
    return SHAPES[shape].get("rows", 128), SHAPES[shape].get("new", 256)


def _prompts(rows: int) -> int:
    """Return the prompts of a step: at least two rows each."""
    return max(1, min(PROMPTS, rows // 2))


def _attempt(name: str, cells: Callable[[], str]) -> str:
    """Return a row of a table; a failure is told in the row, and the next row follows."""
    from rillflow.errors import RillflowError

    try:
        return f"| {name} | {cells()} |"
    except (RillflowError, RuntimeError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr, flush=True)
        return f"| {name} | failed: {str(error).splitlines()[0].replace('|', '/')} |"


def _settings(axes: dict[str, int], ranks: int, rehearse: bool) -> Iterator[str]:
    yield f'run.device="{"cpu" if rehearse else "cuda"}"'
    yield f'placement.backend="{"ray" if axes else "inline"}"'
    yield "evaluate=none"
    yield f"placement.pools.main={ranks}"
    if axes:
        left = ranks // (axes.get("pp", 1) * axes.get("tp", 1))
        laid = {name: size or left for name, size in axes.items() if name != "generate"}
        sizes = ", ".join(f"{name} = {size}" for name, size in laid.items())
        yield f"placement.train_parallel.main={{ {sizes} }}"
        yield f"placement.rollout_parallel.tp={axes.get('generate', axes.get('tp', 1))}"


def _cells(folder: Path, axes: dict[str, int], ranks: int, arguments: argparse.Namespace) -> str:
    """Return the cells of one mesh."""
    found = meshed(folder, axes, ranks, arguments)
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in found.stage_s.items())
    return f"{found.step_s:.2f} | {stages} | {found.gradient:.4f} | {found.mismatch:.5f}"


def _head(arguments: argparse.Namespace, count: int) -> list[str]:
    import torch
    import transformers

    lines = [
        "# On a GPU" if not arguments.rehearse else "# On processors, a rehearsal",
        "",
        measured_at.line(),
        "",
        f"`{' '.join(['python', *sys.argv])}`: {arguments.name}, {count} devices, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}.",
    ]
    print("\n".join(lines), flush=True)
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parts = ["digests", "stages", "generation", "meshes"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what to measure (all)")
    parser.add_argument("--shape", choices=SHAPES, help="of the model (0.5b; tiny in a rehearsal)")
    parser.add_argument("--steps", type=int, default=2, help="steps by stage after the first (2)")
    parser.add_argument("--rehearse", action="store_true", help="on processors, with a tiny model")
    parser.add_argument("--ranks", type=int, default=1, help="devices of a rehearsal (1; more need Ray)")
    parser.add_argument("--deadline-s", type=float, default=600, help="longest run of one mesh (600)")
    parser.add_argument("--write", help="file for the tables")
    arguments = parser.parse_args()
    arguments.shape = arguments.shape or ("tiny" if arguments.rehearse else "0.5b")
    arguments.device, arguments.name = "cpu", "processors"
    if not arguments.rehearse:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device; --rehearse runs the same on processors, tiny")
        arguments.device, arguments.name = "cuda", torch.cuda.get_device_name()
    return arguments


if __name__ == "__main__":
    main()

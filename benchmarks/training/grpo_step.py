"""One GRPO step against TRL's GRPOTrainer: same weights, prompts, sampling, reward and learning rate.

    parent (this interpreter, Rillflow)          child (the interpreter of --trl)
      step ── generate, score, update              waits
      "go" ────────────────────────────────────>   GRPOTrainer: one optimiser step
      waits                     <───────────────   its seconds
      floor ── the same products and attention, and nothing else

Steps and floor alternate, so that all see the same machine; nobody computes while another does.

    python benchmarks/training/grpo_step.py                          # Rillflow and its floor
    python -m venv .trl && .trl/bin/pip install trl         # TRL in an environment of its own
    python benchmarks/training/grpo_step.py --trl .trl/bin/python --write benchmarks/results/grpo_step.md
    python benchmarks/training/grpo_step.py --device cuda --shape 0.5b --dtypes bfloat16 --trl .trl/bin/python
    .trl/bin/pip install peft                               # LoRA in both, beside all linear layers
    python benchmarks/training/grpo_step.py --adapter 16 --trl .trl/bin/python

Setting: Qwen2 with 3.3 million parameters (hidden 256, 4 layers, 4 heads, 2 key/value heads, vocabulary
256), 8 prompts of 32 tokens x 8 samples of up to 64 tokens, temperature 1, no divergence, one optimiser step
a batch; in float32, then in bfloat16 (ours with float32 masters, TRL's with its weights in bfloat16 alone). A
row ends at token 1, which a random model draws once in 256 times. The reward is the number of even tokens, so
rewards of a group differ for every vocabulary: Rillflow leaves out rows without an advantage.

The floor is what the matrix products and the attention of a step take alone, at the step's own lengths: every
token drawn by rows side by side, then forward and backward over all of them, each prompt once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SMALLEST = ["--shape tiny --steps 1 --threads 1 --dtypes float32 bfloat16"]

STOP, GROUPS, SAMPLES = 1, 8, 8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and the rows of a step."""

    vocabulary: int
    """Its tokens."""
    hidden: int
    """Width."""
    inner: int
    """Width of the feed-forward."""
    layers: int
    """Layers."""
    heads: int
    """Attention heads."""
    kv_heads: int
    """Heads of keys and values."""
    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Tokens of an answer at most."""


SHAPES = {
    "tiny": Shape(vocabulary=64, hidden=32, inner=64, layers=1, heads=2, kv_heads=1, prompt=4, answer=8),
    "3.3m": Shape(vocabulary=256, hidden=256, inner=768, layers=4, heads=4, kv_heads=2, prompt=32, answer=64),
    "0.5b": Shape(
        vocabulary=151_936, hidden=896, inner=4864, layers=24, heads=14, kv_heads=2, prompt=128, answer=512
    ),
    "7b": Shape(
        vocabulary=152_064, hidden=3584, inner=18_944, layers=28, heads=28, kv_heads=4, prompt=128, answer=512
    ),
}
"""The smallest round, the usual setting, and Qwen2.5's shapes."""
RATE, ALPHA = 1e-5, 32.0
MARK = "grpo_step:"
"""Beginning of a line of the child with a step's timing."""
PEER = Path(__file__).parent / "peers" / "trl_grpo_step.py"
"""The child's script."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One step."""

    seconds: float
    """Its whole time."""
    cpu_s: float
    """Processor time of all its threads: it says more than the clock on a busy machine."""
    generate_s: float
    """Of the whole time, generation; 0 where it is not told apart."""
    tokens: float
    """Mean length of an answer."""
    peak: int = 0
    """The most bytes of device memory allocated in it; 0 on a CPU."""


def main() -> None:
    arguments = parsed()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch is imported, here and in the child
    tables = [compared(arguments, dtype) for dtype in arguments.dtypes]
    text = "\n".join([*_head(arguments), *tables])
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text + "\n")


def compared(arguments: argparse.Namespace, dtype: str) -> str:
    """The table of one type: ours, TRL's where it is given, and the floor, in turns."""
    found: dict[str, list[Timing]] = {"Rillflow": [], "TRL GRPOTrainer": [], "floor": []}
    shape = shape_of(arguments)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), shape)
        step, floor = rillflow_step(Path(folder), arguments, dtype)
        with trl_steps(arguments, Path(folder), dtype) as their_step:
            for index in range(arguments.steps + 1):
                found["Rillflow"].append(step(index))
                if their_step is not None:
                    found["TRL GRPOTrainer"].append(their_step())
                found["floor"].append(floor())
                shown = ", ".join(f"{name} {own[-1].seconds:.3f} s" for name, own in found.items() if own)
                print(f"{dtype} step {index}: {shown}", flush=True)
    return _table({name: own[1:] for name, own in found.items() if own}, dtype)


def make_model(folder: Path, shape: Shape) -> None:
    """A model with random weights and a tokeniser whose words are <pad>, </s>, t2 .. t255."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    named = {"<pad>": 0, "</s>": STOP} | {f"t{index}": index for index in range(2, shape.vocabulary)}
    words = Tokenizer(models.WordLevel(named, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)


def shape_of(arguments: argparse.Namespace) -> Shape:
    """The shape, with answers of ``--answer`` tokens at most if that is set."""
    shape = SHAPES[arguments.shape]
    return replace(shape, answer=arguments.answer or shape.answer)


def prompts_of(step: int, shape: Shape) -> list[list[int]]:
    """The token ids of one step's prompts; token 0 and the stop token are left out."""
    numbers = random.Random(step)
    return [[numbers.randrange(2, shape.vocabulary) for _ in range(shape.prompt)] for _ in range(GROUPS)]


def texts_of(prompts: list[list[int]], tokenizer: Any) -> list[str]:
    """The texts that the tokeniser reads as these prompts."""
    texts = [" ".join(f"t{token}" for token in prompt) for prompt in prompts]
    if tokenizer(texts)["input_ids"] != prompts:
        raise SystemExit("the tokeniser reads other prompts than these")
    return texts


def rillflow_step(
    folder: Path, arguments: argparse.Namespace, dtype: str
) -> tuple[Callable[[int], Timing], Callable[[], Timing]]:
    """A function that makes one step of ours, and one that does the floor of the last."""
    import torch

    from rillflow.formulas import group_advantages
    from rillflow.formulas.config import PolicyLossConfig
    from rillflow.records.batch import Batch, row_ids
    from rillflow.records.ragged import Ragged
    from rillflow.records.rollout import completions
    from rillflow.records.row import RowId
    from rillflow.rollout.config import RolloutConfig
    from rillflow.rollout.native.engine import NativeEngine
    from rillflow.training.config import TrainConfig
    from rillflow.training.loss import PolicyLoss
    from rillflow.training.trainer import Trainer

    torch.set_num_threads(arguments.threads)
    shape, device = shape_of(arguments), torch.device(arguments.device)
    module = our_model(folder, arguments, dtype)
    exact = {"ratio_tolerance": 1e-5} if dtype == "float32" else {"gap_tolerance": 0.05}
    lengths: list[int] = []
    config, stop = RolloutConfig(max_tokens=shape.answer), frozenset({STOP})
    engine = NativeEngine(module, config, stop_tokens=stop, seed=0, context=shape.prompt + shape.answer)
    trainer = Trainer(module, TrainConfig(lr=RATE), total_steps=1000)
    loss = PolicyLoss(PolicyLossConfig(), max_tokens=shape.answer)

    def step(index: int) -> Timing:
        prompts = Batch(
            ids=row_ids([RowId(index, prompt, 0) for prompt in range(GROUPS)]),
            fields={
                "tokens": Ragged.from_rows(prompts_of(index, shape)),
                "columns": Ragged.from_text(["{}"] * GROUPS),
            },
        )
        began, cpu = time.perf_counter(), time.process_time()
        rollouts = engine.generate(prompts, SAMPLES)
        wait(device)
        generated = time.perf_counter()
        answers = completions(rollouts)
        rewards = answers.with_values((answers.values % 2 == 0).float()).sums() / shape.answer
        groups, valid = rollouts.ids[:, 1], torch.ones(len(rollouts), dtype=torch.bool)
        advantages = group_advantages(rewards, groups, valid, scale="std")
        trainer.step(trainer.aim(rollouts.with_fields(advantages=advantages), loss, **exact))
        engine.load(index + 1, dict(module.named_parameters()))
        wait(device)
        lengths[:] = answers.lengths.tolist()
        return Timing(
            seconds=time.perf_counter() - began,
            cpu_s=time.process_time() - cpu,
            generate_s=generated - began,
            tokens=float(answers.lengths.double().mean()),
            peak=peak_of(device),
        )

    return step, lambda: floor_of(module, lengths, shape)


def our_model(folder: Path, arguments: argparse.Namespace, dtype: str) -> Any:
    """The model; with a rank, frozen beside a new adapter of each linear layer of its body."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from rillflow.models.adapters import Adapter, attach
    from rillflow.models.attention import ATTENTION, register
    from rillflow.models.config import AdapterConfig

    register()
    how = {"attn_implementation": ATTENTION, "dtype": getattr(torch, dtype)}
    module = AutoModelForCausalLM.from_pretrained(folder, **how).to(torch.device(arguments.device))
    if arguments.adapter:
        attach(module, AdapterConfig(rank=arguments.adapter, alpha=ALPHA))
    for part in module.modules():
        if isinstance(part, Adapter):
            part.to_empty(device=module.device)
            nn.init.kaiming_uniform_(part.down.weight, a=5**0.5)
            nn.init.zeros_(part.up.weight)
    return module


def floor_of(module: Any, lengths: list[int], shape: Shape) -> Timing:
    """The products and the attention of a step whose answers have these lengths."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    config, how = module.config, {"dtype": module.dtype, "device": module.device}
    named = module.named_modules()
    linear = [part for name, part in named if isinstance(part, torch.nn.Linear) and "_adapter." not in name]
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size, layers = config.hidden_size // heads, config.num_hidden_layers
    drawn, longest = sum(lengths), shape.prompt + max(lengths)
    packed = GROUPS * shape.prompt + drawn
    running = [sum(length > step for length in lengths) for step in range(max(lengths))]
    states = {part.in_features: torch.randn(packed, part.in_features, **how) for part in linear}
    slopes = {part.out_features: torch.randn(packed, part.out_features, **how) for part in linear}
    keys = torch.randn(len(lengths) * groups, longest, size, device=module.device)
    rows = torch.randn(3, len(lengths), heads, longest, size, device=module.device).unbind()
    for each in (*states.values(), *rows):
        each.requires_grad_()
    began, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        for step, count in enumerate(running):
            for part in linear:
                part(states[part.in_features][:count])
            seen = keys[: count * groups, : shape.prompt + step + 1]
            for _ in range(layers):
                scores = torch.bmm(keys[: count * groups, : heads // groups], seen.transpose(1, 2))
                torch.bmm(scores, seen)
        for part in linear:
            part(states[part.in_features][: GROUPS * (shape.prompt - 1)])
    wait(module.device)
    generated = time.perf_counter()
    for part in linear:
        count = drawn if part is module.lm_head else packed
        part(states[part.in_features][:count]).backward(slopes[part.out_features][:count])
    for _ in range(layers):
        scaled_dot_product_attention(*rows, is_causal=True).backward(rows[0].detach())
    module.zero_grad()
    wait(module.device)
    return Timing(
        seconds=time.perf_counter() - began,
        cpu_s=time.process_time() - cpu,
        generate_s=generated - began,
        tokens=drawn / len(lengths),
        peak=peak_of(module.device),
    )


def wait(device: Any) -> None:
    """Until a device has done what it was asked for."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_of(device: Any) -> int:
    """The most bytes allocated since the last call; frees cached ones, as two processes share the device."""
    import torch

    if device.type != "cuda":
        return 0
    found = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found


@contextmanager
def trl_steps(
    arguments: argparse.Namespace, folder: Path, dtype: str
) -> Iterator[Callable[[], Timing] | None]:
    """A function that has the child make one step, or None without ``--trl``."""
    if arguments.trl is None:
        yield None
        return
    command = [arguments.trl, str(PEER), "--peer", str(folder), "--steps", str(arguments.steps)]
    command += ["--dtypes", dtype, "--shape", arguments.shape, "--device", arguments.device]
    command += ["--adapter", str(arguments.adapter), "--answer", str(arguments.answer)]
    with (
        (folder / "peer.log").open("w+") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None  # both are pipes
        to_child, from_child = child.stdin, child.stdout

        def step() -> Timing:
            print("go", file=to_child, flush=True)
            for line in from_child:
                if line.startswith(MARK):
                    return Timing(**json.loads(line.removeprefix(MARK)))
            log.seek(0)
            said = "\n".join(log.read().splitlines()[-20:])
            raise SystemExit(f"TRL ended before its last step: {' '.join(command)}\n{said}")

        yield step


def _head(arguments: argparse.Namespace) -> list[str]:
    command = " ".join(["python", *sys.argv])
    return [
        f"# One GRPO step{f', LoRA of rank {arguments.adapter}' if arguments.adapter else ''}",
        "",
        measured_at.line(),
        "",
        f"`{command}`, {_gpu(arguments)}{os.cpu_count()} cores, {arguments.threads} threads, "
        f"{_versions(arguments.trl)}. "
        f"Median and spread of {arguments.steps} steps after the first; the setting is at the script's head.",
    ]


def _gpu(arguments: argparse.Namespace) -> str:
    """Return the name of the GPU, for the page; nothing on a CPU."""
    import torch

    return f"{torch.cuda.get_device_name()}, " if arguments.device == "cuda" else ""


def _table(found: dict[str, list[Timing]], dtype: str) -> str:
    mine = statistics.median(timing.seconds for timing in found["Rillflow"])
    floor = statistics.median(timing.seconds for timing in found["floor"])
    return "\n".join(
        [
            "",
            f"## {dtype}",
            "",
            "| engine | s a step | least .. most | of it generation | CPU s | tokens an answer "
            "| peak GiB on the GPU | ratio |",
            "|---|---|---|---|---|---|---|---|",
            *(_line(name, timings, mine) for name, timings in found.items()),
            "",
            f"Products and attention alone take {floor:.3f} s, {floor / mine:.0%} of Rillflow's step.",
        ]
    )


def _line(name: str, timings: list[Timing], mine: float) -> str:
    seconds = [timing.seconds for timing in timings]
    generating = statistics.median(timing.generate_s for timing in timings)
    cpu = statistics.median(timing.cpu_s for timing in timings)
    tokens = statistics.mean(timing.tokens for timing in timings)
    median, peak = statistics.median(seconds), max(timing.peak for timing in timings)
    return (
        f"| {name} | {median:.3f} | {min(seconds):.3f} .. {max(seconds):.3f} | "
        f"{f'{generating:.3f}' if generating else '-'} | {cpu:.3f} | {tokens:.1f} | "
        f"{f'{peak / 2**30:.1f}' if peak else '-'} | {median / mine:.2f} |"
    )


def _versions(trl: str | None) -> str:
    import torch
    import transformers

    names = {"Python": platform.python_version(), "torch": torch.__version__}
    names["transformers"] = transformers.__version__
    found = ", ".join(f"{name} {version}" for name, version in names.items())
    if trl is None:
        return found
    script = "import trl, torch; print(f'TRL {trl.__version__} with torch {torch.__version__}')"
    shown = subprocess.run(
        [trl, "-c", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return f"{found}; {shown[-1]}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One GRPO step against TRL's.")
    parser.add_argument("--trl", help="a Python interpreter that has trl; without it Rillflow runs alone")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--shape", default="3.3m", choices=SHAPES, help="of the model and the rows (3.3m)")
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="where both sides compute (cpu)"
    )
    parser.add_argument("--steps", type=int, default=7, help="steps after the first")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each side")
    parser.add_argument("--adapter", type=int, default=0, help="LoRA of this rank in both (0: all weights)")
    parser.add_argument("--answer", type=int, default=0, help="tokens of an answer at most (the shape's)")
    parser.add_argument("--write", help="file for the table")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

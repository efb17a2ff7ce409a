"""Tail cutting with oversampled prompts: the same rows trained with and without it, at log-normal lengths.

    without ─ 16 prompts x 4 per step, all of them sampled to their ends ──────┐
    with    ─ 18 or 20 prompts begin; 16 train, the rest in a later step ──────┴─> seconds, passes, tokens

    python benchmarks/streaming/tail.py --write benchmarks/results/tail.md
    python benchmarks/streaming/tail.py --shares 1 1.25 --steps 5 --pass-ms 0       # a quick check

Whole runs of GRPO through the code of `rillflow run`, without running ahead, on the native engine. Qwen2 with
random weights (hidden 128, 4 layers). A row's length depends only on its id: 48 x exp(z), at most 1,024,
where z is normal and half of its variance belongs to the prompt. Every run trains the same rows and therefore
the same tokens.

The cost of a forward pass decides the gain. On a CPU, a pass costs what its rows cost. On a device that few
rows do not fill, a pass takes as long for few rows as for many. So there are two tables: passes as they are
here, and passes that sleep until --pass-ms are over.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from math import exp, sqrt
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.records.batch import Batch
from rillflow.records.rollout import Rollout, rollout_batch, starts
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import engine_class
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs.reader import read_metrics, read_rollouts, read_spans

SMALLEST = ["--steps 1 --shares 1 1.25 --pass-ms 0 --shorter 16"]

NAMES = (
    *("run/step_seconds/mean", "rollout/length/max", "rollout/tokens/sum"),
    *("tail/passes/sum", "tail/wasted_tokens/sum"),
)
"""Metrics of a step that are summed."""
PASS_MS = "TAIL_PASS_MS"
"""Environment variable with the least milliseconds of a pass."""
SHORTER = "TAIL_SHORTER"
"""Environment variable with the divisor of every row's length."""
PROMPTS, SAMPLES, MEDIAN, SIGMA, LONGEST = 16, 4, 48, 1.0, 1024
RECIPE = """
[run]
threads = 1
checkpoint_minutes = 0
[task]
source = "arithmetic"
digits = 2
size = 4000
held_out = 10
[policy]
model.new = { hidden = 128, layers = 4, heads = 4, kv_heads = 2, context = 1040, alphabet = "0123456789+-*=" }
tokens_per_micro_batch = 4096
[rollout]
engine = "tail:GivenLengths"
max_tokens = 1024
max_rows = 128
[evaluate]
problems = 0
[algorithm]
name = "grpo"
steps = STEPS
prompts_per_step = PROMPTS
samples_per_prompt = SAMPLES
loss.correction = "none"
[reward]
function = "digits.py:reward"
"""
REWARD = """
def reward(completions, **columns):
    return [sum(letter < "5" for letter in text) / (1 + len(text)) for text in completions]
"""
"""An arbitrary score."""


def length(row: RowId) -> int:
    """Return the tokens of a row."""
    own, prompt = (Random(text).gauss(0, 1) for text in (str(row), f"{row.epoch} {row.prompt}"))
    drawn = min(LONGEST, MEDIAN * exp(SIGMA * (own + prompt) / sqrt(2)))
    return max(1, round(drawn / float(os.environ[SHORTER])))


class GivenLengths(NativeEngine):
    """The native engine with given row lengths."""

    can: ClassVar = NativeEngine.can
    computed_s: ClassVar = 0.0
    """CPU seconds of all passes."""

    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **{**how, "stop_tokens": frozenset(), "stops": None})
        self._config: RolloutConfig = given[1]

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """See Engine."""
        super().add(
            rollout, (sampling or self._config).model_copy(update={"max_tokens": length(rollout.row)})
        )

    def step(self) -> list[Rollout]:
        """See Engine."""
        began, computed, ended = time.monotonic(), time.thread_time(), super().step()
        GivenLengths.computed_s += time.thread_time() - computed
        time.sleep(max(0.0, began + float(os.environ[PASS_MS]) / 1000 - time.monotonic()))
        return ended

    def generate(self, prompts: Batch, samples: int = 1, sampling: SamplingConfig | None = None) -> Batch:
        """See Engine."""
        begun, found = starts(prompts, samples), dict[RowId, Rollout]()
        for each in begun:
            self.add(each, sampling)
        while self.has_work:
            found |= {each.row: each for each in self.step()}
        return rollout_batch([found[each.row] for each in begun])


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results of a run."""

    seconds: float
    """Seconds of all steps."""
    sampling_s: float
    """Seconds in which rows were sampled."""
    processor_s: float
    """CPU seconds of the passes, which other work on the machine changes less."""
    passes: int
    """Passes until the last trained row has ended, summed over all steps."""
    tokens: int
    """Trained tokens."""
    wasted: int
    """Sampled tokens that no step trains."""
    rows: frozenset[RowId]
    """Ids of the trained rows."""


def measured(folder: Path, share: float, steps: int) -> Measured:
    """Run with ``share`` times as many prompts begun as trained."""
    recipe = folder / "run.toml"
    recipe.write_text(
        RECIPE.replace("STEPS", str(steps)).replace("PROMPTS", str(PROMPTS)).replace("SAMPLES", str(SAMPLES))
    )
    (folder / "digits.py").write_text(REWARD)
    run = folder / f"run-{share:g}"
    shutil.rmtree(run, ignore_errors=True)
    cut = [f'schedule={{mode="tail_batching",oversample_prompts={share}}}'] if share > 1 else []
    loaded = load_recipe(recipe, [f"run.dir='{run}'", *cut])
    engine = engine_class("tail:GivenLengths")
    before = engine.computed_s  # type: ignore[attr-defined]
    launch(loaded, quiet=True)
    made = [each.metrics for each in read_metrics(run)]
    total = {name: sum(each[name].value for each in made if name in each) for name in NAMES}
    sampled = [span for span in read_spans(run) if span.stage == "policy.generate"]
    found = [row.row for step in range(1, steps + 1) for row in read_rollouts(run, step)]
    return Measured(
        seconds=total["run/step_seconds/mean"],
        sampling_s=sum(rank.duration_s for span in sampled for rank in span.ranks),
        processor_s=engine.computed_s - before,  # type: ignore[attr-defined]
        passes=int(total["tail/passes/sum" if cut else "rollout/length/max"]),
        tokens=int(total["rollout/tokens/sum"]),
        wasted=int(total["tail/wasted_tokens/sum"]),
        rows=frozenset(found),
    )


def table(found: dict[float, list[Measured]]) -> list[str]:
    """Return a line for each share; seconds are medians of the rounds."""
    lines = [
        "| prompts begun for each trained | s, all steps | times as fast | s sampling | times as fast "
        "| processor s sampling | times as fast | passes | times fewer | tokens sampled in vain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    plain = found[1.0]

    def middle(runs: list[Measured], name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in runs))

    for share, runs in found.items():
        one = runs[0]
        assert one.rows == plain[0].rows and one.tokens == plain[0].tokens, "every run trains the same rows"
        cells = [f"{share:g}"]
        for name in ("seconds", "sampling_s", "processor_s"):
            cells += [f"{middle(runs, name):.1f}", f"{middle(plain, name) / middle(runs, name):.2f}"]
        cells += [f"{one.passes:,}", f"{plain[0].passes / one.passes:.2f}", f"{one.wasted / one.tokens:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, help="runs of each, in turn")
    parser.add_argument("--steps", type=int, default=5, help="of each run")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 1.125, 1.25], help="the first is 1")
    parser.add_argument("--pass-ms", type=float, nargs="+", default=[0.0, 30.0], help="a table for each")
    parser.add_argument("--shorter", type=float, default=1.0, help="divide every row's length by this")
    parser.add_argument("--write", type=Path, help="a page of results")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ[SHORTER] = str(arguments.shorter)
    lines = [
        "# The tail cut",
        "",
        "What is measured, and how: the head of `benchmarks/streaming/tail.py`.",
        "",
        f"- command: `python {' '.join(['benchmarks/streaming/tail.py', *sys.argv[1:]])}`",
        f"- machine: {os.cpu_count()} cores, 1 thread, {platform.machine()}",
        f"- versions: Python {platform.python_version()}, torch {version('torch')}, "
        f"transformers {version('transformers')}",
        f"- {arguments.steps} steps of {PROMPTS} prompts x {SAMPLES}; rounds: {arguments.rounds}, medians; "
        "passes and tokens are the same in each",
        "- by the clock a machine with other work is measured; processor seconds and passes say more",
    ]
    for pass_ms in arguments.pass_ms:
        os.environ[PASS_MS] = str(pass_ms)
        found: dict[float, list[Measured]] = {share: [] for share in arguments.shares}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(arguments.rounds):
                for share, runs in found.items():
                    runs.append(measured(Path(folder), share, arguments.steps))
                    print(f"{share:g}: {runs[-1].seconds:.1f} s, {runs[-1].passes:,} passes", flush=True)
        title = f"A pass takes {pass_ms:g} ms" if pass_ms else "A pass takes what its rows take"
        lines += ["", f"## {title}", "", f"{found[1.0][0].tokens:,} tokens are trained.", "", *table(found)]
    print("\n".join(lines))
    if arguments.write:
        arguments.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

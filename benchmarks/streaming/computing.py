"""Stages that compute: a model of 100 million parameters, sampler and trainer on a pool of one core each.

The reward takes a millisecond. It has a third pool, because on the trainer's rank it would wait for updates.

calibrate   two runs without running ahead, so that one stage works at a time: one with half and one with
              all of the rows at once. They give the seconds of a decode pass, of a row in it, of the update,
              the reward, a publish, and of no stage. One run is repeated next to a second process that makes
              the same run, because the processes share memory and caches. The ratio is each stage's slowdown.
predict     the simulator gets the recipe's graph, placement, bound and parts, the rows' lengths, and these
              seconds: measured alone for the rungs with bound 0, next to another process for those ahead
run         through the code of `rillflow run`

Row lengths are given: log-normal, the same in every step. The model computes every token; none ends a row.
"""

from __future__ import annotations

import heapq
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from as_run import PUBLISH, endless, simulate_as_run, worked_s
from rungs import STAGES, UNDER_WAY, Rung, climb, run_of, rungs_of, say, step_seconds, told

from rillflow.app.recipe import load_recipe
from rillflow.records.batch import Batch
from rillflow.records.rollout import Rollout, rollout_batch, starts
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs.reader import read_spans
from rillflow_planner.recipe_problem import state_problem
from rillflow_planner.workload import Lengths

PROMPTS, SAMPLES, MINIBATCHES, SIGMA = 8, 4, 4, 0.6
"""Rows of a step; its optimiser steps, which are also its parts; and the log-normal sigma of row lengths."""
RUNGS = ("in sequence", "by parts", "1 ahead", "1 ahead, by parts", "4 ahead, ready first")
PROGRAM = "import sys; from rillflow.cli.main import main; sys.exit(main(sys.argv[1:]))"
RECIPE = """
[run]
threads = 1
checkpoint_minutes = 0
[task]
source = "arithmetic"
digits = 2
operators = "+"
size = PROMPTS
held_out = 0
[policy]
lr = 1e-6
[policy.model.new]
hidden = HIDDEN
layers = LAYERS
heads = 12
kv_heads = 4
context = 128
alphabet = "0123456789+="
[rollout]
engine = "computing:GivenLengths"
max_tokens = LONGEST
max_rows = AT_ONCE
[evaluate]
problems = 0
[algorithm]
name = "grpo"
steps = 1
prompts_per_step = PROMPTS
samples_per_prompt = SAMPLES
minibatches = MINIBATCHES
shuffle = false
old_logprobs = "sampler"
[reward]
function = "reward.py:reward"
[placement]
backend = "BACKEND"
pools = { main = 1, answers = 1, scores = 1 }
roles = { sampler = "answers", reward = "scores" }
"""
REWARD = """
def reward(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / (len(text) + 1) for text in completions]
"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the recipe."""

    hidden: int
    layers: int
    longest: int
    """Tokens of the longest row."""
    at_once: int
    """Rows that the sampler runs at once."""

    @property
    def parameters(self) -> int:
        """Parameters of the decoder's layers, without the embeddings of 15 tokens."""
        inner, head = 3 * self.hidden, self.hidden // 12
        return self.layers * (2 * self.hidden**2 + 2 * self.hidden * 4 * head + 3 * self.hidden * inner)


SIZES = {
    "computing": Size(hidden=768, layers=15, longest=32, at_once=4),
    "computing-tiny": Size(hidden=48, layers=1, longest=40, at_once=8),
}


def lengths_of(longest: int) -> tuple[int, ...]:
    """Return the tokens of each row of a step, in order."""
    drawn = [Random(row).lognormvariate(0, SIGMA) for row in range(PROMPTS * SAMPLES)]
    return tuple(max(1, round(longest * each / max(drawn))) for each in drawn)


class GivenLengths(NativeEngine):
    """The native engine with given row lengths, in the order in which rows begin, and without stop tokens."""

    can: ClassVar = NativeEngine.can

    def __init__(self, *given: Any, stop_tokens: frozenset[int], **how: Any) -> None:
        super().__init__(*given, stop_tokens=frozenset(), **how)
        del stop_tokens
        self._sampling: SamplingConfig = given[1]
        self._given = dict[RowId, int]()

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """See Engine."""
        chosen = sampling or self._sampling
        lengths = lengths_of(chosen.max_tokens)
        length = self._given.setdefault(rollout.row, lengths[len(self._given) % len(lengths)])
        super().add(rollout, chosen.model_copy(update={"max_tokens": length}))

    def generate_parts(
        self,
        parts: Sequence[Batch],
        samples: int = 1,
        sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    ) -> Iterator[Batch]:
        """See Engine."""
        assert not isinstance(sampling, Sequence), "every row has the same settings"
        begun = [starts(part, samples) for part in parts]
        for each in (each for rows in begun for each in rows):
            self.add(each, sampling)
        ended = dict[RowId, Rollout]()
        for rows in begun:
            while any(each.row not in ended for each in rows):
                ended |= {each.row: each for each in self.step()}
            yield rollout_batch([ended.pop(each.row) for each in rows])


def written(folder: Path, size: Size, backend: str) -> Path:
    """Write the recipe and its reward; return the recipe's path."""
    recipe, text = folder / "computing.toml", RECIPE
    given = {
        "PROMPTS": PROMPTS,
        "SAMPLES": SAMPLES,
        "MINIBATCHES": MINIBATCHES,
        "HIDDEN": size.hidden,
        "LAYERS": size.layers,
        "LONGEST": size.longest,
        "AT_ONCE": size.at_once,
        "BACKEND": backend,
    }
    for name, value in given.items():
        text = text.replace(name, str(value))
    recipe.write_text(text)
    (folder / "reward.py").write_text(REWARD)
    return recipe


def passes(lengths: Sequence[int], at_once: int) -> int:
    """Return the number of passes until all rows have ended, if each ended row makes room for the next."""
    slots = [0] * at_once
    for length in lengths:
        heapq.heappush(slots, heapq.heappop(slots) + length)
    return max(slots)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Seconds of single stages."""

    pass_s: float
    """Seconds of one pass of the sampler, at any batch size."""
    row_s: float
    """Additional seconds of a pass for each row."""
    stages_s: Mapping[str, float]
    """Seconds of each other stage of a step."""
    rest_s: float
    """Seconds of a step that belong to no stage."""

    def beside(self, other: Mapping[str, float], alone: Mapping[str, float]) -> Calibration:
        """Return this calibration scaled by the slowdown of each stage next to another process."""
        longer = {name: other[name] / seconds for name, seconds in alone.items() if seconds}
        return Calibration(
            pass_s=self.pass_s * longer[STAGES[0]],
            row_s=self.row_s * longer[STAGES[0]],
            stages_s={name: spent * longer.get(name, 1.0) for name, spent in self.stages_s.items()},
            rest_s=self.rest_s,
        )


def calibrated(recipe: Path, folder: Path, size: Size, steps: int) -> dict[str, Calibration]:
    """Measure single stages, alone and next to another process."""
    lengths, every, found = lengths_of(size.longest), UNDER_WAY + steps, dict[int, dict[str, float]]()
    for at_once in (size.at_once // 2, size.at_once):
        settings = (f"rollout.max_rows={at_once}", f"algorithm.steps={every}")
        run = run_of(recipe, folder / f"{at_once}-at-once", *settings)
        found[at_once] = stages_of(run)
        rest_s = step_seconds(run, UNDER_WAY) - sum(found[at_once].values())
        say(f"{at_once} rows at once, in step: {told(found[at_once])}, no stage {rest_s:.3f} s")
    few, many = (found[at_once][STAGES[0]] for at_once in found)
    count = [passes(lengths, at_once) for at_once in found]
    pass_s = min(max(0.0, (few - many) / (count[0] - count[1])), many / count[1])
    alone = Calibration(
        pass_s=pass_s,
        row_s=(many - pass_s * count[1]) / sum(lengths),
        stages_s={name: spent for name, spent in found[size.at_once].items() if name != STAGES[0]},
        rest_s=max(0.0, rest_s),
    )
    say(f"a pass takes {alone.pass_s * 1e3:.1f} ms and {alone.row_s * 1e3:.2f} ms for each row")
    command = [sys.executable, "-c", PROGRAM, "run", str(recipe), "--dir", str(folder / "neighbour")]
    neighbour = subprocess.Popen(
        [*command, "--set", "algorithm.steps=100000"],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # it imports the engine by name
    )
    try:
        while not (folder / "neighbour" / "metrics.jsonl").exists():
            assert neighbour.poll() is None, "the neighbour has ended"
            time.sleep(0.2)
        run = run_of(recipe, folder / "beside", f"algorithm.steps={every}")
    finally:
        neighbour.kill()
        neighbour.wait()
    say(f"beside another process: {told(stages_of(run))}")
    return {"alone": alone, "beside": alone.beside(stages_of(run), found[size.at_once])}


def stages_of(run: Path) -> dict[str, float]:
    """Return mean seconds of the stages that the simulator needs, without the first steps of the run."""
    spans = [span for span in read_spans(run) if span.step > UNDER_WAY]
    found = worked_s(spans, len({span.step for span in spans}))
    return {name: found[name] for name in (*STAGES, PUBLISH)}


def simulated(recipe: Path, known: Calibration, size: Size, rung: Rung) -> list[float]:
    """Simulate a rung and return its seconds per step."""
    loaded = load_recipe(recipe, rung.settings)
    paced = {"decode_launch_s": known.pass_s / size.layers, "decode_row_s": known.row_s}
    problem = state_problem(loaded, endless(3, step_s=known.rest_s, **paced)).problem
    lengths = lengths_of(size.longest)
    given = Lengths(kind="measured", limit=max(lengths), values=tuple(sorted(lengths)), in_order=lengths)
    problem = replace(problem, workload=replace(problem.workload, response=given))
    phase = loaded.phases[-1]
    return list(simulate_as_run(loaded, phase, problem, known.stages_s, steps=rung.steps).step_s)


def computing_ladder(folder: Path, size: Size, names: Sequence[str], counted: int, backend: str) -> list[str]:
    """Calibrate, predict every rung and run it; return lines of the page."""
    recipe = written(folder, size, backend)
    rungs = rungs_of([name for name in RUNGS if name in names], MINIBATCHES, counted)
    known = calibrated(recipe, folder, size, counted)
    table = climb(
        rungs,
        lambda rung: simulated(recipe, known["beside" if rung.bound else "alone"], size, rung),
        lambda rung: run_of(recipe, folder / rung.name, *rung.settings, f"algorithm.steps={rung.steps}"),
    )
    lengths = lengths_of(size.longest)
    return [
        f"A model of {size.parameters / 1e6:.0f} million parameters in float32, backend {backend}; sampler "
        f"and trainer on a pool of one rank and one thread each (the reward, a millisecond, on a third). "
        f"A step: {PROMPTS} prompts x {SAMPLES} rows, "
        f"{min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, {size.at_once} rows at once, "
        f"{MINIBATCHES} minibatches, {MINIBATCHES} parts. {counted} steps or more are counted.",
        "",
        *(
            f"Calibrated {name}: a pass of the sampler {each.pass_s * 1e3:.1f} ms and "
            f"{each.row_s * 1e3:.2f} ms for each row; {told(each.stages_s)}; no stage {each.rest_s:.3f} s."
            for name, each in known.items()
        ),
        "",
        *table,
    ]

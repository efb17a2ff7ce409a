"""Environments: what they cost beside the model, in a game and at mixed speeds.

    game   guess-the-number, whole runs ── as a class (examples/guess.py) ──┐ seconds in the model's passes,
                                        └─ as an agent with openai's client ┴ in updates, and outside both
                                           (one for each row, or on one shared HTTP client)
    mixed  turns of rows ─┬─ with environments of 1 ms and of some 100 ms ──┐ seconds without a pass; seconds
                          └─ the same lengths without environments ─────────┴ beside each other

    python benchmarks/services/environments.py --write benchmarks/results/environments.md
    python benchmarks/services/environments.py game --steps 3 --forms class

`game` runs examples/guess.toml through the code of `rillflow run`. Time in the model is the time inside the
engine's passes and the policy's updates; everything else of a step is outside: environments or agents, waits,
encoding, rewards. `mixed` samples rows with the native engine, a Qwen2 with random weights (hidden 256, 4
layers). A turn ends at one of the stop tokens, so its length is geometric. The rows without environments have
the same numbers of sampled tokens, each as one turn. Idle is the time in which rows wait for environments and
no pass runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

import rillflow
from rillflow.controller.open_step import OpenStep
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Stops
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs.environment import usable_cores
from rillflow.tasks.encoded import Encoder
from rillflow.training.trainer import Trainer
from rillflow_parts.environments.config import EnvironmentConfig
from rillflow_parts.environments.engine import EnvironmentEngine
from rillflow_parts.environments.source import parse_environment

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SMALLEST = ["game --steps 1 --forms class", "mixed --rows 12 --slots 4 --rounds 1 --slow-ms 5 10 --hidden 32"]

ROOT = Path(__file__).parents[2]
FORMS = ("class", "agent", "agent-shared")
ALPHABET = "0123456789+-*=?abcdefghijklmno:;"
STOPS = "=:"
MIXED = """
import time


class Mixed:
    def reset(self, wait_s):
        self.wait_s, self.turns = wait_s, 0

    def step(self, text):
        self.turns += 1
        time.sleep(self.wait_s)
        return "+1+", float(len(text)), self.turns == {turns}, False, {{}}
"""
AGENT = """
from openai import DefaultHttpxClient, OpenAI

SHARED = {shared}
HTTP = DefaultHttpxClient() if SHARED else None


def solve(prompt, secret, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    text = prompt
    for _ in range(4):
        said = client.completions.create(model="policy", prompt=text, max_tokens=1).choices[0].text
        if said == str(secret):
            return 1.0
        if not said.isdecimal():
            return 0.0
        text += said + (">" if secret > int(said) else "<")
    return 0.0


def right(returned, **columns):
    return [float(each or 0.0) for each in returned]
"""


@dataclass(kw_only=True)
class Timed:
    """Time inside the calls of a method."""

    clock_s: float = 0.0
    """Seconds of the clock."""
    processor_s: float = 0.0
    """Processor seconds of this process."""
    calls: int = 0
    """Number of calls."""


@contextmanager
def timed(owner: type, name: str) -> Iterator[Timed]:
    """Time every call of a method."""
    found, inner = Timed(), vars(owner)[name]

    def method(*args: Any, **more: Any) -> Any:
        clock, processor = time.perf_counter(), time.process_time()
        try:
            return inner(*args, **more)
        finally:
            found.clock_s += time.perf_counter() - clock
            found.processor_s += time.process_time() - processor
            found.calls += 1

    setattr(owner, name, method)
    try:
        yield found
    finally:
        setattr(owner, name, inner)


# ---- the game


@dataclass(frozen=True, kw_only=True)
class Game:
    """One run of the game."""

    form: str
    """Class or agent."""
    steps: int
    """Steps of the run."""
    first: float
    """Mean reward of the first step."""
    last: float
    """Mean reward of the last step."""
    step_s: float
    """Median seconds of a step."""
    passes: Timed
    """The engine's passes."""
    updates: Timed
    """The policy's updates."""
    whole: Timed
    """Opening the steps: generating, scoring, updating and everything between."""

    @property
    def outside(self) -> float:
        """Share of the steps' time outside the model."""
        return 1 - (self.passes.clock_s + self.updates.clock_s) / self.whole.clock_s

    @property
    def outside_processor(self) -> float:
        """Share of this process's processor time outside the model."""
        return 1 - (self.passes.processor_s + self.updates.processor_s) / self.whole.processor_s


def play(form: str, steps: int, threads: int) -> Game:
    """Run the game in one form."""
    settings: dict[str, Any] = {"algorithm.steps": steps, "run.threads": threads}
    settings["run.checkpoint_minutes"] = 0
    with tempfile.TemporaryDirectory() as folder:
        if form != "class":
            agent = Path(folder) / "agent.py"
            agent.write_text(AGENT.format(shared=form == "agent-shared"))
            settings |= {"rollout.environment": None, "rollout.agent.function": f"{agent}:solve"}
            settings["reward.function"] = f"{agent}:right"
        with (
            timed(NativeEngine, "step") as passes,
            timed(Trainer, "step") as updates,
            timed(OpenStep, "__init__") as whole,
        ):
            run = rillflow.train(
                ROOT / "examples/guess.toml", settings=settings, dir=Path(folder) / "run", quiet=True
            )
        metrics = run.metrics
        seconds = [each["run/step_seconds/mean"] for each in metrics]
    return Game(
        form=form,
        steps=steps,
        first=metrics[0]["reward/score/mean"],
        last=metrics[-1]["reward/score/mean"],
        step_s=median(seconds),
        passes=passes,
        updates=updates,
        whole=whole,
    )


def game_table(found: list[Game]) -> str:
    """Return the runs as a table."""
    lines = [
        "| form | steps | reward, first to last | s a step | passes a step | in passes | in updates "
        "| outside the model | of the processor time |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in found:
        passes, update = (part.clock_s / each.whole.clock_s for part in (each.passes, each.updates))
        lines.append(
            f"| {each.form} | {each.steps} | {each.first:.2f} to {each.last:.2f} | {each.step_s:.3f} "
            f"| {each.passes.calls / each.steps:.1f} | {passes:.0%} | {update:.0%} | {each.outside:.0%} "
            f"| {each.outside_processor:.0%} |"
        )
    return "\n".join(lines)


# ---- mixed speeds


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """One round at mixed speeds."""

    with_s: float
    """Seconds with environments."""
    idle_s: float
    """Seconds of these without a pass."""
    without_s: float
    """Seconds of the same lengths without environments."""
    tokens: int
    """Sampled tokens."""


def mixed(asked: argparse.Namespace, rows: int) -> Mixed:
    """Sample rows with environments of mixed speed, then the same lengths without."""
    torch.set_num_threads(asked.threads)
    new = NewModel(hidden=asked.hidden, layers=4, heads=4, kv_heads=2, context=512, alphabet=ALPHABET)
    model = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())
    waits = [0.001 if row % 2 else asked.slow_ms[row // 2 % len(asked.slow_ms)] / 1000 for row in range(rows)]
    tokens = model.tokenizer.encode("1+1")
    begun = [
        Rollout.start(RowId(0, row, 0), tokens, json.dumps({"prompt": "1+1", "wait_s": wait}))
        for row, wait in enumerate(waits)
    ]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (Path(folder) / "mixed.py").write_text(MIXED.format(turns=asked.turns))
        environment = EnvironmentConfig(source="mixed.py:Mixed", workers=4, max_turns=asked.turns)
        config = RolloutConfig(max_tokens=400, max_rows=asked.slots, stop=tuple(STOPS))
        engine = _with_environments(model, config, environment, Path(folder), stack)
        _drained(engine, begun[: asked.slots], config)  # starts the processes, warms up
        engine.idle_s = 0.0
        start = time.perf_counter()
        ended = _drained(engine, begun, config)
        with_s, idle_s = time.perf_counter() - start, engine.idle_s
        plain = config.model_copy(update={"stop": ()})
        alone = _engine(model, plain, frozenset())
        lengths = {each.row: sum(each.loss_mask) for each in ended}
        _drained(alone, begun[: asked.slots], plain.model_copy(update={"max_tokens": 32}))
        start = time.perf_counter()
        for each in begun:
            alone.add(each, plain.model_copy(update={"max_tokens": lengths[each.row]}))
        while alone.has_work:
            alone.step()
        without_s = time.perf_counter() - start
    return Mixed(with_s=with_s, idle_s=idle_s, without_s=without_s, tokens=sum(lengths.values()))


def _engine(model: LanguageModel, config: RolloutConfig, stops: frozenset[int]) -> NativeEngine:
    return NativeEngine(model.module, config, stop_tokens=stops, seed=0, context=model.context)


def _with_environments(
    model: LanguageModel,
    config: RolloutConfig,
    environment: EnvironmentConfig,
    base: Path,
    stack: ExitStack,
) -> EnvironmentEngine:
    stops = Stops(config.stop, model.tokenizer)
    return EnvironmentEngine(
        model.module,
        config,
        inner=NativeEngine,
        environment=environment,
        source=parse_environment(environment, base),
        encoder=Encoder(tokenizer=model.tokenizer),
        stack=stack,
        stop_tokens=stops.tokens,
        seed=0,
        context=model.context,
        stops=stops,
    )


def _drained(engine: Any, rows: list[Rollout], sampling: SamplingConfig) -> list[Rollout]:
    for each in rows:
        engine.add(each, sampling)
    ended = []
    while engine.has_work:
        ended += engine.step()
    return ended


def mixed_table(found: list[Mixed], asked: argparse.Namespace, rows: int) -> str:
    """Return the rounds as a table."""
    slow = " to ".join(f"{each:g}" for each in (min(asked.slow_ms), max(asked.slow_ms)))
    lines = [
        f"{rows} rows of {asked.turns} turns in {asked.slots} slots; half of the environments answer "
        f"in 1 ms, half in {slow} ms. The shares are of the time without environments.",
        "",
        "| round | tokens | s with | s without | ratio | idle |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for number, each in enumerate(found, 1):
        lines.append(
            f"| {number} | {each.tokens:,} | {each.with_s:.2f} | {each.without_s:.2f} "
            f"| {each.with_s / each.without_s:.2f} | {each.idle_s / each.without_s:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["all", "game", "mixed"], default="all")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[*FORMS])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--slow-ms", nargs="+", type=float, default=[100.0, 200.0, 300.0])
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    plays_agents = asked.what != "mixed" and set(asked.forms) != {"class"}
    openai = f", openai {version('openai')}" if plays_agents else ""
    parts = [
        "# Environments",
        measured_at.line(),
        "What is measured, and how: the head of `benchmarks/services/environments.py`.",
        f"- command: `python benchmarks/services/environments.py {' '.join(sys.argv[1:])}`\n"
        f"- machine: {usable_cores():g} cores, {asked.threads} thread(s), {platform.machine()}\n"
        f"- versions: Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {version('transformers')}{openai}\n"
        "- by the clock a machine with other work is measured; the shares of processor time say more there",
    ]
    if asked.what != "mixed":
        games = [play(form, asked.steps, asked.threads) for form in asked.forms]
        parts += ["## The game", game_table(games)]
    if asked.what != "game":
        parts.append("## Mixed speeds")
        for rows in asked.rows:
            rounds = [mixed(asked, rows) for _ in range(asked.rounds)]
            parts.append(mixed_table(rounds, asked, rows))
    page = "\n\n".join(parts) + "\n"
    print(page)
    if asked.write is not None:
        asked.write.write_text(page)


if __name__ == "__main__":
    main()

"""A whole PPO step with each part of fusion alone: the last rows gather, both updates run as one stage.

    4 ranks of one pool: PPO's own step on a tiny model ─ decoding steps take their time
                         three more scorers that sleep for every row

    python benchmarks/streaming/fused_step.py --write benchmarks/results/fused_step.md

Whole runs by the command's own path. The seconds of a step are the median of its steps without the first one.
An arm whose settings this version does not have shows a dash.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from gathering_roles import TOKEN_S, Scorer

from rillflow.algorithms import ppo
from rillflow.algorithms.algorithm import Algorithm
from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.controller.flow import Flow
from rillflow.errors import ConfigError
from rillflow.graph.handle import Handle
from rillflow.records.batch import Batch
from rillflow.runs.reader import read_metrics, read_spans

sys.path.append(str(Path(__file__).parents[1]))
from measured_at import below_title, line

SMALLEST = []
SLOW = ["--arms plain gathered --steps 1 --token-ms 0 --row-ms 0 --backend inline"]

SCORERS = ("first_scorer", "second_scorer", "third_scorer")
ROW_S = "FUSED_STEP_ROW_S"
"""The variable of the environment that says how long a scorer takes for a row."""
GATHER = ('schedule={mode="gathering",gather_rows=14}',)
FUSED = ('placement.fused=["policy", "critic"]',)
ARMS: dict[str, Sequence[str]] = {
    "plain": (),
    "gathered": GATHER,
    "fused updates": FUSED,
    "gathered, fused updates": (*GATHER, *FUSED),
}
RECIPE = """
[run]
seed = 3
threads = 1
checkpoint_minutes = 0
[task]
source = "arithmetic"
digits = 2
size = 4000
held_out = 10
[policy]
lr = 1e-3
model.new = { hidden = 32, layers = 4, heads = 4, kv_heads = 4, context = 128, alphabet = "0123456789+-*=" }
[rollout]
engine = "gathering_roles:GivenLengths"
max_tokens = 110
[evaluate]
problems = 0
[algorithm]
name = "sleeping_ppo"
steps = STEPS
prompts_per_step = 64
samples_per_prompt = 1
minibatches = 2
loss.kl = 0.01
[reward]
function = "digits.py:reward"
[placement]
backend = "BACKEND"
pools = { main = 4 }
train_parallel = { main = MESH }
"""
REWARD = """
def reward(completions, **columns):
    return [sum(letter < "5" for letter in text) / (1 + len(text)) for text in completions]
"""
"""A score of nothing in particular."""


class SleepingPPOConfig(ppo.PPOConfig):
    """PPO's settings."""

    name: Literal["sleeping_ppo"]  # type: ignore[assignment]


class ScoredPolicy:
    """The policy, whose rows three more roles score."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    def __getattr__(self, endpoint: str) -> Any:
        return getattr(self._flow.policy, endpoint)

    def generate(self, *given: Any, **how: Any) -> Handle:
        """Sample, then score."""
        rows = self._flow.policy.generate(*given, **how)
        for name in SCORERS:
            getattr(self._flow, name).score(rows, row_s=float(os.environ[ROW_S]))
        return rows


class ScoredFlow:
    """The flow with this policy."""

    def __init__(self, flow: Flow) -> None:
        self._flow, self.policy = flow, ScoredPolicy(flow)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flow, name)


def step(flow: Flow, prompts: Batch, config: Any) -> tuple[Handle, Handle]:
    """Run PPO's own step; three more roles score its rows."""
    scored: Any = ScoredFlow(flow)
    return ppo.step(scored, prompts, config)


ALGORITHM = Algorithm(config=SleepingPPOConfig, step=step, brings=dict.fromkeys(SCORERS, Scorer))


def measured(folder: Path, arm: str, how: argparse.Namespace) -> list[str]:
    """Return the cells of an arm."""
    recipe, run = folder / "run.toml", folder / arm.replace(" ", "-").replace(",", "")
    mesh = "{ dp = 4 }" if how.backend == "inline" else "{ dp = 2, pp = 2 }"
    text = RECIPE.replace("STEPS", str(how.steps)).replace("BACKEND", how.backend).replace("MESH", mesh)
    recipe.write_text(text)
    (folder / "digits.py").write_text(REWARD)
    try:
        loaded = load_recipe(recipe, [f"run.dir='{run}'", *ARMS[arm]], [ALGORITHM])
    except ConfigError as error:
        print(f"{arm}: {error}", flush=True)
        return ["-"] * 4
    launch(loaded, quiet=True)
    made = [each.metrics for each in read_metrics(run)]
    seconds = [each["run/step_seconds/mean"].value for each in made]
    spans = [each for each in read_spans(run) if each.stage == "policy.generate"]
    moved = sum(each["gather/rows/sum"].value for each in made if "gather/rows/sum" in each)
    idle = [each["gather/idle/share"].value for each in made if "gather/idle/share" in each]
    cells = [f"{statistics.median(seconds[1:] or seconds):.2f}"]
    cells.append(f"{statistics.median(each.duration_s for each in spans[1:] or spans):.2f}")
    cells += [f"{moved:.0f}", f"{statistics.mean(idle):.0%}" if idle else "-"]
    print(f"{arm}: {cells[0]} s a step", flush=True)
    return cells


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=5, help="of each run; the first does not count")
    parser.add_argument("--token-ms", type=float, default=30.0, help="a decoding step, at least")
    parser.add_argument("--row-ms", type=float, default=40.0, help="a row of one of three scorers")
    parser.add_argument("--backend", choices=["ray", "inline"], default="ray")
    parser.add_argument("--write", type=Path, help="a page of results")
    how = parser.parse_args()
    os.environ[TOKEN_S], os.environ[ROW_S] = str(how.token_ms / 1000), str(how.row_ms / 1000)
    page = [
        "# A whole PPO step, with each part of fusion alone",
        "",
        "What is measured, and how: the head of `benchmarks/streaming/fused_step.py`.",
        "",
        f"- command: `python {' '.join(['benchmarks/streaming/fused_step.py', *sys.argv[1:]])}`",
        f"- machine: {os.cpu_count()} cores, {platform.machine()}; 4 ranks on {how.backend}; "
        f"torch {version('torch')}",
        f"- 64 rows of 20 tokens, one in eight of 110; {how.token_ms:g} ms a decoding step, "
        f"{how.row_ms:g} ms a row and scorer; {how.steps} steps",
        "",
        "| arm | s a step | s from the first token to the last | rows moved, all steps | idle in the tail |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        page += [f"| {arm} | {' | '.join(measured(Path(folder), arm, how))} |" for arm in how.arms]
    text = below_title("\n".join(page) + "\n", line())
    print(text)
    if how.write:
        how.write.write_text(text)


if __name__ == "__main__":
    main()

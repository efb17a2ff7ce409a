"""Two verifiers environments, unmodified, trained by `rillflow run`: one turn; and a tool over MCP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers")

import rillflow
from rillflow.runs.reader import read_evaluations, read_rollouts

SAYS = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.branches[-1].messages[-1].content)

    @vf.reward(weight=0.5)
    async def polite(self, trace: vf.Trace) -> float:
        return float("I think" in trace.branches[-1].messages[-1].content)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.branches[-1].messages[-1].content))


class SumTaskset(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for a, b in ((17, 25), (3, 4), (20, 5), (8, 9)):
            yield Sum(SumData(prompt=f"{a}+{b}", answer=str(a + b)), self.config.task)


__all__ = ["SumTaskset"]
"""
TOOLS = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        \"\"\"Add two numbers.\"\"\"
        return str(a + b)


class Sum(vf.Task[SumData]):
    @vf.reward
    async def told(self, trace: vf.Trace) -> float:
        messages = trace.branches[-1].messages
        used = any(each.role == "tool" and each.content == self.data.answer for each in messages)
        return float(used and self.data.answer in messages[-1].content)


class SumTaskset(vf.Taskset[Sum, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.SharedToolsetConfig())]

    def load(self):
        for a, b in ((17, 25), (3, 4), (20, 5), (8, 9)):
            yield Sum(SumData(prompt=f"{a}+{b}", answer=str(a + b)), self.config.task)


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    Adder.run()
"""
RECIPE = """
[task]
source = "verifiers:NAME"
held_out = 1
[policy]
lr = 1e-5
model.path = "MODEL"
[rollout]
max_tokens = 96
temperature = 0.2
environment = { source = "verifiers:NAME", workers = 1, timeout_s = 120 }
[evaluate]
problems = 1
[algorithm]
name = "grpo"
steps = 2
prompts_per_step = 3
samples_per_prompt = 4
"""


def trained(name: str, source: str, model: Path, folder: Path) -> Path:
    """Run a recipe with a verifiers environment; return the run directory."""
    (folder / f"{name}.py").write_text(source)
    recipe = folder / "run.toml"
    recipe.write_text(RECIPE.replace("NAME", name).replace("MODEL", str(model)))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "rillflow.cli.main", "run", str(recipe), "--dir", str(folder / "run")]
    done = subprocess.run(
        [*command, "--set=run.threads=1"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def said(row: Any) -> tuple[str, str]:
    """Return the policy's text of a row, and the environment's."""
    own = {*row.sampled}
    pieces = enumerate(row.token_texts)
    parts = [(place in own, piece) for place, piece in pieces]
    return "".join(piece for is_own, piece in parts if is_own), "".join(
        piece for is_own, piece in parts if not is_own
    )


@pytest.mark.timeout(900)
def test_an_environment_of_one_turn(model_directory: Path, tmp_path: Path) -> None:
    run = trained("says_sums", SAYS, model_directory, tmp_path)
    rows = [row for step in (1, 2) for row in read_rollouts(run, step)]
    assert len(rows) == 24 and {row.outcome for row in rows} == {"score"}
    for row in rows:
        policy, environment = said(row)
        assert environment.startswith("<|im_start|>user") and environment.count("<|im_start|>") == 2
        right = row.columns["verifiers_task"]["answer"] in policy
        assert row.reward == right + 0.5 * ("I think" in policy)
        assert row.columns["turns"] == 1 and row.columns["environment_metrics"]["characters"] > 0
    assert max(row.reward for row in rows) == 1.5
    assert read_evaluations(run)[0].count == 1


@pytest.mark.timeout(900)
def test_an_environment_with_a_tool(model_directory: Path, tmp_path: Path) -> None:
    run = trained("sums_with_tool", TOOLS, model_directory, tmp_path)
    rows = [row for step in (1, 2) for row in read_rollouts(run, step)]
    assert len(rows) == 24
    solved = [row for row in rows if row.reward == 1.0]
    assert len(solved) > 12, [(row.outcome, row.message, said(row)) for row in rows]
    for row in solved:
        policy, environment = said(row)
        answer = row.columns["verifiers_task"]["answer"]
        assert '"name": "add"' in policy and f"It is {answer}." in policy
        assert f"<|im_start|>tool\n{answer}<|im_end|>" in environment and "<tool_call>" not in environment
        assert row.columns["turns"] == 2
    for each in rillflow.open_run(run).metrics:
        assert each["mismatch/logprob_gap/max"] < 1e-3, "the trainer sees the tokens as they were sampled"

"""`examples/framework_agent.py`: an openai-agents agent with a tool, trained by `rillflow run` in small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("agents")

import rillflow
from rillflow.runs.reader import read_rollouts

ROOT = Path(__file__).parents[2]
SMALL = ("algorithm.steps=2", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4")


def ran(*words: str) -> None:
    """Run a command of the example's docstring in the repository's copy."""
    said = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.timeout(1200)
def test_an_agent_of_a_framework_is_trained_with_its_tool(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    for name in ("framework_agent.py", "framework_agent_sft.toml", "framework_agent.toml"):
        (tmp_path / "examples" / name).write_text((ROOT / "examples" / name).read_text())
    folder, example = tmp_path / "runs/framework", tmp_path / "examples/framework_agent"
    ran(f"{example}.py", str(folder))
    command = ("-m", "rillflow.cli.main", "run")
    ran(*command, f"{example}_sft.toml", "--dir", str(folder / "sft"))
    small = [f"--set={each}" for each in (*SMALL, "evaluate.problems=4", "rollout.agent.workers=2")]
    ran(*command, f"{example}.toml", "--dir", str(folder / "agent"), *small)
    rows = [row for step in (1, 2) for row in read_rollouts(folder / "agent", step)]
    assert len(rows) == 32 and {row.outcome for row in rows} == {"score"}
    called = [row for row in rows if "".join(row.token_texts).count("<|im_start|>tool\n") == 1]
    assert called, "half of the demonstrations call the tool"
    for row in called:
        own = {*row.sampled}
        inserted = "".join(text for place, text in enumerate(row.token_texts) if place not in own)
        sampled = "".join(row.token_texts[place] for place in row.sampled)
        a, b = map(int, row.prompt.split("+"))
        assert inserted.startswith(
            f"<|im_start|>system\nAdd with the tool.\nTools: add<|im_end|>\n<|im_start|>user\n{a}+{b}"
        )
        assert sampled.count("<tool_call>") >= 1 and sampled.endswith("<|im_end|>")
        assert row.columns["returned"] in sampled
    for each in rillflow.open_run(folder / "agent").metrics:
        assert each["mismatch/logprob_gap/max"] < 1e-3, "no sampled token was tokenised again"
    report = (folder / "agent" / "report.html").read_text()
    assert "Tools: add" in report and "not sampled: from a tool or environment" in report

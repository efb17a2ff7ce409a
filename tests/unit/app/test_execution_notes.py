"""check and run report that a reward or an agent executes text, and the isolation of this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rillflow.cli.main import main
from rillflow.isolation.sandbox import SENTENCES, Level

ROOT = Path(__file__).parents[3]
RUNS_TEXT = "import subprocess\nSTART = subprocess.run\n"

pytestmark = pytest.mark.skipif(
    not Path("/proc/sys/user/max_user_namespaces").is_file()
    or Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0",
    reason="this kernel gives no user namespaces",
)


def recipe_with_an_agent(folder: Path, before: str) -> Path:
    """Return a copy of the calculator whose agent's file begins with some text."""
    pytest.importorskip("uvicorn", reason="the door is the extra `service`")
    shutil.copy(ROOT / "examples" / "agent.toml", folder)
    text = (ROOT / "examples" / "agent.py").read_text()
    (folder / "agent.py").write_text(text.replace("\nimport", f"\n{before}import", 1))
    return folder / "agent.toml"


def noted(capsys: pytest.CaptureFixture[str], beginning: str) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"note: {beginning}")]


@pytest.mark.parametrize(("setting", "named"), [('"auto"', True), ("true", True), ("false", False)])
def test_check_names_the_level_of_an_agent_that_starts_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, named: bool
) -> None:
    recipe = recipe_with_an_agent(tmp_path, RUNS_TEXT)
    chosen = f"--set=rollout.agent.sandbox={setting}"
    assert main(["check", str(recipe), chosen, "--dir", str(tmp_path / "run")]) == 0
    (note,) = noted(capsys, "agent.py:solve runs text or starts processes (agent.py:")
    assert f"rollout.agent.sandbox = {setting}; " in note
    levels = [level for level in Level if note.endswith(f"{level}: {SENTENCES[level]}")]
    assert len(levels) == 1 and (levels != [Level.NONE]) is named, note


def test_check_without_code_says_that_an_agent_is_shut_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with_an_agent(tmp_path, RUNS_TEXT)
    assert main(["check", str(recipe), "--no-code", "--dir", str(tmp_path / "run")]) == 0
    (note,) = noted(capsys, "agent.py:solve runs text or starts processes (agent.py:")
    assert note.endswith("; in a sandbox")


def test_check_without_code_refuses_an_agent_that_runs_text_in_its_own_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with_an_agent(tmp_path, "START = exec\nexec('1')\n")
    assert main(["check", str(recipe), "--no-code", "--dir", str(tmp_path / "run")]) == 2
    assert "executes text in its own process" in "".join(capsys.readouterr())


def test_check_names_the_decision_for_functions_that_need_no_sandbox(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with_an_agent(tmp_path, "")
    assert main(["check", str(recipe), "--dir", str(tmp_path / "run")]) == 0
    notes = noted(capsys, "agent.py:")
    assert [note.split(";")[0].split(" (")[0] for note in notes] == [
        "note: agent.py:solve is not known to be harmless",
        "note: agent.py:right cannot run text or start processes",
    ]
    assert notes[0].endswith("runs without a sandbox; rollout.agent.sandbox = true shuts it in")
    assert notes[1].endswith("runs without a sandbox; reward.sandbox = true shuts it in")

"""What check and run say of an agent: its faults, the isolation of this machine, what only a run can try."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the door is the extra `service`")

from rillflow.app.check import check
from rillflow.cli.main import main
from rillflow.isolation.sandbox import SENTENCES, Level
from rillflow_parts.endpoint.agent_writer import AgentWriter
from rillflow_parts.endpoint.config import AgentConfig
from tests.unit.app.test_check import folder as recipe_folder
from tests.unit.app.test_check import loaded, problems
from tests.unit.cli.test_bad_inputs import Spoil, folder, given, text

__all__ = ["folder", "recipe_folder"]
ROOT = Path(__file__).parents[3]
RUNS_TEXT = "import subprocess\nSTART = subprocess.run\n"
has_namespaces = pytest.mark.skipif(
    not Path("/proc/sys/user/max_user_namespaces").is_file()
    or Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0",
    reason="this kernel gives no user namespaces",
)


def agent(signature: str, before: str = "") -> Spoil:
    return text("agent.py", f"{before}def solve({signature}):\n    return 'x'\n")


SETTING = "rollout.agent.function=agent.py:solve"
CASES: dict[str, tuple[Spoil, str, str]] = {
    "agent wants a column": (
        agent("prompt, base_url, api_kye"),
        SETTING,
        "agent.py:1: the agent solve needs",
    ),
    "agent by position": (
        agent("prompt, /, base_url", before="import os\n\n"),
        SETTING,
        "(agent.py, line 3) takes 'prompt' by position",
    ),
    "agent cannot be imported": (agent("", before="import nothing_here\n"), SETTING, "nothing_here"),
    "agent is no function": (text("agent.py", "solve = 3\n"), SETTING, "is 3 (int), which cannot be called"),
    "agent misspelt": (agent(""), "rollout.agent.function=agent.py:sovle", "did you mean 'solve'?"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_agent_is_refused_in_words(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, settings, words = CASES[case]
    spoil(folder)
    assert main(given("run", settings)) == 2
    said = capsys.readouterr().err
    assert words in said and "error: " in said and "Traceback" not in said


def test_the_sandbox_of_a_run_shows_the_files_that_a_recipe_lists(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def solve(): ...\n")
    (tmp_path / "words.txt").write_text("a")
    config = AgentConfig(function="agent.py:solve", files=("words.txt",))
    assert AgentWriter(config, tmp_path).code.function.files == (tmp_path / "words.txt",)


AGENT = """
async def solve(prompt, **columns):
    return [{"points": 2}, {"points": 1}]

def points(returned, **columns):
    return [float(sum(move["points"] for move in moves)) for moves in returned]
"""


def test_a_reward_of_what_an_agent_returns_is_tried_in_the_run(recipe_folder: Path) -> None:
    (recipe_folder / "agent.py").write_text(AGENT)
    settings = ("rollout.agent.function=agent.py:solve", "reward.function=agent.py:points")
    report = check(loaded(recipe_folder, *settings))
    assert not report.problems
    assert any(
        "agent.py:points failed where the column 'returned' held a text" in each for each in report.notes
    )
    assert "agent.py:points needs a column 'returned'" in problems(recipe_folder, settings[1])


def recipe_with_an_agent(folder: Path, before: str) -> Path:
    """Return a copy of the calculator whose agent's file begins with some text."""
    shutil.copy(ROOT / "examples" / "agent.toml", folder)
    text = (ROOT / "examples" / "agent.py").read_text()
    (folder / "agent.py").write_text(text.replace("\nimport", f"\n{before}import", 1))
    return folder / "agent.toml"


def noted(capsys: pytest.CaptureFixture[str], beginning: str) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"note: {beginning}")]


@has_namespaces
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


@has_namespaces
def test_check_without_code_says_that_an_agent_is_shut_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with_an_agent(tmp_path, RUNS_TEXT)
    assert main(["check", str(recipe), "--no-code", "--dir", str(tmp_path / "run")]) == 0
    (note,) = noted(capsys, "agent.py:solve runs text or starts processes (agent.py:")
    assert note.endswith("; in a sandbox")


@has_namespaces
def test_check_without_code_refuses_an_agent_that_runs_text_in_its_own_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with_an_agent(tmp_path, "START = exec\nexec('1')\n")
    assert main(["check", str(recipe), "--no-code", "--dir", str(tmp_path / "run")]) == 2
    assert "executes text in its own process" in "".join(capsys.readouterr())


@has_namespaces
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

"""``check --no-code`` on hostile model folders: refused with an error, within bounds, and nothing runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.flows.hostile_models import BOUNDED, EVERY_DAY, FOLDERS, template
from tests.unit.cli.test_bad_inputs import REWARD, TOML, rows, set_json, text, write_model, write_rows

RESIDENT_BYTES = 2 * 2**30
"""Limit for the command, and for each child that it waits for."""
OWNED = "open({!r}, 'w')\n"
CASES = [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow, id=name) for name in FOLDERS]
Checked = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def checked() -> Iterator[Checked]:
    """Yield a function that returns exit code and output of ``rillflow check`` and fails above its bounds."""
    command = [sys.executable, "-m", "tests.flows.checking"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        asks, answers = process.stdin, process.stdout
        assert asks is not None and answers is not None

        def check(folder: Path, *words: str) -> tuple[int, str]:
            asks.write(json.dumps([str(folder), ["check", "run.toml", *words]]) + "\n")
            asks.flush()
            code, peak = json.loads(answers.readline())
            assert peak < RESIDENT_BYTES
            return code, (folder / "said").read_text()

        yield check
        asks.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(TOML)
    (tmp_path / "reward.py").write_text(REWARD)
    write_rows(tmp_path, rows())
    write_model(tmp_path)
    return tmp_path


def test_there_are_a_hundred() -> None:
    assert len(FOLDERS) >= 100 and set(EVERY_DAY) <= set(FOLDERS)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_folder_is_refused_within_bounds(name: str, folder: Path, checked: Checked) -> None:
    FOLDERS[name].spoil(folder)
    code, said = checked(folder, "--no-code")
    assert code == 2, f"{code}: {said[-2000:]}"
    assert FOLDERS[name].words in said, said[-2000:]
    assert "error: " in said and "Traceback" not in said
    assert len(said) < 10_000
    assert not (folder / "owned").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_what_a_sound_folder_may_hold_ends_and_runs_nothing(
    name: str, folder: Path, checked: Checked
) -> None:
    BOUNDED[name](folder)
    code, said = checked(folder, "--no-code")
    assert code == 0 and said.endswith("ready, except for code that was not run\n"), said[-2000:]
    assert not (folder / "owned").exists()


def test_no_code_of_a_recipe_or_a_model_runs(folder: Path, checked: Checked) -> None:
    """Each place that could hold code would write its own file; without --no-code the reward does."""
    marks = {name: folder / f"{name}.ran" for name in ("reward", "agent", "engine", "server", "model", "os")}
    code = {name: OWNED.format(str(mark)) for name, mark in marks.items()}
    text("reward.py", f"{code['reward']}{REWARD}")(folder)
    text("agent.py", f"{code['agent']}def solve(**_):\n    return 'x'\n")(folder)
    text("engine.py", f"{code['engine']}class Engine: pass\n")(folder)
    text("server.sh", f"#!/bin/sh\ntouch {marks['server']}\n")(folder)
    (folder / "server.sh").chmod(0o755)
    text("model/owned.py", code["model"])(folder)
    auto = {"AutoConfig": "owned.Config", "AutoModelForCausalLM": "owned.Model"}
    set_json("model/config.json", auto_map=auto)(folder)
    template(f"{{{{ cycler.__init__.__globals__.os.system('touch {marks['os']}') }}}}")(folder)
    others = [
        ["rollout.agent.function=agent.py:solve"],
        ["rollout.engine=engine:Engine"],
        ["rollout.engine=vllm", f"rollout.server={json.dumps(str(folder / 'server.sh'))}"],
    ]
    for settings in ([], *others):
        _, said = checked(folder, *(word for each in settings for word in ("--set", each)), "--no-code")
        assert "not run (--no-code)" in said and "reward: reward.py:brief" in said, said
        assert [name for name, mark in marks.items() if mark.exists()] == []
        write_rows(folder, rows())  # the template once, because transformers renders it
    assert checked(folder, "--set", "reward.sandbox=false")[0] == 0
    assert [name for name, mark in marks.items() if mark.exists()] == ["reward"], "the trap would catch"

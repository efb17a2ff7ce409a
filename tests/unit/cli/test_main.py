"""The command line as a user sees it: words, output, exit codes."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rillflow import __version__
from rillflow.cli.main import COMMANDS, main

RECIPE = """
[policy]
model.new = { hidden = 32, layers = 2, context = 32 }

[rollout]
max_tokens = 8

[algorithm]
name = "grpo"
steps = 3
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RECIPE)
    return str(path)


def ends(*arguments: str) -> int:
    """Return the exit code of a command that argparse ends."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends("--help") == 0
    shown = capsys.readouterr().out
    first_words = [line.split()[0] for line in shown.splitlines() if line.startswith("    ")]
    assert [word for word in first_words if word in COMMANDS] == list(COMMANDS)
    assert "130 interrupted" in shown


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(command, "--help") == 0
    assert "--debug" in capsys.readouterr().out


def test_the_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends("--version") == 0
    assert capsys.readouterr().out == f"rillflow {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["rum"], ["run"], ["check", "a.toml", "b.toml"], ["run", "a.toml", "--fast"]]
)
def test_wrong_words_are_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(*arguments) == 2
    assert "usage: rillflow" in capsys.readouterr().err


def test_check_of_a_good_recipe(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", recipe, "--set", "policy.lr=1e-4", "--dir", "there"]) == 0
    captured = capsys.readouterr()
    assert captured.out.rstrip().endswith("ready")
    assert "policy.lr = 0.0001  (--set)" in captured.out
    assert 'run.dir = "there"  (--set)' in captured.out
    assert captured.err == ""


def test_a_directory_name_is_taken_as_it_is(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", recipe, "--dir", '7 "quoted" \\ = none']) == 0
    assert 'run.dir = "7 \\"quoted\\" \\\\ = none"' in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_wrong_setting_ends_with_2_and_no_traceback(
    command: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, recipe, "--set", "policy.lrr=1"]) == 2
    captured = capsys.readouterr()
    assert "error: policy.lrr = 1" in captured.err
    assert "did you mean 'lr'?" in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_missing_recipe_ends_with_2(command: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "rum.toml"]) == 2
    assert "did you mean 'run.toml'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "run"])
def test_missing_files_are_all_named(command: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        "--set",
        "policy.model.new=none",
        "--set",
        "policy.model.path=./x",
        "--set",
        "reward.function=y.py:z",
    ]
    assert main([command, recipe, *wrong]) == 2
    shown = capsys.readouterr().err
    assert "has 2 problems" in shown
    assert "./x" in shown
    assert "y.py:z" in shown


def test_missing_data_end_with_2(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", recipe, "--set", "task.source=rows.jsonl"]) == 2
    assert "rows.jsonl" in capsys.readouterr().err


def test_debug_shows_the_traceback_of_an_expected_error(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", recipe, "--set", "policy.lrr=1", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_output_may_be_cut_off(recipe: str) -> None:
    """``rillflow check recipe | head -1`` leaves no traceback."""
    command = f'"{sys.executable}" -m rillflow.cli.main check "{recipe}" | head -c 1'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "b"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_a_report_is_written_before_the_error_that_follows_it(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = tmp_path / "both"
    with both.open("a") as out, both.open("a", buffering=1) as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        assert main(["check", recipe, "--set", "reward.function=y.py:z"]) == 2
    text = both.read_text()
    assert 0 < text.index("policy: pool main") < text.index("error: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_a_command_unless_the_process_ignores_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signalled(arguments: argparse.Namespace) -> int:
        assert signal.getsignal(number) is not signal.SIG_DFL, "it would end the tests"
        signal.raise_signal(number)
        return 0

    monkeypatch.setitem(COMMANDS, "check", replace(COMMANDS["check"], run=signalled))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert main(["check", "run.toml"]) == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        assert main(["check", "run.toml"]) == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)

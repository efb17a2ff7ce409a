"""A run continues in its directory under changed settings, and reports which changed and from which step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rillflow.app.plugin_sections import plugin_changes
from rillflow.app.resume import MAY_CHANGE
from rillflow.cli.main import main
from rillflow.runs.reader import read_rollouts
from tests.flows.conftest import REWARD, Tiny

REST = """
steps = 3
minibatches = 2
[task]
source = "prompts.jsonl"
held_out = 2
[warm_start]
steps = 2
prompts_per_step = 4
"""


@pytest.fixture
def tiny(tiny: Tiny) -> Tiny:
    tiny.write(REST)
    tiny.write_rows(12)
    return tiny


def rates(tiny: Tiny) -> list[float]:
    return [line["train/lr/mean"]["mean"] for line in tiny.numbers("run")]


def test_a_finished_run_goes_on_to_more_steps_with_the_bits_of_one_that_was_that_long(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("long", "algorithm.steps=6") == 0
    assert tiny.run("short") == 0
    assert "--set algorithm.steps=6 --dir" in capsys.readouterr().out
    assert tiny.run("short", "algorithm.steps=6") == 0
    said = capsys.readouterr().out
    assert "resuming after step 5" in said
    assert "Changed            from step 6 on, algorithm.steps: 3 -> 6" in said
    tiny.assert_same("long", "short")
    short = tiny.folder / "short"
    assert tiny.steps_kept("short")[-1] == 8
    assert json.loads((short / "finished.json").read_text()) == {"steps": 8}
    assert "from step 6 on, algorithm.steps: 3 -&gt; 6" in (short / "report.html").read_text()
    assert tiny.run("short", "algorithm.steps=6") == 0
    assert "is finished" in capsys.readouterr().out
    assert tiny.run("short", "algorithm.steps=2") == 2
    assert "algorithm.steps is 2, 4 with all phases, but" in capsys.readouterr().err


def test_a_schedule_goes_on_as_that_of_the_longer_run_and_a_rate_changes_from_there_on(tiny: Tiny) -> None:
    linear = "policy.schedule=linear"
    assert tiny.run("run", linear) == 0
    assert tiny.run("run", linear, "algorithm.steps=6") == 0
    # 2 optimiser steps a step: step s begins at share 1 - 2 (s - 1) / total, its mean is half a share later
    expected = [1e-3 * (1 - (2 * step + 0.5) / 6) for step in range(3)]
    expected += [1e-3 * (1 - (2 * step + 0.5) / 12) for step in range(3, 6)]
    assert rates(tiny)[2:] == pytest.approx(expected, rel=1e-6)
    settings = (linear, "algorithm.steps=8", "policy.lr=1e-4", "policy.schedule=constant")
    assert tiny.run("run", *settings[1:]) == 0
    assert rates(tiny)[8:] == pytest.approx([1e-4, 1e-4])
    starts = json.loads((tiny.folder / "run/environment.json").read_text())["starts"]
    assert [[change["key"] for change in start.get("changes", [])] for start in starts] == [
        [],
        ["algorithm.steps"],
        ["policy.lr", "policy.schedule", "algorithm.steps"],
    ]


def test_the_rewards_source_is_kept_and_a_change_of_it_is_named(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("run") == 0
    (tiny.folder / "scores.py").write_text(REWARD.replace("/ 3", "/ 30"))
    capsys.readouterr()
    assert tiny.run("run", "algorithm.steps=4") == 0
    assert re.search(
        r"changed: from step 6 on, sources.reward: '\w{16}' -> '\w{16}'", capsys.readouterr().out
    )
    kept = sorted(path.read_text() for path in (tiny.folder / "run/sources").iterdir())
    assert kept == sorted([REWARD, REWARD.replace("/ 3", "/ 30")])


def test_edited_data_and_other_settings_are_refused(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run("run") == 0
    before = tiny.numbers("run")
    for settings in (["algorithm.samples_per_prompt=4"], ["run.seed=4"], ["policy.model.new.layers=2"]):
        assert tiny.run("run", "algorithm.steps=4", *settings) == 2
        assert settings[0].partition("=")[0] in capsys.readouterr().err
    tiny.write_rows(12, p0="9+9=")
    assert tiny.run("run", "algorithm.steps=4") == 2
    assert "differs from the row that" in capsys.readouterr().err
    assert tiny.numbers("run") == before


def prompts_of(tiny: Tiny, name: str, step: int) -> list[tuple[int, int]]:
    """Return epoch and index of the prompts that a step sampled."""
    return [row.row.group for row in read_rollouts(tiny.folder / name, step) if row.row.sample == 0]


def test_rows_that_were_added_join_at_the_next_epoch_and_change_nothing_before_it(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("grown", "algorithm.steps=2") == 0
    assert tiny.run("left", "algorithm.steps=9") == 0
    before = tiny.numbers("grown")
    tiny.write_rows(15)
    capsys.readouterr()
    assert main(["check", str(tiny.recipe), "--dir", str(tiny.folder / "grown")]) == 0
    assert "a resume changes, from step 5 on, data.rows: 12 -> 15" in capsys.readouterr().out
    assert tiny.run("grown", "algorithm.steps=9") == 0
    assert "changed: from step 5 on, data.rows: 12 -> 15" in capsys.readouterr().out
    assert tiny.numbers("grown")[:4] == before
    # 10 rows to train on and 4 prompts per step: epoch 0 ends within the third step
    grown, left = ([prompts_of(tiny, name, step) for step in range(3, 12)] for name in ("grown", "left"))
    first = [row for step in left for row in step if row[0] == 0]
    assert [row for step in grown for row in step][:10] == first
    held_out = {*range(12)} - {place for _, place in first}
    assert len(held_out) == 2
    second = [place for step in grown for epoch, place in step if epoch == 1]
    assert sorted(second) == sorted({*range(15)} - held_out)
    assert tiny.run("grown", "algorithm.steps=9") == 0
    assert "is finished" in capsys.readouterr().out


def test_a_row_that_changed_or_is_gone_is_named(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.write_rows(2)
    (tiny.folder / "prompts.jsonl").rename(tiny.folder / "judge.jsonl")
    tiny.write_rows(12, p0="5+5=", p1="6+6=")
    apart = "task.held_out_source=judge.jsonl"
    assert tiny.run("run", apart, "algorithm.steps=1") == 0
    capsys.readouterr()
    for count, other, says in (
        (15, {"p3": "9+9="}, 'prompts.jsonl line 4 ("9+9=") differs from the row that'),
        (11, {}, "row 12 of prompts.jsonl is missing"),
    ):
        tiny.write_rows(count, **({"p0": "5+5=", "p1": "6+6="} | other))
        for command in ("run", "check"):
            words = ["--set", apart, "--set", "algorithm.steps=4", "--dir", str(tiny.folder / "run")]
            assert main([command, str(tiny.recipe), *words]) == 2
            assert says in capsys.readouterr().err
    tiny.write_rows(12, p0="5+5=", p1="6+6=")
    with (tiny.folder / "judge.jsonl").open("a") as file:
        file.write('{"prompt": "7+2=", "answer": "9"}\n')
    assert tiny.run("run", apart, "algorithm.steps=4") == 2
    assert 'judge.jsonl line 3 ("7+2=") differs from the row that' in capsys.readouterr().err


def test_the_page_lists_the_settings_that_may_change_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs/design/run_directory.md").read_text()
    table = page.partition("## What may change")[2].partition("\n## ")[0]
    listed = [name for line in table.splitlines() if line.startswith("| `") for name in _names(line)]
    assert {*listed} >= {*MAY_CHANGE} and {*listed} <= {*MAY_CHANGE, *plugin_changes()}


def _names(line: str) -> list[str]:
    return re.findall(r"`([a-z_.]+)`", line.split("|")[1])

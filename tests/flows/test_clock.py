"""A template that reads the clock reads the time of a run's start: after a resume, in a replay, in agents."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rillflow import open_run
from rillflow.app.plugins import service
from rillflow.app.recipe import load_recipe
from rillflow.cli.main import main
from rillflow.errors import ConfigError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from rillflow.models.tokenizer import Chat
from tests.flows.conftest import Tiny

DATED = "{{ strftime_now('%d') }} {% for m in messages %}{{ m['content'] }}{% endfor %}"
REST = """
steps = 4
[task]
source = "rows.jsonl"
held_out = 0
[evaluate]
problems = 0
"""
MODEL = ("policy.model.new=none", "policy.model.path=model")


@pytest.fixture
def dated(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiny]:
    """Yield a recipe whose model's template begins with the day of the month."""
    new = NewModel(hidden=16, layers=1, heads=2, kv_heads=1, context=32, alphabet="0123456789+= ")
    model = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())
    model.tokenizer._library.chat_template = DATED
    save_model(model, tiny.folder / "model")
    tiny.write(REST)
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}]} for n in range(8)]
    (tiny.folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    moved(monkeypatch, "UTC")
    yield tiny
    monkeypatch.undo()
    time.tzset()


def moved(monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    """Move the machine's clock by hours: the far ends of the zones never have one day of the month."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()


def days(tiny: Tiny, name: str) -> set[str]:
    """Return the days in the prompts of the last step."""
    tokens = json.loads((tiny.folder / name / "tokens.json").read_text())["texts"]
    rows = open_run(tiny.folder / name).rollouts()
    return {"".join(tokens[token] for token in row.tokens[:2]) for row in rows}


def test_a_run_keeps_its_time_over_a_resume_and_in_a_replay(
    dated: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    west, east = "UTC+12", "UTC-14"
    moved(monkeypatch, west)
    day = time.strftime("%d")
    assert dated.run("whole", *MODEL) == 0
    assert dated.run("cut", *MODEL, "algorithm.steps=2") == 0
    moved(monkeypatch, east)
    assert time.strftime("%d") != day
    assert dated.run("cut", *MODEL) == 0
    dated.assert_same("whole", "cut")
    assert main(["replay", str(dated.folder / "cut"), "--step", "3"]) == 0
    recorded = json.loads((dated.folder / "cut/config.json").read_text())["task"]["clock"]
    assert recorded[8:10] == day


def test_the_recipe_may_give_a_time(dated: Tiny) -> None:
    for given in ("2031-03-07", "2031-03-07T09:30:00", "2031-03-07 09:30"):
        loaded = load_recipe(dated.recipe, [*MODEL, f"task.clock={given}"])
        assert loaded.recipe.task.moment is not None
        assert loaded.recipe.task.moment.strftime("%d %b %Y") == "07 Mar 2031"
    with pytest.raises(ConfigError, match="it is no time"):
        load_recipe(dated.recipe, [*MODEL, "task.clock=yesterday"])


def test_only_a_template_that_reads_the_clock_gets_a_time(
    dated: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for setting in MODEL for word in ("--set", setting)]
    assert main(["check", str(dated.recipe), *words]) == 0
    assert "task.clock = " in capsys.readouterr().out
    template = dated.folder / "model/chat_template.jinja"
    template.write_text(template.read_text().replace("strftime_now('%d')", "'01'"))
    assert load_recipe(dated.recipe, [*MODEL]).recipe.task.clock is None


def test_a_model_that_is_asked_reads_today(dated: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dated.run("asked", *MODEL, "task.clock=2031-03-07", "algorithm.steps=1") == 0
    assert days(dated, "asked") == {"07"}
    respondent = service("answers", "Run.ask")(dated.folder / "asked")
    prompt = respondent._encoder.tokenizer.rendered(
        Chat(turns=[{"role": "user", "content": "1+1="}]), opens=True
    )
    assert prompt[:2] == time.strftime("%d")

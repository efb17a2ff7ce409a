"""Asking a run: the right checkpoint answers, in the way the run was trained."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rillflow.assembly.ask import Respondent, asks_in_chat
from rillflow.assembly.recipe import Recipe
from rillflow.assembly.trained import model_directory
from rillflow.cli.main import main
from rillflow.config.load import validate
from rillflow.dataflow.checkpoint import save_checkpoint
from rillflow.errors import ConfigError, ModelError, RolloutError, RunDirectoryError
from rillflow.models.checkpoint import save_model
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.observe.run_directory import RunDirectory

NEW = NewModel(hidden=32, layers=2, heads=4, kv_heads=2, context=24, alphabet="0123456789+=")


def saved(model: LanguageModel) -> Callable[[Path], None]:
    return lambda folder: save_model(model, folder / "policy")


def made(seed: int) -> LanguageModel:
    return load_model(ModelConfig(new=NEW), seed=seed, device=torch.device("cpu"), base=Path())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the checkpoints of two different models."""
    path = tmp_path_factory.mktemp("asked") / "run"
    data = {
        "policy": {"model": {"new": NEW.model_dump()}},
        "rollout": {"max_tokens": 6, "stop": ("=",)},
        "algorithm": {"name": "grpo", "steps": 4},
    }
    recipe = validate(Recipe, data, "recipe")
    with RunDirectory.open(path, recipe.model_dump(mode="json")) as directory:
        for step in (2, 4):
            save_checkpoint(directory.checkpoints, step, saved(made(step)), {}, keep=5)
    return path


def test_the_newest_checkpoint_answers(run: Path) -> None:
    assert model_directory(run, "policy") == run / "checkpoints/step-000004/policy"
    assert model_directory(run, "policy", 2) == run / "checkpoints/step-000002/policy"
    newest, older = Respondent(run, temperature=1.0), Respondent(run, step=2, temperature=1.0)
    assert [newest.answer(f"{n}+1") for n in range(9)] != [older.answer(f"{n}+1") for n in range(9)]


def test_a_greedy_answer_is_always_the_same(run: Path) -> None:
    respondent = Respondent(run)
    assert respondent.answer("17+25") == respondent.answer("17+25") == Respondent(run).answer("17+25")


def test_sampled_answers_differ_from_question_to_question(run: Path) -> None:
    respondent = Respondent(run, temperature=5.0, seed=1)
    answers = [respondent.answer("1+1") for _ in range(8)]
    assert len(set(answers)) > 1
    again, another = (Respondent(run, temperature=5.0, seed=seed) for seed in (1, None))
    assert [again.answer("1+1") for _ in range(8)] == answers
    assert [another.answer("1+1") for _ in range(8)] != answers, "who asks again hears something else"


def test_answers_end_where_training_ended_them(run: Path) -> None:
    respondent = Respondent(run, temperature=5.0)
    answers = [respondent.answer("1+1") for _ in range(30)]
    assert max(map(len, answers)) == 6
    assert all("=" not in answer[:-1] for answer in answers), "the stop text of the recipe is the last"
    assert len(Respondent(run, max_tokens=2).answer("1+1")) <= 2


@pytest.mark.parametrize(
    ("options", "kind", "what"),
    [
        ({"step": 3}, RunDirectoryError, "no checkpoint of step 3"),
        ({"temperature": -1.0}, ConfigError, "temperature is -1.0"),
        ({"temperature": float("nan")}, ConfigError, "temperature is nan"),
        ({"max_tokens": 0}, ConfigError, "max_tokens is 0"),
    ],
)
def test_a_bad_option_is_refused_by_value(
    run: Path, options: dict[str, float], kind: type[Exception], what: str
) -> None:
    with pytest.raises(kind, match=what):
        Respondent(run, **options)  # type: ignore[arg-type]


def test_a_prompt_that_cannot_be_answered_says_why(run: Path) -> None:
    respondent = Respondent(run)
    with pytest.raises(ModelError, match="no character 'x'"):
        respondent.answer("x")
    with pytest.raises(RolloutError, match="30 tokens"):
        respondent.answer("1" * 30)


def test_a_run_without_a_checkpoint_says_when_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="has no checkpoint") as caught:
        model_directory(tmp_path, "policy")
    assert "checkpoint_every" in caught.value.fix


@pytest.mark.parametrize(("prompt", "chat"), [("1+1=", False), ([{"role": "user", "content": "1"}], True)])
def test_chat_is_recognised_by_the_run_s_own_prompts(tmp_path: Path, prompt: object, chat: bool) -> None:
    assert asks_in_chat(tmp_path) is False
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step-000001.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    assert asks_in_chat(tmp_path) is chat


def test_the_command_answers_one_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", str(run), "17+25"]) == 0
    assert capsys.readouterr().out == f"{Respondent(run).answer('17+25')}\n"


def test_the_command_answers_every_line_and_a_bad_one_ends_nothing(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1\n\nx\n2+2\n"))
    assert main(["ask", str(run)]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 2
    assert "no character 'x'" in shown.err

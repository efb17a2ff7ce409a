"""rillflow ask: the right checkpoint answers, with the settings of its training."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rillflow.app.sections import Recipe
from rillflow.app.trained import model_directory
from rillflow.cli.main import main
from rillflow.config.load import validate
from rillflow.controller.checkpoint import save_checkpoint
from rillflow.errors import ConfigError, DataError, RolloutError, RunDirectoryError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, save_model
from rillflow.runs.run_directory import RunDirectory
from rillflow.runs.summary import render_text, summarise
from rillflow_parts.answers.ask import Respondent
from tests.unit.written_rollouts import write_rollouts

NEW = NewModel(hidden=32, layers=2, heads=4, kv_heads=2, context=24, alphabet="0123456789+=")


def saved(model: LanguageModel) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: save_model(model, folder / "policy") or {}


def made(seed: int) -> LanguageModel:
    return load_model(ModelConfig(new=NEW), seed=seed, device=torch.device("cpu"), base=Path())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory with the checkpoints of two different models."""
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
    with pytest.raises(DataError, match="no character 'x'"):
        respondent.answer("x")
    with pytest.raises(RolloutError, match="30 tokens"):
        respondent.answer("1" * 30)


def test_a_run_without_a_checkpoint_says_when_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="has no checkpoint") as caught:
        model_directory(tmp_path, "policy")
    assert "checkpoint_every" in caught.value.fix


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


CHAT = NEW.model_copy(update={"alphabet": "0123456789+=-sua:;! \n", "context": 48})
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}{% if loud %}!{% endif %}a:"
)
SYSTEM, USER = {"role": "system", "content": "0 1"}, {"role": "user", "content": "17+25="}
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., str]:
    """Return a function that makes a finished run of a model on prompts, optionally with a chat template."""

    def make(*prompts: object, template: str | None = TEMPLATE, **task: object) -> str:
        def save(folder: Path) -> dict[str, Any]:
            model = load_model(ModelConfig(new=CHAT), seed=3, device=torch.device("cpu"), base=Path())
            with torch.no_grad():
                for name, weight in model.module.named_parameters():
                    if "layers" in name and weight.ndim == 2:
                        weight.mul_(30)  # a fresh model repeats its last token, whatever precedes it
            save_model(model, folder / "policy")
            file = folder / "policy/tokenizer_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
            return {}

        data: dict[str, Any] = {"policy": {"model": {"new": CHAT.model_dump()}}, "task": task}
        data |= {"rollout": {"max_tokens": 12}, "algorithm": {"name": "grpo", "steps": 1}}
        recipe = validate(Recipe, data, "recipe").model_dump(mode="json")
        path = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        with RunDirectory.open(path, recipe) as directory:
            save_checkpoint(directory.checkpoints, 1, save, {}, keep=1)
            write_rollouts(directory.path, 1, [{"prompt": prompt} for prompt in prompts])
            directory.write_json("finished.json", {})
        return str(path)

    return make


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Return a function that runs the command and returns exit code, output and errors."""

    def say(*words: str) -> tuple[int, str, str]:
        code = main(["ask", *words])
        return code, *capsys.readouterr()

    return say


def test_options_may_stand_anywhere(make_run: Callable[..., str], said: Said) -> None:
    run = make_run("1+1=", template=None)
    answered = said(run, "17+25=")
    assert answered[0] == 0 and answered[1].strip()
    assert said(run, "--temperature", "0", "17+25=") == answered
    assert said("--temperature", "0", run, "--max-tokens", "12", "17+25=") == answered
    assert said(run, "--temperature", "0", "--", "-17") == said(run, "--", "-17") != answered
    for words in (["--temprature", "0", "1"], ["--temperature", "0", "-x"], ["1", "--temperature", "0", "2"]):
        with pytest.raises(SystemExit, match="2"):
            said(run, *words)


def test_a_conversation_is_asked_through_the_template(
    make_run: Callable[..., str], said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, chat = make_run(template=None), make_run([USER])
    loud = make_run([USER], template_arguments={"loud": True})
    expected = said(plain, "s:0 1;u:17+25=;a:")
    assert said(chat, "--system", "0 1", "17+25=") == expected
    assert said(chat, "17+25=") == said(plain, "u:17+25=;a:") != expected
    assert said(loud, "17+25=") == said(plain, "u:17+25=;!a:"), "the template has the run's own arguments"
    turns = [SYSTEM, USER]
    for number, text in enumerate((json.dumps(turns, indent=1), "\n".join(map(json.dumps, turns)))):
        file = tmp_path / f"messages-{number}.json"
        file.write_text(text)
        assert said(chat, "--messages", str(file)) == expected
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert said(chat, "--messages", "-") == expected


@pytest.mark.parametrize("words", [["--system", "0 1"], ["--messages", "turns.json"]])
def test_a_model_without_a_template_refuses_conversations_once(
    words: list[str],
    make_run: Callable[..., str],
    said: Said,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error appears once, not for every line."""
    run = make_run("1+1=", template=None)
    (tmp_path / "turns.json").write_text(json.dumps([USER]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n2+2=\n"))
    code, out, error = said(run, *words)
    assert (code, out) == (2, "") and error.count("has no chat template") == 1


def test_rendered_text_is_asked_as_it_was_trained(make_run: Callable[..., str], said: Said) -> None:
    run = make_run("u:1+1=;a:", chat_template_applied=True)
    assert said(run, "1+1=<|end|>u:")[0] == 0, "a special token is one token, not text"
    code, _, error = said(make_run("u:1+1=;a:"), "1+1=<|end|>u:")
    assert code == 2 and "no character" in error


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[{"role": "usr", "content": "1"}]', "message 1 of the prompt has the role"),
        ('{"role": "user", "content": "1"}\n{"role": "assistant", "content": "2"}', "the assistant's"),
        ('[{"role": "user"', "cannot read messages"),
        ("", "the prompt is []"),
    ],
)
def test_messages_that_cannot_be_asked_are_refused(
    make_run: Callable[..., str], said: Said, tmp_path: Path, text: str, what: str
) -> None:
    file = tmp_path / "messages.json"
    file.write_text(text)
    code, _, error = said(make_run(), "--messages", str(file))
    assert code == 2 and what in error and str(file) in error
    code, _, error = said(make_run(), "--messages", str(file), "1+1=")
    assert code == 2 and "PROMPT cannot be combined with --messages" in error
    assert "there.json" in said(make_run(), "--messages", str(tmp_path / "there.json"))[2]


def test_a_system_message_that_training_had_is_missed(
    make_run: Callable[..., str], said: Said, tmp_path: Path
) -> None:
    note = 'system message, "0 1"; this prompt has none: add --system TEXT'
    run = make_run([SYSTEM, USER], [SYSTEM, USER])
    code, _, error = said(run, "1+1=")
    assert code == 0 and error.startswith("note: ") and note in error
    assert said(run, "--system", "1", "1+1=")[2] == ""
    (tmp_path / "messages.json").write_text(json.dumps([USER]))
    assert note in said(run, "--messages", str(tmp_path / "messages.json"))[2]
    assert said(make_run([SYSTEM, USER], [USER]), "1+1=")[2] == ""


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([SYSTEM, USER], ["--system", "0 1", "17+25="]),
        ([{**SYSTEM, "content": "-1"}, {**USER, "content": "-2\n+3="}], ["--system=-1", "--", "-2\n+3="]),
        ([USER], ["17+25="]),
        ("-1 +  1=", ["--", "-1 +  1="]),
        ([USER, {"role": "assistant", "content": "42"}, USER], []),
        ("1" * 2000, []),
        ("1\x1b[2J", []),
    ],
)
def test_the_command_that_a_run_ends_with_works(
    make_run: Callable[..., str],
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
    prompt: object,
    words: list[str],
) -> None:
    run = make_run(prompt)
    shown = render_text(summarise(Path(run))).partition("ask it:")[2].partition("\n  ")[0]
    assert shlex.split(shown) == ["rillflow", "ask", run, *words]
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n"))
    code, _, error = said(*shlex.split(shown)[2:])
    assert (code, error) == (0, "")


def test_a_path_that_is_no_run_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", str(tmp_path / "nowhere"), "hello"]) == 2
    assert "nowhere" in capsys.readouterr().err

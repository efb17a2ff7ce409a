"""Rows are tokenized before anything starts: rows that do not fit are refused, or dropped and counted."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from contextlib import ExitStack
from pathlib import Path

import pytest

from rillflow.app.build import Build
from rillflow.app.encoding import EncodedTask, longest_row
from rillflow.app.facts import RecipeFacts
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.app.resume import run_config
from rillflow.cli.main import main
from rillflow.errors import RillflowError
from rillflow.records.metrics import Mean
from rillflow.runs.reader import read_metrics, read_rollouts, read_starts
from rillflow.runs.run_directory import RunDirectory
from rillflow.tasks.encoded import Encoded
from rillflow.tasks.example import Example
from rillflow.tasks.kinds import DEMONSTRATIONS, PROMPTS, DataKind

RECIPE = """
task = { source = "prompts.jsonl", held_out_source = "test.jsonl" }
policy = { model.new = { hidden = 16, layers = 1, heads = 2, context = 24 }, lr = 1e-3 }
rollout.max_tokens = 4
reward = { function = "reward.py:length" }
algorithm = { name = "grpo", steps = 3, prompts_per_step = 1, samples_per_prompt = 2 }
evaluate.every = 1
"""
GOOD = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
LONG, LONGER = {"prompt": "1" * 21, "answer": "2"}, {"prompt": "2" * 40, "answer": "2"}
ODD = {"prompt": "1 \u20ac", "answer": "2"}


def write(folder: Path, rows: list[dict], held_out: list[dict] | None = None) -> None:
    judged = held_out or [{"prompt": "5+5=", "answer": "10"}, {"prompt": "6+6=", "answer": "12"}]
    for name, part in (("prompts.jsonl", rows), ("test.jsonl", judged)):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in part))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(
        "def length(prompts, completions):\n    return [float(len(c)) for c in completions]\n"
    )
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe_of(folder: Path, *overrides: str) -> Resolved:
    return load_recipe(folder / "run.toml", overrides)


def encoded(folder: Path, *overrides: str) -> EncodedTask:
    found = RecipeFacts(resolved=recipe_of(folder, *overrides)).encoded
    assert found is not None
    return found


def refused(folder: Path, *overrides: str) -> str:
    return "\n".join(map(str, encoded(folder, *overrides).problems))


def places(found: EncodedTask, use: DataKind = PROMPTS) -> list[str]:
    return [row.example.place for row in found.train[use] if row is not None]


def test_rows_that_do_not_fit_are_refused_with_the_longest_s_line(folder: Path) -> None:
    write(folder, [*GOOD, LONG, LONGER])
    text = refused(folder)
    assert "2 of 6 prompts to train on do not fit into 24 tokens" in text
    assert "prompts.jsonl line 6" in text and "has 44 with rollout.max_tokens = 4" in text
    assert 'task.too_long = "drop"' in text


def test_rows_that_do_not_fit_are_left_out_and_counted(folder: Path) -> None:
    write(folder, [LONGER, *GOOD, ODD, LONG])
    found = encoded(folder, "task.too_long=drop")
    assert places(found) == [f"prompts.jsonl line {line}" for line in (2, 3, 4, 5)]
    assert found.left_out == {PROMPTS: 3}
    assert "1 of 7 rows to train on cannot be used: the prompt of prompts.jsonl line 6" in found.notes[0]
    assert "2 of 7 prompts to train on do not fit" in found.notes[1]
    assert encoded(folder, "task.too_long=drop", "policy.model.new.context=25").left_out == {PROMPTS: 2}


def test_a_text_far_beyond_the_context_is_refused_by_its_characters(folder: Path) -> None:
    write(folder, [*GOOD, {"prompt": "1" * 769, "answer": "4"}])
    (note,) = encoded(folder, "task.too_long=drop").notes
    assert "the prompt of prompts.jsonl line 5" in note and note.endswith("has 769 characters")


def test_prompts_lose_their_beginnings_and_answers_stay_whole(folder: Path) -> None:
    """24 tokens: 4 for a sampled answer leave 20 for the prompt; an answer of 30 leaves none."""
    write(
        folder, [*GOOD, LONG, {"prompt": "3" * 30 + "21", "answer": "4"}, {"prompt": "5", "answer": "9" * 30}]
    )
    found = encoded(folder, "task.too_long=cut", "warm_start.steps=2")
    prompts, learnt = found.train[PROMPTS], found.train[DEMONSTRATIONS]
    cut = prompts[5]
    assert cut is not None and len(cut.prompt) == 20 and cut.example.prompt == "3" * 30 + "21"
    taught = learnt[5]
    assert taught is not None and len(taught.prompt) == 22 and len(taught.answers[0]) == 2
    assert list(taught.prompt[-2:]) == list(cut.prompt[-2:]), "its end stays"
    assert found.left_out == {DEMONSTRATIONS: 1, PROMPTS: 0}
    assert "cut: 2 of 7 prompts to train on have their prompts cut from the left" in found.notes
    assert "cut: 1 of 7 demonstrations to train on have their prompts cut from the left" in found.notes
    assert any("left out: 1 of 7 demonstrations" in note for note in found.notes)


def test_a_begin_token_stays_where_a_prompt_is_cut() -> None:
    row = Encoded(example=Example(index=0, prompt="x"), prompt=array("i", [7, 1, 2, 3, 4]), answers=())
    short = row.short(PROMPTS, 3, 7)
    assert short is not None and list(short.prompt) == [7, 3, 4]
    other = row.short(PROMPTS, 3, None)
    assert other is not None and list(other.prompt) == [2, 3, 4]
    assert row.short(PROMPTS, 1, 7) is None


def test_a_row_is_as_long_as_its_use_makes_it(folder: Path) -> None:
    """A prompt of 19 fits with 4 sampled tokens, but not with an answer of 5 and its end token."""
    write(folder, [*GOOD, {"prompt": "1" * 19, "answer": "12345"}, {"prompt": "1" * 21, "answer": "1"}])
    found = encoded(folder, "task.too_long=drop", "warm_start.steps=2")
    assert found.left_out == {DEMONSTRATIONS: 1, PROMPTS: 1}
    assert places(found, DEMONSTRATIONS)[-1] == "prompts.jsonl line 6"
    assert places(found)[-1] == "prompts.jsonl line 5"
    assert "1 of 6 demonstrations to train on do not fit" in refused(folder, "warm_start.steps=2")


def test_the_longest_row_has_a_prompt_and_an_answer(folder: Path) -> None:
    assert longest_row(recipe_of(folder), encoded(folder)) == 4 + 4


def test_held_out_rows_are_measured_too(folder: Path) -> None:
    write(folder, GOOD, [LONG, {"prompt": "5+5=", "answer": "10"}])
    assert "1 of 2 prompts held out do not fit" in refused(folder)
    assert [row.example.place for row in encoded(folder, "task.too_long=drop").held_out] == [
        "test.jsonl line 2"
    ]


def test_rows_that_were_not_encoded_before_are_refused_once_the_model_is_made(folder: Path) -> None:
    write(folder, [*GOOD, LONG])
    recipe = recipe_of(folder)
    facts = RecipeFacts(resolved=recipe)
    with ExitStack() as stack:
        run = stack.enter_context(RunDirectory.open(folder / "run", run_config(recipe, facts.task)))
        with pytest.raises(RillflowError, match="1 of 5 prompts to train on do not fit into 24 tokens"):
            Build(facts, run, None, stack)


def test_a_task_of_which_nothing_is_left_is_refused(folder: Path) -> None:
    write(folder, [LONG, LONGER])
    text = refused(folder, "task.too_long=drop")
    assert "2 of 2 prompts to train on do not fit" in text and "too_long" not in text


def test_prompts_that_spell_a_special_token_are_noted(folder: Path) -> None:
    write(folder, [*GOOD, {"prompt": "1<|end|>", "answer": "1"}])
    alphabet = 'policy.model.new.alphabet="0123456789+=<|end>"'
    (note,) = encoded(folder, alphabet).notes
    assert "1 of 7 prompts spell a special token" in note
    assert 'prompts.jsonl line 5 ("1<|end|>")' in note and "'<|end|>'" in note
    found = encoded(folder, alphabet, "task.chat_template_applied=true")
    last = found.train[PROMPTS][-1]
    assert found.notes == [] and last is not None and last.prompt[-1] == 0


def test_a_run_takes_full_steps_of_the_rows_that_fit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, [LONGER, *GOOD[:2], ODD, LONG], [{"prompt": "9" * 30, "answer": ""}, *GOOD[2:]])
    assert main(["run", "run.toml", "--dir", "run"]) == 2
    assert not (folder / "run").exists(), "nothing was started"
    assert main(["run", "run.toml", "--dir", "run", "--set", "task.too_long=drop"]) == 0
    assert "note: left out: 2 of 5 prompts to train on do not fit" in capsys.readouterr().out
    steps = read_metrics(folder / "run")
    assert [step.metrics["data/left_out/share"] for step in steps] == [Mean(total=3.0, count=5.0)] * 3
    assert [len(read_rollouts(folder / "run", step)) for step in (1, 2, 3)] == [2, 2, 2]
    assert read_starts(folder / "run")[0]["left_out"] == {"prompts": 3}


CHECK = """
import sys
from rillflow.cli.main import main
code = main(["check", "run.toml", *sys.argv[1:]])
print("torch" in sys.modules)
sys.exit(code)
"""


def test_check_says_it_without_torch(folder: Path) -> None:
    def check(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", CHECK, *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)

    write(folder, [*GOOD, LONG])
    done = check()
    assert done.returncode == 2 and "1 of 5 prompts to train on do not fit" in done.stderr
    assert done.stdout.endswith("False\n")
    done = check("--set", "task.too_long=drop")
    assert done.returncode == 0
    assert "longest prompt: 4 tokens and rollout.max_tokens = 4 of 24: prompts.jsonl line 1" in done.stdout
    assert "note: left out: 1 of 5 prompts to train on" in done.stdout

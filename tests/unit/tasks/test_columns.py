"""Columns: names, templates and messages that a recipe makes of the columns of its data."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rillflow.errors import DataError, install_package
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.workers import RewardWorkers
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.huggingface import HubSource, parse_source, relative_source
from rillflow.tasks.kinds import PROMPTS
from rillflow.tasks.preference import PREFERENCES
from rillflow.tasks.task import open_task

ROOT = Path(__file__).parents[3]
ROWS = [
    {"question": f"{n} + 1?", "answer": f"#### {n + 1}", "level": n, "hints": ["a", "b"]} for n in range(4)
]


def opened(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Any:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = TaskConfig(**{"source": "rows.jsonl", "held_out": 0, **settings})
    return open_task(config, PROMPTS, base=folder, seed=0)


def test_columns_are_renamed_and_the_others_keep_their_names(tmp_path: Path) -> None:
    row = opened(tmp_path, ROWS, columns={"prompt": "question", "right": "answer"}).train[2]
    assert row.prompt == "2 + 1?"
    assert row.columns == {"right": "#### 3", "level": 2, "hints": ["a", "b"]}


def test_a_field_of_a_column_may_be_given_a_name(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "model": {"truth": {"x": n}}, "dot.ted": n} for n in (1, 2)]
    rows.append({"prompt": "?", "model": None, "dot.ted": 3})
    names = {"right": "model.truth.x", "plain": "dot.ted"}
    columns = [each.columns for each in opened(tmp_path, rows, columns=names).train]
    assert [(each["right"], each["plain"]) for each in columns] == [(1, 1), (2, 2), (None, 3)]
    assert columns[0]["model"] == {"truth": {"x": 1}}
    with pytest.raises(DataError, match=r"there is no field 'y' in 'model\.truth'") as missing:
        opened(tmp_path, rows[:2], columns={"right": "model.truth.y"})
    assert missing.value.why == 'it has {"x": 1}'
    with pytest.raises(DataError, match="there is no column 'modle'"):
        opened(tmp_path, rows, columns={"right": "modle.truth"})


@pytest.mark.parametrize("form", ["{}", "{{'acc': True, 'score': {}}}"])
def test_the_wrapper_for_verls_rewards_takes_verls_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/from_verl.md").read_text("utf-8"), re.DOTALL)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{n} * 7?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(7 * n)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in (1, 2)
    ]
    given = [each.columns for each in opened(tmp_path, rows).train]
    score = form.format("float(text == truth) + info['index']")
    code = f"def compute_score(source, text, truth, info):\n    return {score}\n"
    (tmp_path / "my_verl_reward.py").write_text(code)
    (tmp_path / "wrapper_of_the_page.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_verl_reward", "wrapper_of_the_page"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    reward = importlib.import_module("wrapper_of_the_page").reward
    columns = {name: [row[name] for row in given] for name in given[0]}
    answers = [[{"role": "assistant", "content": text}] for text in ("7", "7")]
    assert reward(completions=answers, **columns) == [2.0, 2.0]


def test_a_conversation_is_a_prompt_and_its_last_answer(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    rows = [{"messages": [asked, said, asked, said], "n": 1}, {"messages": [asked], "n": 2}]
    one, other = opened(tmp_path, rows, system="Be brief.").train
    system = {"role": "system", "content": "Be brief."}
    assert (list(one.prompt), one.completion) == ([system, asked, said, asked], "Ho")
    assert (list(other.prompt), other.completion) == ([system, asked], None)
    assert one.columns == {"n": 1}
    with pytest.raises(DataError, match="the prompt is \\[\\]"):
        opened(tmp_path, [{"messages": [said]}])
    kept = opened(tmp_path, [{"prompt": "?", "messages": "kept for the reward"}]).train[0]
    assert kept.columns == {"messages": "kept for the reward"}


def test_one_column_may_be_given_two_names(tmp_path: Path) -> None:
    row = opened(tmp_path, ROWS, columns={"prompt": "question", "prefix": "question"}).train[0]
    assert (row.prompt, row.columns["prefix"]) == ("0 + 1?", "0 + 1?")


def test_a_template_takes_columns_by_either_name_and_two_braces_as_one(tmp_path: Path) -> None:
    template = "{{{question}}} {right}\n{hints}\n\\boxed{}"
    row = opened(tmp_path, ROWS, columns={"right": "answer"}, template=template).train[0]
    assert row.prompt == "{0 + 1?} #### 1\na\nb\n\\boxed{}"
    assert row.columns["question"] == "0 + 1?"


def test_a_system_message_makes_a_conversation(tmp_path: Path) -> None:
    rows = [{"prompt": "Hi", "n": 1}, {"prompt": [{"role": "user", "content": "Ho"}], "n": 2}]
    one, other = opened(tmp_path, rows, system="Be brief.").train
    system = {"role": "system", "content": "Be brief."}
    assert list(one.prompt) == [system, {"role": "user", "content": "Hi"}]
    assert list(other.prompt) == [system, {"role": "user", "content": "Ho"}]
    (chat, _) = opened(tmp_path, rows, chat=True).train
    assert list(chat.prompt) == [{"role": "user", "content": "Hi"}]


def test_a_missing_column_names_those_there_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        opened(tmp_path, ROWS, columns={"prompt": "questions"})
    assert "line 1: there is no column 'questions'" in caught.value.what
    assert "'question', 'answer', 'level', 'hints'" in caught.value.why
    assert "'question'" in caught.value.fix
    with pytest.raises(DataError, match="no column 'anser'"):
        opened(tmp_path, ROWS, template="{anser}")


def test_a_template_without_a_column_is_refused() -> None:
    with pytest.raises(ValidationError, match="every prompt would be the same"):
        TaskConfig(template="Think {{hard}}.")


def test_columns_of_made_problems_are_refused() -> None:
    with pytest.raises(DataError, match="this source makes its own"):
        open_task(TaskConfig(template="{answer}"), PROMPTS, base=Path(), seed=0)


@pytest.mark.parametrize("source", ["arithmetic", "reasoning-gym:chain_sum"])
def test_made_problems_may_be_chats_and_are_scored_as_before(source: str) -> None:
    task = open_task(
        TaskConfig(source=source, size=3, held_out=0, system="Add."), PROMPTS, base=Path(), seed=0
    )
    row = task.train[0]
    assert [each["role"] for each in row.prompt] == ["system", "user"]  # type: ignore[index]
    prompt = [dict(each) for each in row.prompt]  # type: ignore[arg-type]
    said = row.completion if source == "arithmetic" else f"So <answer> {row.completion} </answer>"
    replies = [[{"role": "assistant", "content": text}] for text in (str(said), "none")]
    columns = {name: [value] * 2 for name, value in row.columns.items()}
    with RewardWorkers(task.reward[0], RewardConfig()) as workers:
        right, wrong = workers.score([prompt] * 2, replies, columns)
    assert right.value == 1.0 and wrong.value is not None and wrong.value < 0.5


def test_pairs_and_held_out_files_have_the_same_columns(tmp_path: Path) -> None:
    rows = [{"q": f"q{n}", "good": "a", "bad": "b"} for n in range(3)]
    for name, part in {"train": rows[:2], "test": rows[2:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    config = TaskConfig(
        source="train.jsonl",
        held_out_source="test.jsonl",
        columns={"prompt": "q", "chosen": "good", "rejected": "bad"},
    )
    task = open_task(config, PREFERENCES, base=tmp_path, seed=0)
    assert [row.answers for row in task.held_out] == [("a", "b")]
    assert [row.prompt for row in task.train] == ["q0", "q1"]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf:openai/gsm8k", HubSource(name="openai/gsm8k", subset=None, split="train")),
        ("hf:openai/gsm8k:test", HubSource(name="openai/gsm8k", subset=None, split="test")),
        (
            "hf:openai/gsm8k:main:test[:10%]",
            HubSource(name="openai/gsm8k", subset="main", split="test[:10%]"),
        ),
        ("hf:../my.data", HubSource(name="../my.data", subset=None, split="train")),
    ],
)
def test_a_source_names_data_set_subset_and_split(text: str, source: HubSource) -> None:
    assert parse_source(text) == source


def test_settings_fill_in_what_a_source_does_not_name() -> None:
    assert str(parse_source("hf:a/b", subset="main", split="test")) == "a/b test"
    assert parse_source("hf:a/b:train", subset="main", split="test").split == "train"


@pytest.mark.parametrize("text", ["hf:", "hf:a:b:c:d", "hf:a::b"])
def test_a_source_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="hf:NAME:SUBSET:SPLIT"):
        parse_source(text)


def test_a_directory_given_in_python_is_relative_to_the_present_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert relative_source("hf:data:test", tmp_path / "recipes") == "hf:../data:test"
    assert relative_source("hf:owner/data:test", tmp_path / "recipes") == "hf:owner/data:test"


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="the package datasets is not installed") as caught:
        open_task(TaskConfig(source="hf:openai/gsm8k"), PROMPTS, base=Path(), seed=0)
    assert caught.value.fix == install_package("datasets")

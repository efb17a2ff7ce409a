"""Tasks: sources, the split, the digest, and imports of opening them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rillflow.errors import DataError, install_package
from rillflow.rewards.function import FunctionPath
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.example import Example
from rillflow.tasks.files import given_rows
from rillflow.tasks.kinds import PROMPTS, DataKind
from rillflow.tasks.labelled import LABELLED
from rillflow.tasks.preference import PREFERENCES
from rillflow.tasks.task import Task, open_task


def arithmetic(seed: int = 0, **settings_: object) -> Task:
    return open_task(
        TaskConfig(**({"size": 300, "held_out": 40} | settings_)), PROMPTS, base=Path(), seed=seed
    )


def from_rows(folder: Path, rows: list[dict], seed: int = 0, **settings_: object) -> Task:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = TaskConfig(**({"source": "rows.jsonl", "held_out": 2} | settings_))
    return open_task(config, PROMPTS, base=folder, seed=seed)


def solution(prompt: str) -> int:
    found = re.fullmatch(r"(\d+)([-+*])(\d+)=", prompt)
    assert found is not None
    left, right = int(found[1]), int(found[3])
    return {"+": left + right, "-": left - right, "*": left * right}[found[2]]


def scorer(function: FunctionPath) -> object:
    spec = importlib.util.spec_from_file_location("scorer", function.file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.__dict__[function.name]


def test_numpy_scalars_of_given_rows_are_plain_values_at_any_depth() -> None:
    nested = {"limits": [np.int64(3), {"share": np.float64(0.5)}], "name": np.str_("a")}
    (row,) = given_rows([{"prompt": "1+2=", "answer": np.int64(3), "more": nested}], lambda row, *_: row)
    assert json.loads(json.dumps(row)) == row
    assert row["answer"] == 3 and row["more"] == {"limits": [3, {"share": 0.5}], "name": "a"}


def test_arithmetic_is_right_distinct_and_split() -> None:
    task = arithmetic(operators="+-*")
    rows = [*task.train, *task.held_out]
    assert (len(task.train), len(task.held_out), task.left_out) == (260, 40, 0)
    assert len({row.prompt for row in rows}) == len({row.index for row in rows}) == 300
    for row in rows:
        assert str(solution(str(row.prompt))) == row.completion == row.columns["answer"]
    assert {symbol for row in rows for symbol in "+-*" if symbol in str(row.prompt)[1:]} == set("+-*")


@pytest.mark.parametrize(("digits", "least", "most"), [(1, 0, 9), (2, 10, 99), (6, 100_000, 999_999)])
def test_arithmetic_s_numbers_have_the_digits(digits: int, least: int, most: int) -> None:
    task = arithmetic(digits=digits, operators="+", size=90)
    numbers = [int(part) for row in task.train for part in str(row.prompt).removesuffix("=").split("+")]
    assert least <= min(numbers) and max(numbers) <= most


def test_arithmetic_makes_no_problem_twice_even_where_there_are_few() -> None:
    task = arithmetic(digits=1, operators="+-", size=10_000, held_out=20)
    prompts = {row.prompt for row in (*task.train, *task.held_out)}
    assert len(prompts) == len(task.train) + 20 == 200


@pytest.mark.parametrize(
    ("operators", "says"), [("+/", "'/' is not an operator"), ("++", "'+' occurs twice")]
)
def test_arithmetic_s_operators_are_checked(operators: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        arithmetic(operators=operators)
    assert repr(operators) in caught.value.what and says in caught.value.why


def test_arithmetic_s_scorer() -> None:
    reward = scorer(arithmetic().reward[0])
    answers = ["42", " 42\n", "42.", "4 2", "", "-42"]
    scores = reward(prompts=["17+25="] * 6, completions=answers, answer=["42"] * 6, level=[1] * 6)  # type: ignore[operator]
    assert scores == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_seed_decides_everything() -> None:
    assert arithmetic(seed=3) == arithmetic(seed=3)
    assert arithmetic(seed=3).digest != arithmetic(seed=4).digest


@pytest.mark.parametrize("held_out", [200, 201, 500])
def test_more_held_out_than_there_is(held_out: int) -> None:
    with pytest.raises(DataError) as caught:
        arithmetic(digits=1, held_out=held_out)
    assert f"task.held_out is {held_out}" in caught.value.what and "200 different" in caught.value.what


def test_one_row_and_nothing_held_out(tmp_path: Path) -> None:
    task = from_rows(tmp_path, [{"prompt": "only"}], held_out=0)
    assert (len(task.train), task.held_out, task.reward) == (1, (), ())
    with pytest.raises(DataError, match="held_out is 1"):
        from_rows(tmp_path, [{"prompt": "only"}], held_out=1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=4, max_size=30), st.integers(0, 3), st.integers(0, 99))
def test_no_prompt_is_both_trained_on_and_held_out(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], held_out: int, seed: int
) -> None:
    assume(held_out < len(set(prompts)))
    rows = [{"prompt": prompt, "id": place} for place, prompt in enumerate(prompts)]
    task = from_rows(tmp_path_factory.mktemp("law"), rows, seed, held_out=held_out)
    trained, judged = {row.prompt for row in task.train}, [row.prompt for row in task.held_out]
    assert len(judged) == len(set(judged)) == held_out
    assert not trained & set(judged)
    assert len(task.train) + len(task.held_out) + task.left_out == len(prompts)
    for row in (*task.train, *task.held_out):
        assert row.columns["id"] == row.index and row.prompt == prompts[row.index]


def test_rows_of_one_prompt_that_differ_in_a_column_are_different_rows(tmp_path: Path) -> None:
    games = [{"prompt": "?", "secret": secret} for secret in (1, 2, 3, 4, 5, 6, 7, 3)]
    task = from_rows(tmp_path, games, held_out=3)
    trained, judged = ([row.columns["secret"] for row in rows] for rows in (task.train, task.held_out))
    assert len(set(judged)) == 3 and set(trained) == set(range(1, 8)) - set(judged)
    assert (len(trained) + task.left_out, task.shared_prompts) == (5, len(trained))
    with pytest.raises(DataError, match=r"has 7 different rows.*\n.*\n.*a column other than 'id'"):
        from_rows(tmp_path, games, held_out=7)
    (tmp_path / "test.jsonl").write_text('{"prompt": "?", "secret": 2}\n{"prompt": "?", "secret": 9}\n')
    task = from_rows(tmp_path, games, held_out_source="test.jsonl")
    assert [row.columns["secret"] for row in task.train] == [1, 3, 4, 5, 6, 7, 3] and task.left_out == 1


@pytest.mark.parametrize("answers", ["pairs", "labels"])
def test_all_answers_to_one_prompt_are_held_out_together(tmp_path: Path, answers: str) -> None:
    columns = {"pairs": {"chosen": "a", "rejected": "b"}, "labels": {"completion": "a", "label": True}}
    rows = [{"prompt": prompt, "margin": place} | columns[answers] for place, prompt in enumerate("xyxyx")]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    kind: DataKind = {"pairs": PREFERENCES, "labels": LABELLED}[answers]
    task = open_task(TaskConfig(source="rows.jsonl", held_out=1), kind, base=tmp_path, seed=0)
    assert {row.prompt for row in task.train} == {"x", "y"} - {task.held_out[0].prompt}


def test_equal_chats_are_equal_prompts(tmp_path: Path) -> None:
    def chat(text: str) -> dict:
        return {"prompt": [{"role": "user", "content": text}]}

    task = from_rows(tmp_path, [chat("a"), chat("b"), chat("a"), chat("b")], held_out=1)
    assert (len(task.train), task.left_out) == (2, 1)


def test_a_held_out_file_is_kept_whole_and_its_prompts_leave_training(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"prompt": "b", "level": 1}\n{"prompt": "z", "level": 2}\n')
    rows = [{"prompt": prompt, "answer": 0} for prompt in "abcb"]
    task = from_rows(tmp_path, rows, held_out_source="test.jsonl")
    assert [row.prompt for row in task.train] == ["a", "c"]
    assert [row.prompt for row in task.held_out] == ["b", "z"]
    assert task.left_out == 2
    with pytest.raises(DataError, match=r"no row of 'rows\.jsonl' is left"):
        from_rows(tmp_path, [{"prompt": "b"}, {"prompt": "z"}], held_out_source="test.jsonl")


def test_the_digest_changes_with_any_row(tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "answer": "1"} for prompt in "abcdef"]
    first = from_rows(tmp_path, rows).digest
    assert from_rows(tmp_path, rows).digest == first
    (tmp_path / "rows.jsonl").write_text("\n\n".join(json.dumps(row, indent=None) + "  " for row in rows))
    assert (
        open_task(TaskConfig(source="rows.jsonl", held_out=2), PROMPTS, base=tmp_path, seed=0).digest == first
    )
    for place in range(6):
        edited = [dict(row) for row in rows]
        edited[place]["answer"] = "2"
        assert from_rows(tmp_path, edited).digest != first
    assert from_rows(tmp_path, rows[::-1]).digest != first


def test_rows_that_were_added_leave_the_held_out_ones_and_the_order_of_the_others(tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "answer": "1"} for prompt in "abcdefgh"]
    before = from_rows(tmp_path, rows)
    away = before.held_out[0].prompt
    from_rows(tmp_path, [*rows, {"prompt": "x", "answer": "1"}, {"prompt": away, "answer": "1"}])
    config = TaskConfig(source="rows.jsonl", held_out=2)
    after = open_task(config, PROMPTS, base=tmp_path, seed=0, drawn=before.fingerprint.drawn)
    assert after.held_out == before.held_out
    assert after.train[:6] == before.train and [row.prompt for row in after.train[6:]] == ["x"]
    assert (after.left_out, after.fingerprint.drawn) == (1, 8)
    assert after.fingerprint.rows[:8] == before.fingerprint.rows and len(after.fingerprint.rows) == 10


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("arithmetik", ["'arithmetik'", "did you mean 'arithmetic'"]),
        ("reasoning_gym:chain_sum", ["did you mean 'reasoning-gym:'"]),
        ("nowhere.jsonl", ["nowhere.jsonl", "is not there"]),
        ("../nowhere.jsonl", ["nowhere.jsonl", "is not there"]),
        ("data.csv", ["'.csv'", ".jsonl"]),
    ],
)
def test_an_unknown_source_is_named(tmp_path: Path, source: str, says: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        open_task(TaskConfig(source=source, size=4, held_out=0), PROMPTS, base=tmp_path, seed=0)
    assert all(part in str(caught.value) for part in says), str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("chain_sun", "did you mean 'chain_sum'"),
        ("composite", "by its name alone"),
        ("arc_agi", "plain data"),
        ("graph_color", "plain data"),
    ],
)
def test_gym_data_sets_that_cannot_be_used_are_named(name: str, says: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError) as caught:
        open_task(
            TaskConfig(source=f"reasoning-gym:{name}", size=4, held_out=0), PROMPTS, base=Path(), seed=0
        )
    assert f"reasoning-gym:{name}" in caught.value.what and says in str(caught.value)


def test_gym_problems_and_their_scorer() -> None:
    pytest.importorskip("reasoning_gym")
    config = TaskConfig(source="reasoning-gym:chain_sum", size=30, held_out=5)
    task = open_task(config, PROMPTS, base=Path(), seed=1)
    assert task.digest == open_task(config, PROMPTS, base=Path(), seed=1).digest
    assert len(task.train) + len(task.held_out) + task.left_out == 30 and len(task.held_out) == 5
    rows = [json.loads(row.as_json()) for row in task.train[:4]]
    given_ = {name: [row[name] for row in rows] for name in ("answer", "metadata")}
    prompts = [row["prompt"] for row in rows]
    reward = scorer(task.reward[0])
    assert reward(prompts, [f" {row.completion}\n" for row in task.train[:4]], **given_) == [1.0] * 4  # type: ignore[operator]
    assert max(reward(prompts, ["", "no idea", "1e9", "[]"], **given_)) < 1.0  # type: ignore[operator]


def test_an_answer_a_data_set_cannot_read_is_wrong_not_an_error() -> None:
    pytest.importorskip("reasoning_gym")
    config = TaskConfig(source="reasoning-gym:prime_factorization", size=3, held_out=0)
    task = open_task(config, PROMPTS, base=Path(), seed=1)
    row = task.train[0]
    score = scorer(task.reward[0])(
        [row.prompt], ["x"], answer=[row.completion], metadata=[row.columns["metadata"]]
    )  # type: ignore[operator]
    assert score == [0.0]


PROBE = """
import sys
from pathlib import Path
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.kinds import PROMPTS
from rillflow.tasks.task import open_task
{hide}
try:
    open_task(TaskConfig(source={source!r}, size=50, held_out=5), PROMPTS, base=Path({base!r}), seed=0)
except Exception as error:
    print(type(error).__name__, error)
print(sorted({{"torch", "transformers", "pyarrow", "reasoning_gym", "numpy"}} & set(sys.modules)))
"""


def probe(source: str, base: Path, hide: str = "") -> str:
    lines = f"sys.modules[{hide!r}] = None" if hide else ""
    code = PROBE.format(source=source, base=str(base), hide=lines)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_opening_a_task_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": str(n)}) for n in range(9)))
    assert probe("arithmetic", tmp_path) == "[]\n"
    assert probe("rows.jsonl", tmp_path) == "[]\n"
    if importlib.util.find_spec("reasoning_gym"):
        assert "torch" not in probe("reasoning-gym:chain_sum", tmp_path)


def test_a_missing_package_is_named_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    assert install_package("parquet") in probe("rows.parquet", tmp_path, hide="pyarrow")
    assert install_package("gym") in probe("reasoning-gym:chain_sum", tmp_path, hide="reasoning_gym")


@pytest.mark.parametrize(
    ("rows", "held_out"), [(1, 0), (9, 0), (10, 1), (1000, 100), (4999, 499), (6000, 500)]
)
def test_a_number_that_is_left_out_holds_out_a_tenth_of_a_small_file(
    tmp_path: Path, rows: int, held_out: int
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(rows)))
    left_out = TaskConfig(source="rows.jsonl")
    task = open_task(left_out, PROMPTS, base=tmp_path, seed=0, is_exact=False)
    assert len(task.held_out) == held_out
    named = TaskConfig(source="rows.jsonl", held_out=500)
    if rows <= 500:
        with pytest.raises(DataError, match="held_out is 500"):
            open_task(named, PROMPTS, base=tmp_path, seed=0)
    else:
        assert len(open_task(named, PROMPTS, base=tmp_path, seed=0).held_out) == 500


def test_a_conversation_is_recognised_by_its_last_question() -> None:
    chat = (
        {"role": "system", "content": "Add the numbers."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": 'and "17+25"?'}]},
    )
    assert Example(index=0, prompt=chat).question == 'and "17+25"?'
    assert Example(index=0, prompt="plain").question == "plain"
    alone = ({"role": "system", "content": "Begin."},)
    assert Example(index=0, prompt=alone).question == Example(index=0, prompt=alone).key

"""Tasks of the field: data sets read by datasets, and answers compared by math-verify."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets")
pytest.importorskip("math_verify")

from rillflow.app.recipe import load_recipe  # noqa: E402
from rillflow.app.scorers import scorer  # noqa: E402
from rillflow.errors import DataError  # noqa: E402
from rillflow.rewards.config import RewardConfig  # noqa: E402
from rillflow.rewards.outcome import Outcome, Score  # noqa: E402
from rillflow.rewards.workers import RewardWorkers  # noqa: E402
from rillflow.tasks.config import TaskConfig  # noqa: E402
from rillflow.tasks.example import Example  # noqa: E402
from rillflow.tasks.files import given_rows  # noqa: E402
from rillflow.tasks.kinds import PROMPTS  # noqa: E402
from rillflow.tasks.task import Task, open_task, read_sets  # noqa: E402

GSM8K = {"prompt": "question"}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the cache in the test's folder, and do not ask the hub."""
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def rows(count: int, first: int = 0) -> Any:
    return datasets.Dataset.from_list(
        [{"question": f"{n} + 1?", "answer": f"so\n#### {n + 1}"} for n in range(first, first + count)]
    )


def opened(folder: Path, source: str, **settings: Any) -> Task:
    config = TaskConfig(**{"source": source, "held_out": 0, "columns": GSM8K, **settings})
    return open_task(config, PROMPTS, base=folder, seed=0)


@pytest.fixture(params=["saved", "parquet", "json"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a directory with the splits train and test, in one of the forms in which they are given away."""
    splits = {"train": rows(5), "test": rows(2, first=10)}
    folder = tmp_path / "gsm8k"
    if request.param == "saved":
        datasets.DatasetDict(splits).save_to_disk(folder)
        return folder
    folder.mkdir()
    for name, data in splits.items():
        data.to_parquet(folder / f"{name}-0.parquet") if request.param == "parquet" else data.to_json(
            folder / f"{name}.jsonl"
        )
    return folder


def test_a_directory_gives_training_and_held_out_rows_from_two_splits(directory: Path) -> None:
    task = opened(directory.parent, "hf:gsm8k", held_out_source="hf:gsm8k:test")
    assert [row.prompt for row in task.train] == [f"{n} + 1?" for n in range(5)]
    assert [row.prompt for row in task.held_out] == ["10 + 1?", "11 + 1?"]
    assert task.train[2].columns == {"answer": "so\n#### 3"}
    assert task.train[2].place == "gsm8k train row 3"
    again = opened(directory.parent, "hf:gsm8k", held_out_source="hf:gsm8k:test")
    assert again.digest == task.digest
    assert [row.prompt for row in opened(directory.parent, "hf:gsm8k", split="train[1:3]").train] == [
        "1 + 1?",
        "2 + 1?",
    ]


def test_one_saved_data_set_has_no_splits(tmp_path: Path) -> None:
    rows(3).save_to_disk(tmp_path / "one")
    assert len(opened(tmp_path, f"hf:{tmp_path / 'one'}").train) == 3


def test_evaluation_sets_may_be_data_sets(directory: Path) -> None:
    config = TaskConfig(columns=GSM8K)
    sets = read_sets({"more": "hf:gsm8k:test"}, config, directory.parent, PROMPTS)
    assert len(sets["more"]) == 2


def test_what_is_wrong_with_a_directory_is_said(directory: Path) -> None:
    with pytest.raises(DataError, match="no column 'prompt'") as caught:
        opened(directory.parent, "hf:gsm8k", columns={})
    assert "hf:gsm8k, row 1" in caught.value.what and "'question', 'answer'" in caught.value.why
    with pytest.raises(DataError, match="no split 'tset'") as caught:
        opened(directory.parent, "hf:gsm8k:tset")
    assert "test" in caught.value.fix
    with pytest.raises(DataError, match="there is no directory") as caught:
        opened(directory.parent, "hf:./gsm8")
    assert "gsm8k" in caught.value.fix


def test_images_and_dates_are_left_out_and_nested_values_are_kept(tmp_path: Path) -> None:
    import datetime

    row = {"question": "1?", "day": datetime.date(2026, 1, 2), "raw": b"x", "more": {"a": [1.5, None]}}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "d" / "train.parquet")
    (found,) = opened(tmp_path, "hf:d").train
    assert found.columns == {"more": {"a": [1.5, None]}}


def test_left_out_columns_are_named_and_one_that_a_template_reads_stops_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import datetime

    row = {"question": "1 + 1?", "answer": "2", "day": datetime.date(2024, 1, 2)}
    datasets.Dataset.from_list([row] * 2).save_to_disk(str(tmp_path / "set"))
    opened(tmp_path, "hf:set")
    assert "hf:set: these columns are not read: 'day' (date32[day])" in caplog.text
    datasets.Dataset.from_list([row | {"tools": [row["day"]]}] * 2).save_to_disk(str(tmp_path / "tools"))
    with pytest.raises(DataError, match="the column 'tools' of hf:tools has the type") as refused:
        opened(tmp_path, "hf:tools")
    assert "a chat template reads text" in refused.value.why


MIXED = [
    {"question": "1?", "answer": 0.1, "day": "2024-01-02", "mixed": "42", "part": {"x": "a"}},
    {"question": "2?", "answer": 7, "day": "2024-01-03T04:05:06", "mixed": 42, "part": {"y": [1, "b", None]}},
    {"question": "3?", "answer": None, "day": None, "mixed": {"z": None}},
]


@pytest.mark.parametrize("is_list", [False, True])
def test_a_directory_of_json_gives_the_values_of_its_files(tmp_path: Path, is_list: bool) -> None:
    """datasets reads texts as dates, and leaves its type for mixed columns to its users."""
    (tmp_path / "lines").mkdir()
    text = json.dumps(MIXED, indent=1) if is_list else "\n".join(map(json.dumps, MIXED))
    (tmp_path / "lines" / f"train.{'json' if is_list else 'jsonl'}").write_text(text)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"part": None} | row) for row in MIXED))
    assert opened(tmp_path, "hf:lines").train == opened(tmp_path, "rows.jsonl").train
    assert [each.prompt for each in opened(tmp_path, "hf:lines", split="train[1:]").train] == ["2?", "3?"]
    assert [each.prompt for each in opened(tmp_path, "hf:lines", split="train[:34%]").train] == ["1?"]
    with pytest.raises(DataError, match="has no split 'test'"):
        opened(tmp_path, "hf:lines", split="test")
    path = next((tmp_path / "lines").iterdir())
    path.write_text(text[:-9])
    with pytest.raises(DataError, match=path.name):
        opened(tmp_path, "hf:lines")


def test_a_mixed_column_of_a_saved_data_set_has_its_values(tmp_path: Path) -> None:
    mixed = [{"question": "1?", "mixed": {"a": 1}}, {"question": "2?", "mixed": [None, "b"]}]
    whole = datasets.Dataset.from_list(mixed, on_mixed_types="use_json")
    whole.save_to_disk(str(tmp_path / "set"))
    assert [each.columns["mixed"] for each in opened(tmp_path, "hf:set").train] == [{"a": 1}, [None, "b"]]


def test_a_directory_with_code_or_another_format_runs_nothing(tmp_path: Path) -> None:
    folder, mark = tmp_path / "evil", tmp_path / "ran"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')")
    with pytest.raises(DataError, match="scripts are no longer supported"):
        opened(tmp_path, "hf:evil")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.xml").write_text("<a/>")
    with pytest.raises(DataError, match="has the format xml"):
        opened(tmp_path, "hf:texts")
    assert not mark.exists()


def test_without_network_and_cache_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        opened(tmp_path, "hf:openai/gsm8k:main:train")
    assert "hf:openai/gsm8k cannot be read" in caught.value.what
    assert "hf download --repo-type dataset openai/gsm8k" in caught.value.fix
    assert "HF_HOME" in caught.value.fix


def test_a_data_set_in_the_cache_is_read_without_network(tmp_path: Path) -> None:
    """Lay out the cache as a download of openai/gsm8k leaves it."""
    folder = tmp_path / "cache" / "openai___gsm8k" / "main" / "0.0.0" / "0123abcd"
    folder.mkdir(parents=True)
    with datasets.arrow_writer.ArrowWriter(path=str(folder / "gsm8k-train.arrow")) as writer:
        for row in rows(3):
            writer.write(row)
        _, size = writer.finalize()
    split = {"name": "train", "num_bytes": size, "num_examples": 3, "dataset_name": "gsm8k"}
    info = {
        "builder_name": "parquet",
        "dataset_name": "gsm8k",
        "config_name": "main",
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
        "splits": {"train": split},
        "features": {name: {"dtype": "string", "_type": "Value"} for name in ("question", "answer")},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    assert len(opened(tmp_path, "hf:openai/gsm8k:main:train").train) == 3


@pytest.mark.slow
def test_a_hundred_thousand_rows_in_seconds(tmp_path: Path) -> None:
    rows(100_000).save_to_disk(tmp_path / "big")
    opened(tmp_path, "hf:big")
    begun = time.process_time()
    assert len(opened(tmp_path, "hf:big").train) == 100_000
    assert time.process_time() - begun < 10


# ---- math-verify


def scored(completions: list[Any], answers: list[Any], **settings: Any) -> list[Score]:
    config = RewardConfig(**{"timeout_s": 60, **settings})
    with RewardWorkers(scorer("math-verify", Path(), config), config) as workers:
        return workers.score([""] * len(completions), completions, {"answer": answers})


def test_answers_are_equal_as_mathematics() -> None:
    pairs = [
        ("First 3 * 14.\n#### 42", "3 * 14 = <<3*14=42>>42\n#### 42"),
        ("So it is \\boxed{\\frac{1}{2}}.", "0.5"),
        ("The answer is 1,000 dollars", "#### 1,000"),
        ([{"role": "assistant", "content": "$x = 7$"}], ["8", "7"]),
        ("It is 43.", "#### 42"),
        ("I do not know.", 42),
        ("", ["", "7"]),
        ("anything", None),
    ]
    scores = scored([one for one, _ in pairs], [other for _, other in pairs])
    assert [score.value for score in scores] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, None]
    assert scores[-1].outcome is Outcome.ABSTAIN


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("#### 1,2", "12", 0.0),
        ("#### 1,2", "1,2", 1.0),
        ("#### 1,2", "2, 1", 1.0),
        ("#### (1,2)", "(1,2)", 1.0),
        ("#### [1, 2)", "[1,2)", 1.0),
        ("#### [1, 2)", "(1,2]", 0.0),
        ("#### 1,234", "1234", 1.0),
        ("#### 1234", "1,234", 1.0),
        ("#### 12,345,678.5", "12345678.5", 1.0),
        ("#### 1,234 dollars", "#### 1,234", 1.0),
        ("#### 18 dollars", "18", 1.0),
        ("#### \\boxed{7}", "7", 1.0),
    ],
)
def test_commas_part_lists_or_thousands(said: str, answer: str, right: float) -> None:
    assert [score.value for score in scored([said], [answer])] == [right]


def test_a_directory_named_as_a_format_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "other"):
        (tmp_path / name).mkdir()
        rows(3, first=10 * len(name)).to_json(tmp_path / name / "train.jsonl")
    monkeypatch.chdir(tmp_path)
    task = opened(Path(), "hf:json")
    assert [row.prompt for row in task.train] == ["40 + 1?", "41 + 1?", "42 + 1?"]


def test_an_endless_comparison_is_a_timeout_of_its_row_in_the_child() -> None:
    scores = scored(["$9^{9^{9^{9}}}$", "#### 3"], ["3", "3"])
    assert scores[0].outcome is Outcome.TIMEOUT and "interrupted after 2 s" in scores[0].message
    assert scores[1].value == 1.0


def test_it_scores_in_the_sandbox_and_within_the_memory_limit() -> None:
    (score,) = scored(["#### 42"], ["#### 42"], sandbox=True)
    assert score.value == 1.0


@pytest.mark.parametrize("directory", ["parquet"], indirect=True)
def test_a_recipe_trains_on_a_data_set_with_math_verify(directory: Path) -> None:
    """Run the command line on word problems of a directory."""
    (directory.parent / "run.toml").write_text(
        """
        run.threads = 1
        task = { source = "hf:gsm8k", held_out_source = "hf:gsm8k:test", columns = { prompt = "question" } }
        reward = { function = "math-verify", timeout_s = 60 }
        rollout.max_tokens = 3
        algorithm = { name = "grpo", steps = 1, prompts_per_step = 2, samples_per_prompt = 2 }
        [policy.model.new]
        hidden = 16
        layers = 1
        heads = 2
        kv_heads = 1
        context = 32
        alphabet = "0123456789+? #so\\n"
        """
    )
    command = [sys.executable, "-m", "rillflow.cli.main", "run", str(directory.parent / "run.toml"), "--dir"]
    run = directory.parent / "run"
    done = subprocess.run([*command, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = (run / "evaluations.jsonl").read_text().splitlines()[-1:]
    assert re.search(r'"count": ?2', line)


# ---- the recipes for data of the hub, on directories of the same shape

RECIPES = Path(__file__).parents[2] / "recipes"
CHAT = [{"role": "user", "content": "Hi"}]
SHAPES: dict[str, dict[str, Any]] = {
    "gsm8k/run.toml": {"question": "6 * 7?", "answer": "6 * 7 = 42\n#### 42"},
    "sft/gsm8k.toml": {"question": "6 * 7?", "answer": "6 * 7 = 42\n#### 42"},
    "code/mbpp.toml": {
        "task_id": 1,
        "text": "Add two numbers.",
        "code": "def add(a, b):\r\n  return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    "chat_preference/run.toml": {
        "chosen": [*CHAT, {"role": "assistant", "content": "Hello!"}],
        "rejected": [*CHAT, {"role": "assistant", "content": "What?"}],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_recipe_reads_data_of_the_shape_of_its_data_set(name: str, tmp_path: Path) -> None:
    row = SHAPES[name]
    for split in ("train", "test"):
        given = [{**row, **{key: f"{row[key]} {split}" for key in row if key in ("question", "text")}}]
        datasets.Dataset.from_list(given).to_parquet(tmp_path / "data" / f"{split}.parquet")
    settings = {"task.source": "hf:data", "task.held_out_source": "hf:data:test"}
    recipe = load_recipe(RECIPES / name, settings).recipe
    held_out = recipe.chosen.data if recipe.chosen.score is not None else PROMPTS
    config = recipe.task
    if name == "chat_preference/run.toml":
        config = config.model_copy(update={"held_out_source": None, "held_out": 0})
    task = open_task(config, held_out, base=tmp_path, seed=0)
    (example,) = task.train
    if name == "code/mbpp.toml":
        assert example.prompt[-1]["content"] == (  # type: ignore[index]
            "Add two numbers. train\nYour code should pass these tests:\n"
            "assert add(1, 2) == 3\nassert add(0, 0) == 0"
        )
        right = f"```python\n{row['code']}\n```"
        assert _score("code-tests", right, example).value == 1.0
    elif name == "chat_preference/run.toml":
        assert (list(example.prompt), example.answers) == (CHAT, ("Hello!", "What?"))
    else:
        assert _score("math-verify", "So it is 42.", example).value == 1.0


def _score(function: str, completion: str, example: Example) -> Score:
    columns = {column: [value] for column, value in example.columns.items()}
    config = RewardConfig(timeout_s=60)
    with RewardWorkers(scorer(function, Path(), config), config) as workers:
        (score,) = workers.score([""], [completion], columns)
    return score


def test_data_frames_and_data_sets_given_in_python_are_rows_as_a_file_has_them() -> None:
    import pandas

    tools = [[{"name": "f", "parameters": {"a": 1}}], [{"name": "g", "parameters": {"b": 2}}]]
    table = [
        {"prompt": f"{n}?", "answer": n or None, "tools": tools[n], "facts": {"a" * (n + 1): n}}
        for n in range(2)
    ]
    expected = [{**row, "facts": {"a": None, "aa": None} | row["facts"]} for row in table]
    whole = datasets.Dataset.from_list(table)
    assert given_rows(whole, lambda row, *_: row) == expected
    assert given_rows(pandas.DataFrame(table), lambda row, *_: row) == table
    assert given_rows(whole.to_pandas(), lambda row, *_: row) == expected

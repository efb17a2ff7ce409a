"""Labelled answers and pairs: files of the wrong kind, invalid labels, answers of other prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rillflow.errors import DataError
from rillflow.models.bare import character_tokenizer
from rillflow.models.tokenizer import Tokenizer
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.labelled import LABELLED
from rillflow.tasks.preference import PREFERENCES
from rillflow.tasks.task import open_task

GOOD = {"prompt": "1+1=", "completion": "2", "label": True}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


def written(folder: Path, *rows: dict[str, Any]) -> TaskConfig:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return TaskConfig(source="rows.jsonl", held_out=0)


def test_rows_are_read_with_their_labels(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+2="}]
    said = [{"role": "assistant", "content": "4"}]
    other = {"prompt": chat, "completion": said, "label": False}
    task = open_task(written(tmp_path, GOOD, other), LABELLED, base=tmp_path, seed=0)
    assert [(row.completion, row.labels["label"]) for row in task.train] == [("2", True), ("4", False)]
    again = open_task(written(tmp_path, GOOD, {**other, "label": True}), LABELLED, base=tmp_path, seed=0)
    assert again.digest != task.digest


@pytest.mark.parametrize(
    ("row", "what", "fix"),
    [
        ({**GOOD, "label": None}, "the label is null", "write true or false"),
        ({**GOOD, "label": 1}, "the label is 1", "without quotes"),
        ({**GOOD, "completion": None}, "the completion is null", ""),
        ({"prompt": "1+1=", "completion": "2", "lable": True}, "no column 'label'", "'lable'"),
        (PAIR, "no column 'completion'", "choose an algorithm that learns from pairs"),
    ],
)
def test_a_row_that_is_no_labelled_answer_is_named_with_its_line(
    tmp_path: Path, row: dict[str, Any], what: str, fix: str
) -> None:
    rows = [row] if row.keys() != GOOD.keys() else [GOOD, row]
    with pytest.raises(DataError, match=what) as caught:
        open_task(written(tmp_path, *rows), LABELLED, base=tmp_path, seed=0)
    assert f"rows.jsonl, line {len(rows)}" in caught.value.what and fix in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("row", "what", "fix"),
    [
        (GOOD, "no column 'chosen'", "these rows are labelled answers: choose an algorithm"),
        ({**PAIR, "rejected": "2"}, 'chosen and rejected are both "2"', "remove the row"),
        ({**PAIR, "chosen": None}, "the answer 'chosen' is null", ""),
        ({**PAIR, "rejected": None}, "the answer 'rejected' is null", ""),
        ({"prompt": "1+1=", "chosen": "2"}, "no column 'rejected'", ""),
    ],
)
def test_a_row_that_is_no_pair_is_named_with_its_line(
    tmp_path: Path, row: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(DataError, match=what) as caught:
        open_task(written(tmp_path, row), PREFERENCES, base=tmp_path, seed=0)
    assert "rows.jsonl, line 1" in caught.value.what and fix in (caught.value.fix or "")


def test_problems_of_one_right_answer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="reasoning-gym") as caught:
        open_task(TaskConfig(source="reasoning-gym:x"), LABELLED, base=tmp_path, seed=0)
    assert "the algorithm needs labelled answers" in (caught.value.why or "")


def test_each_prompt_gets_the_answer_of_the_row_before_as_far_as_it_fits(tmp_path: Path) -> None:
    rows = [{**GOOD, "completion": text, "label": text != "12345"} for text in ("2", "12345", "34")]
    task = open_task(written(tmp_path, *rows), LABELLED, base=tmp_path, seed=0)
    tokenizer = Tokenizer(character_tokenizer("0123456789+=", 8))
    encoded = Encoder(tokenizer=tokenizer).rows(task.train, LABELLED)
    batch = LABELLED.batch(LABELLED.arranged(encoded, 8), 3)
    assert batch.ids.tolist() == [[3, index, sample] for index in range(3) for sample in (0, 1)]
    assert batch.dense("label").tolist() == [True, True, False, False, True, True]
    answers = [
        tokenizer.decode(row) for row in batch.ragged("tokens").where(batch.ragged("loss_mask")).lists()
    ]
    assert answers == ["2", "34", "12345", "2", "34", "1234"]
    assert max(batch.ragged("tokens").lengths[[1, 3, 5]].tolist()) == 8

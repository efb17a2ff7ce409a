"""Valid scores, to the last number and character."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path

import numpy as np
import pytest

from rillflow.rewards.calling import MESSAGE_CHARACTERS, _called, describe
from rillflow.rewards.outcome import is_verdict, shown_value, verdict_of

LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 0.0, True, 3, np.float32(0.5), None])
def test_a_score_is_what_float32_holds(value: object) -> None:
    assert verdict_of(value) == value and is_verdict(None if value is None else float(value))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float(np.nextafter(LARGEST, np.inf)), -1e39, float("nan"), "1", b"1", 1j])
def test_all_else_is_said_to_be_none(value: object) -> None:
    said = verdict_of(value)
    assert isinstance(said, str) and said.startswith("the score is ")
    assert is_verdict(said) and not (isinstance(value, float) and is_verdict(value))


@pytest.mark.parametrize("result", [[0, 1], (0, 1), iter([0, 1]), np.array([0, 1])])
def test_scores_are_read_from_any_iterable(result: object) -> None:
    told = _called(lambda: result, Path(), {"type": "call", "rows": 2, "columns": {}})
    assert told == {"type": "scores", "scores": [0, 1]}


@pytest.mark.parametrize("result", ["01", b"01", {0: 1, 1: 0}, {0, 1}, 1.0, np.array(1.0)])
def test_what_has_no_entry_for_each_row_is_malformed(result: object) -> None:
    told = _called(lambda: result, Path(), {"type": "call", "rows": 2, "columns": {}})
    assert told == {"type": "malformed", "what": f"returned {shown_value(result)}"}


def test_a_shown_value_has_200_characters_and_its_type() -> None:
    assert shown_value(list(range(9))) == "[0, 1, 2, 3, 4, 5, ...] (list)"

    class Long:
        def __repr__(self) -> str:
            return "x" * 500

    assert len(shown_value(Long())) <= 200 + len(" (Long)")
    nested = [["abcdefghijklmnopqrstuvwxyz" * 2] * 9] * 9
    assert len(shown_value(nested)) == 200 + len(" (list)")


def test_a_sentence_from_another_process_has_1000_characters_at_most() -> None:
    assert is_verdict("x" * 1000) and not is_verdict("x" * 1001)
    assert not is_verdict(1) and not is_verdict([1.0]) and not is_verdict({"late": "x"})


def test_a_long_message_is_cut_and_says_its_length(tmp_path: Path) -> None:
    whole = ValueError("x" * (2000 - len("ValueError: ")))
    assert describe(whole, tmp_path) == f"ValueError: {whole}"
    cut = ValueError("x" * (2001 - len("ValueError: ")))
    assert describe(cut, tmp_path) == f"{f'ValueError: {cut}'[:2000]}... (2001 characters)"
    assert MESSAGE_CHARACTERS == 2000


def test_the_last_line_of_the_users_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"def f():\n    g()  # {'y' * 400}\n\ndef g():\n    import json; json.loads('')\n")
    spec = importlib.util.spec_from_file_location("own", file)
    assert spec is not None and spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    with pytest.raises(ValueError) as raised:
        own.f()
    said = describe(raised.value, file)
    assert "(own.py, line 5, in g: import json; json.loads(''))" in said
    assert traceback.extract_tb(raised.value.__traceback__)[-1].filename != str(file)

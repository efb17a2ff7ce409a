"""The first different value is the first in the order in which a step computes its values."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rillflow.records.metrics import Mean, Metric
from rillflow.runs import layout
from rillflow.runs.json_lines import encode
from rillflow_parts.replay.comparison import ComparedStep, Difference, StepComparison, is_clocked

ROWS = {
    "tokens": [[1, 2, 3], [1, 4]],
    "versions": [[-1, 0, 0], [-1, 0]],
    "sampler_logprobs": [[0.0, -1.5, -2.5], [0.0, -0.5]],
}
METRICS: dict[str, Metric] = {
    "policy/loss/mean": Mean(total=1.0, count=2),
    "run/step_seconds/mean": Mean(total=3.0, count=1),
}
LINE = {"policy/loss/mean": {"mean": 0.5, "count": 2}, "run/step_seconds/mean": {"mean": 9.0, "count": 1}}


def write(
    run: Path, order: tuple[int, ...] = (0, 1), rewards: tuple[float, ...] = (1.0, 0.0), **rows: Any
) -> None:
    """Write the rollouts of step 1, with rows in an order."""
    (run / layout.ROLLOUTS).mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"ids": np.array([[0, 7, sample] for sample in order])}
    for name, values in {**ROWS, **rows}.items():
        taken = [values[row] for row in order]
        kind = np.float32 if name == "sampler_logprobs" else np.int32
        arrays[f"{name}:values"] = np.array([one for each in taken for one in each], kind)
        arrays[f"{name}:lengths"] = np.array([len(each) for each in taken])
    arrays["rewards:"] = np.array([rewards[row] for row in order], np.float32)
    save_file(arrays, layout.rollout_file(run, 1, 1, 1))


def compared(
    folder: Path, metrics: dict[str, Metric] = METRICS, line: dict[str, Any] = LINE, last: int = 2
) -> ComparedStep:
    steps: Any = {1: {"step": 1, "phase": "grpo", "metrics": line}}
    return StepComparison(folder / "one", steps, folder / "other", last).step(1, "grpo", metrics)


def difference(step: ComparedStep) -> Difference:
    assert step.difference is not None
    return step.difference


def test_equal_steps_are_equal_in_any_order_of_rows_and_times_do_not_count(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "other", order=(1, 0))
    found = compared(tmp_path)
    assert str(found) == "step 1: 2 rows, 1 metric, equal"


@pytest.mark.parametrize(
    ("changed", "place", "recorded", "replayed"),
    [
        ({"tokens": [[1, 2, 9], [1, 4]]}, "column tokens, row (epoch 0 prompt 7 sample 0), token 2", 3, 9),
        ({"tokens": [[1, 2], [1, 4]]}, "column tokens, row (epoch 0 prompt 7 sample 0), token length", 3, 2),
        ({"versions": [[-1, 0, 1], [-1, 0]], "tokens": [[1, 9, 3], [1, 4]]}, "column tokens, row", 2, 9),
        ({"versions": [[-1, 1, 0], [-1, 0]], "tokens": [[1, 9, 3], [1, 4]]}, "column versions, row", 0, 1),
        ({"rewards": (1.0, 0.5)}, "column reward, row (epoch 0 prompt 7 sample 1)", 0.0, 0.5),
        ({"rewards": (0.5, 0.0), "tokens": [[1, 2, 3], [1, 5]]}, "column tokens, row", 4, 5),
    ],
)
def test_the_first_value_is_named(
    tmp_path: Path, changed: dict[str, Any], place: str, recorded: float, replayed: float
) -> None:
    write(tmp_path / "one")
    write(tmp_path / "other", **changed)
    found = difference(compared(tmp_path))
    assert found.place.startswith(place)
    assert (found.recorded, found.replayed) == (recorded, replayed)
    assert found.by == replayed - recorded


def test_a_row_that_only_one_run_has_is_named(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "other", order=(0,))
    assert str(difference(compared(tmp_path))) == (
        "row (epoch 0 prompt 7 sample 1): recorded 'sampled', replayed '(missing)'"
    )


def test_metrics_are_compared_by_every_number_and_nan_equals_nan(tmp_path: Path) -> None:
    for run in ("one", "other"):
        (tmp_path / run).mkdir()
    nan: dict[str, Metric] = {"policy/loss/mean": Mean(total=math.nan, count=2)}
    found = compared(tmp_path, nan, {"policy/loss/mean": {"mean": math.nan, "count": 2}})
    assert found.difference is None
    found = compared(tmp_path, nan, {"policy/loss/mean": {"mean": math.nan, "count": 3}})
    assert difference(found).place == "metric policy/loss/mean, count"
    found = compared(tmp_path, {}, LINE)
    assert difference(found).replayed == "(missing)"
    found = compared(tmp_path, {**METRICS, "a/b/mean": Mean(total=1, count=1)}, LINE)
    assert difference(found).place == "metric a/b/mean"


def test_a_missing_evaluation_counts_before_the_last_step(tmp_path: Path) -> None:
    for run in ("one", "other"):
        (tmp_path / run).mkdir()
    line = {"step": 1, "time_s": 5.0, "mean_reward": 0.5}
    (tmp_path / "one" / layout.EVALUATIONS).write_bytes(encode(line))
    assert difference(compared(tmp_path)).place == "evaluation, length"
    assert compared(tmp_path, last=1).left_out == ["evaluation, the replay made none after its last step"]
    (tmp_path / "other" / layout.EVALUATIONS).write_bytes(encode({**line, "time_s": 6.0}))
    assert compared(tmp_path).compared["evaluations"] == 1
    (tmp_path / "other" / layout.EVALUATIONS).write_bytes(encode({**line, "mean_reward": 0.75}))
    assert difference(compared(tmp_path)).by == 0.25


def test_metrics_in_seconds_are_those_of_a_clock() -> None:
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text("utf-8").split("## Derived")[0]
    rows = re.findall(r"^\| (`[^|]*`) \| [^|]* \| ([^|]*) \|", page, flags=re.MULTILINE)
    known = {name: told for names, told in rows for name in re.findall(r"`([^`]+)`", names)}
    assert {name for name in known if is_clocked(name)} == {
        name
        for name, told in known.items()
        if "seconds" in told
        or name == "flight/lag/max"
        or name.startswith(("gather/", "reward_metrics/", "cost_metrics/", "rollout_metrics/"))
    }
    assert len(known) > 50

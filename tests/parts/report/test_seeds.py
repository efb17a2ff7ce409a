"""Seeds and media: a report shows the other seeds of its sweep, and the files in the folder media."""

from __future__ import annotations

import base64
import html
from pathlib import Path

import pytest

from rillflow.records.metrics import Max, Mean, Min
from rillflow.runs.reader import Evaluation
from rillflow.runs.run_directory import RunDirectory
from rillflow_parts.report import media
from rillflow_parts.report.media import draw_media
from rillflow_parts.report.seeds import draw_seeds, seeds_of


def written(path: Path, values: list[float]) -> Path:
    """Write a run with one episode return and one evaluation per step."""
    with RunDirectory.open(path, {"kind": "classic"}) as run:
        for step, value in enumerate(values, 1):
            run.log_metrics(step, "ppo", {"episode/return/mean": Mean(total=value, count=1)})
            run.log_evaluation(
                step, Evaluation(count=2, mean_reward=value, is_accuracy=False, is_return=True)
            )
    return path


def test_the_report_of_a_sweeps_run_draws_the_mean_of_all_seeds(tmp_path: Path) -> None:
    runs = [written(tmp_path / f"seed-{seed}", [seed, 10.0 + 2 * seed, 7.0][: 2 + seed]) for seed in (0, 1)]
    assert seeds_of(runs[1]) == runs
    page = "".join(draw_seeds(runs[0]))
    assert "Episode return, 2 seeds" in page and "Evaluation: mean return, 2 seeds" in page
    assert ">11.0<" in page, "the last common step has the values 10 and 12"


def test_a_step_without_a_value_of_a_seed_has_one_between_its_neighbours(tmp_path: Path) -> None:
    for seed, values in enumerate([{1: 0.0, 3: 8.0, 4: 8.0}, {1: 2.0, 2: 6.0, 5: 9.0}]):
        with RunDirectory.open(tmp_path / f"seed-{seed}", {}) as run:
            for step in range(1, 6):
                mean = Mean(total=values.get(step, 0.0), count=int(step in values))
                run.log_metrics(step, "ppo", {"episode/return/mean": mean} if mean.count else {})
    page = html.unescape("".join(draw_seeds(tmp_path / "seed-0")))
    assert '"x":[1,2,3,4]' in page, "step 5 is not common"
    assert '"y":[1,5,7.5,8]' in page, "the means of 0 and 2, 4 and 6, 8 and 7, 8 and 8"


def test_a_run_of_its_own_has_no_seeds(tmp_path: Path) -> None:
    assert draw_seeds(written(tmp_path / "run", [1.0])) == []
    assert draw_seeds(written(tmp_path / "seed-0", [1.0])) == []


def test_a_long_run_has_few_points(tmp_path: Path) -> None:
    for seed in (0, 1):
        with RunDirectory.open(tmp_path / f"seed-{seed}", {}) as run:
            for step in range(1, 1001):
                run.log_metrics(step, "ppo", {"episode/return/mean": Mean(total=step, count=1)})
    assert len("".join(draw_seeds(tmp_path / "seed-0"))) < 20_000


def test_files_in_media_are_embedded_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert draw_media(tmp_path) == []
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a-b.png").write_bytes(b"picture")
    (folder / "c.mp4").write_bytes(b"video")
    (folder / "d.txt").write_bytes(b"text")
    page = "".join(draw_media(tmp_path))
    assert f"data:image/png;base64,{base64.b64encode(b'picture').decode()}" in page
    assert "<video" in page and "a b" in page and base64.b64encode(b"text").decode() not in page
    monkeypatch.setattr(media, "MOST_BYTES", 5)
    assert "too much for this page" in "".join(draw_media(tmp_path))


def test_the_band_of_a_mean_reward_stays_in_the_range_of_the_rewards(tmp_path: Path) -> None:
    for seed, value in enumerate((0.6, 1.0)):
        with RunDirectory.open(tmp_path / f"seed-{seed}", {}) as run:
            ends = {"reward/score/min": Min(value=0.0), "reward/score/max": Max(value=1.0)}
            for step in (1, 2):
                run.log_metrics(step, "grpo", {"reward/score/mean": Mean(total=8 * value, count=8), **ends})
    page = html.unescape("".join(draw_seeds(tmp_path / "seed-0")))
    assert '"low":[0,0],"high":[1,1]' in page, "Student's interval of two seeds is -1.74 to 3.34"

"""Pictures of every kind make a video, and one that fails is a note: the run is finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import rillflow
from rillflow.runs import layout
from rillflow_classic import evaluation
from rillflow_classic.environments.pictures import picture_of

ODD = Path(__file__).with_name("odd.py")
Said = Callable[[], str]
SHOWN = {
    **dict.fromkeys(("bytes", "floats", "large floats", "16 bits", "gray", "one channel", "alpha"), (24, 16)),
    **dict.fromkeys(("gray and alpha", "channels first", "list", "nested lists", "same memory"), (24, 16)),
    "flags": (24, 16),
    "int64": (24, 16),
    "nan": (24, 16),
    "none after 4": (24, 16),
    "changing size": (30, 10),
    "huge": (320, 400),
    "tall": (1, 480),
    "one pixel": (1, 1),
}
"""Size of the video by kind of picture."""
FAILS = {
    "none": "it shows no pictures",
    "empty list": "it shows no pictures",
    "not written": "it shows no pictures",
    "text": "TypeError: render returned str of <U7",
    "words": "TypeError: render returned ndarray of <U1",
    "object": "TypeError: render returned object of object",
    "wrong shape": "ValueError: render returned an array [5, 7, 11]",
    "line": "ValueError: render returned an array [9]",
    "no pixels": "ValueError: render returned an array [0, 5, 3]",
    "raises at 3": "RuntimeError: the display is gone",
    "raises at once": "OSError: no display",
    "exits": "SystemExit: no display",
}
"""Part of the note by kind of picture."""


def train(folder: Path, kind: str, fails: str = "", **settings: Any) -> Any:
    recipe: dict[str, Any] = {
        "kind": "classic",
        "environment": {"id": f"{ODD}:Display", "run": "inline", "arguments": {"kind": kind, "fails": fails}},
        "network": {"hidden": [8]},
        "algorithm": {"name": "ppo", "steps": 1},
        "workers": {"slots": 2, "steps": 16},
        "evaluate": {"episodes": 2},
        "run": {"threads": 1, "dir": str(folder / "run")},
    }
    return rillflow.train({**recipe, **settings})


def videos(run: Any) -> list[Path]:
    return sorted((run.path / layout.MEDIA).glob("*"))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Return a function that returns what runs have said since its last call."""
    return lambda: capsys.readouterr().out


@pytest.mark.parametrize("kind", SHOWN)
def test_every_kind_of_picture_makes_a_video(kind: str, tmp_path: Path, said: Said) -> None:
    run = train(tmp_path, kind)
    assert run.is_finished and "no video" not in said()
    with Image.open(videos(run)[0]) as video:
        assert video.size == SHOWN[kind]
        if kind in ("floats", "gray", "16 bits", "alpha", "channels first", "same memory", "list"):
            video.seek(5)
            middle = np.asarray(video.convert("RGB"))[8, 12]
            assert np.allclose(middle, 100, atol=4), "the brightness of step 5"


@pytest.mark.parametrize("kind", FAILS)
def test_a_picture_that_fails_is_a_note(kind: str, tmp_path: Path, said: Said) -> None:
    run = train(tmp_path, kind)
    assert run.is_finished and videos(run) == []
    assert FAILS[kind] in said()


@pytest.mark.parametrize(
    ("fails", "words"),
    [("made", "ImportError: no graphics"), ("step", "RuntimeError: the window is too small")],
)
def test_graphics_that_fail_are_a_note(fails: str, words: str, tmp_path: Path, said: Said) -> None:
    run = train(tmp_path, "bytes", fails)
    assert run.is_finished and words in said()


@pytest.mark.parametrize("fails", [pytest.param("close", marks=pytest.mark.slow), "exits in close"])
@pytest.mark.parametrize("run", ["inline", "processes"])
def test_a_close_that_raises_ends_no_run(
    fails: str, run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"id": f"{ODD}:Display", "run": run, "arguments": {"kind": "bytes", "fails": fails}}
    found = train(tmp_path, "bytes", environment=environment)
    assert found.is_finished and len(videos(found)) == 1
    assert any("Display.close raised" in said and "odd.py" in said for said in caplog.messages)


def test_an_encoder_that_fails_is_a_note(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def animated(frames: Any) -> bytes:
        raise OSError(f"no encoder for {len(frames)} frames")

    monkeypatch.setattr(evaluation, "animated", animated)
    run = train(tmp_path, "bytes")
    assert run.is_finished and "OSError: no encoder for 9 frames" in said()


def test_a_run_goes_on_after_a_failed_picture(tmp_path: Path, said: Said) -> None:
    dqn = {"name": "dqn", "steps": 2, "learning_starts": 10}
    first = train(tmp_path, "raises at 3", algorithm=dqn)
    assert first.is_finished and not videos(first)
    again = train(tmp_path, "raises at 3", algorithm={**dqn, "steps": 4})
    assert again.is_finished and said().count("the display is gone") == 2 and not videos(again)


def test_a_long_film_keeps_few_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MOST_FRAMES", 2)
    with Image.open(videos(train(tmp_path, "bytes"))[0]) as video:
        assert video.n_frames <= 2  # type: ignore[attr-defined]


def test_floats_of_a_dark_picture_stay_dark() -> None:
    assert picture_of(np.zeros((2, 2, 3)))[0, 0, 0] == 0  # type: ignore[index]
    assert picture_of(np.full((2, 2, 3), 200.0))[0, 0, 0] == 200  # type: ignore[index]
    assert picture_of(np.full((2, 2, 3), -5))[0, 0, 0] == 0  # type: ignore[index]

"""Runs that their reward function holds in the middle of a step, so that they end there.

hold: a file with the number of a call ─> that call touches the file held, and waits until hold is gone
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from tests.flows.warm import Command

SCORES = """
import time
from pathlib import Path
HOLD, HELD = Path({hold!r}), Path({held!r})
calls = 0

def reward(prompts, completions, answer, **_):
    global calls
    calls += 1
    while HOLD.exists() and calls == int(HOLD.read_text()):
        HELD.touch()
        time.sleep(0.02)
    return [sum(letter < "5" for letter in text) / 4 for text in completions]

def cost(prompts, completions, answer, **_):
    return [float(max(0, len(text) - len(right))) for text, right in zip(completions, answer)]
"""


def write_scores(folder: Path) -> None:
    """Write scores.py next to a recipe, with a reward that can be held and a cost."""
    paths = {"hold": str(folder / "hold"), "held": str(folder / "held")}
    (folder / "scores.py").write_text(SCORES.format(**paths))


def ended_in_the_middle(
    recipe: Path, run: Path, call: int, *how: signal.Signals, more: tuple[str, ...] = ()
) -> str:
    """Start a real run, end it by signals in a call of the reward, and return its output.

    SIGTERM or SIGINT once lets the step end; a second signal or SIGKILL does not.

    Args:
        recipe: a recipe with the reward of ``write_scores``.
        run: the run's directory.
        call: number of the call, from 1.
        how: the signals.
        more: more words of the command.
    """
    hold, held = recipe.parent / "hold", recipe.parent / "held"
    hold.write_text(str(call))
    said = run.parent / f"{run.name}.txt"
    process = Command(["run", str(recipe), "--dir", str(run), *more], said)
    deadline = time.monotonic() + 120
    while not held.exists():
        assert process.poll() is None, process.said
        assert time.monotonic() < deadline, "the reward was not called in two minutes"
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, "the reward runs in a child"
    for each in how:
        os.kill(process.pid, each)
        time.sleep(0.2)  # two signals at once would count as one
    if signal.SIGKILL in how or len(how) > 1:
        process.wait(60)
    hold.unlink()
    code = process.wait(60)
    assert not psutil.wait_procs(children, timeout=20)[1], "a child outlived the run"
    assert code == (-9 if signal.SIGKILL in how else 128 + how[-1]), process.said
    return process.said

"""The first signal asks, the second one ends, and the handlers that were there come back."""

from __future__ import annotations

import os
import signal
import threading
from queue import SimpleQueue

import pytest

from rillflow.pipeline.interrupt import Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_asks_and_second_ends(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert not interruption.requested
        os.kill(os.getpid(), number)
        assert interruption.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_the_first_signal_is_answered_while_the_step_still_runs() -> None:
    told: SimpleQueue[str] = SimpleQueue()
    with Interruption(told.put) as interruption:
        interruption.pace = " (the last one took 12 s)"
        os.kill(os.getpid(), signal.SIGTERM)
        answer = told.get(timeout=10)
        assert interruption.requested
    assert answer.startswith("SIGTERM: finishing this step (the last one took 12 s), then a checkpoint")
    assert "once more to end at once" in answer
    assert told.empty()


def test_outside_the_main_thread_it_is_harmless() -> None:
    seen: list[bool] = []

    def enter() -> None:
        with Interruption() as interruption:
            seen.append(interruption.requested)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10)
    assert seen == [False]

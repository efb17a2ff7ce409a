"""Two calls of a rank take turns, run their common work in one thread, and end together on an error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rillflow.errors import Signalled, TrainingError
from rillflow_parts.fusion.alternating_calls import BatonSide, PartnerEnded, run_both


class Role:
    """A role whose call meets the other one a number of times."""

    def __init__(self, name: str, meetings: int, log: list[str]) -> None:
        self.name, self.meetings, self.log = name, meetings, log
        self.side: BatonSide | None = None

    def call(self) -> list[Any]:
        found = []
        for index in range(self.meetings):
            self.log.append(f"{self.name}{index}")
            assert self.side is not None
            found.append(self.side.meet(f"{self.name}{index}", self.together))
        self.log.append(f"{self.name} ends")
        return found

    def together(self, one: str, other: str) -> tuple[str, str] | None:
        self.log.append(f"{one}+{other}")
        return f"{one} with {other}", f"{other} with {one}"


def both(one: Role, other: Role, calls: Sequence[Callable[[], Any]] | None = None) -> list[Any]:
    found = run_both([one, other], calls or [one.call, other.call])
    assert one.side is None and other.side is None
    return found


def test_calls_meet_as_often_as_both_have_work() -> None:
    log: list[str] = []
    found = both(Role("a", 3, log), Role("b", 2, log))
    assert found == [["a0 with b0", "a1 with b1", None], ["b0 with a0", "b1 with a1"]]
    assert log == [*("a0", "b0", "a0+b0", "a1", "b1", "a1+b1", "a2", "b ends", "a ends")]


@pytest.mark.parametrize(("one", "other"), [(0, 2), (2, 0), (0, 0), (1, 3)])
def test_a_call_without_a_partner_works_alone(one: int, other: int) -> None:
    log: list[str] = []
    first, second = both(Role("a", one, log), Role("b", other, log))
    met = min(one, other)
    assert [each is not None for each in first] == [True] * met + [False] * (one - met)
    assert [each is not None for each in second] == [True] * met + [False] * (other - met)


def test_work_that_had_better_run_alone_is_left_to_each() -> None:
    log: list[str] = []
    one, other = Role("a", 2, log), Role("b", 2, log)
    one.together = other.together = lambda *_: None  # type: ignore[method-assign]
    assert both(one, other) == [[None, None], [None, None]]


def test_only_one_call_runs_at_a_time() -> None:
    running, most, lock = 0, 0, threading.Lock()
    log: list[str] = []

    class Counted(Role):
        def call(self) -> list[Any]:
            nonlocal running, most
            for index in range(self.meetings):
                with lock:
                    running += 1
                    most = max(most, running)
                threading.Event().wait(0.01)
                with lock:
                    running -= 1
                assert self.side is not None
                self.side.meet(index, self.together)
            return []

    both(Counted("a", 5, log), Counted("b", 5, log))
    assert most == 1


def raising(role: Role, at: int, error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        for index in range(at):
            assert role.side is not None
            role.side.meet(index, role.together)
        raise error

    return call


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("who", [0, 1])
def test_an_error_of_one_call_ends_both_and_is_raised(who: int, at: int) -> None:
    log: list[str] = []
    roles = [Role("a", 5, log), Role("b", 5, log)]
    calls = [each.call for each in roles]
    calls[who] = raising(roles[who], at, TrainingError("the loss is inf"))
    ended: list[BaseException] = []

    def watched() -> Any:
        try:
            return roles[1 - who].call()
        except PartnerEnded as error:
            ended.append(error)
            raise

    calls[1 - who] = watched
    with pytest.raises(TrainingError, match="the loss is inf"):
        both(*roles, calls)
    assert log.count("a ends") == log.count("b ends") == 0
    assert len(ended) == (not (who == 0 and at == 0))
    assert threading.active_count() == 1 or all(t.name != "fused call" for t in threading.enumerate())


def test_an_error_of_the_common_work_ends_both() -> None:
    log: list[str] = []
    one, other = Role("a", 1, log), Role("b", 1, log)

    def broken(*_: Any) -> Any:
        raise RuntimeError("connection closed by peer")

    one.together = other.together = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="connection closed"):
        both(one, other)


def test_a_stop_ends_both() -> None:
    log: list[str] = []
    roles = [Role("a", 5, log), Role("b", 5, log)]
    with pytest.raises(Signalled):
        both(*roles, [raising(roles[0], 2, Signalled()), roles[1].call])
    assert "b ends" not in log


def test_the_helper_thread_has_the_settings_of_the_caller() -> None:
    found: list[tuple[bool, int]] = []

    def seen() -> None:
        found.append((torch.is_grad_enabled(), torch.get_num_threads()))

    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            run_both([Role("a", 0, []), Role("b", 0, [])], [seen, seen])
    assert found[0] == found[1] and found[2] == found[3]
    assert [each for each, _ in found] == [True, True, False, False]


def test_a_stop_that_arrives_while_the_caller_waits_ends_the_helper_first() -> None:
    """As on a rank: the signal's handler raises in the main thread, which waits for the second call."""
    ended: list[str] = []

    class Slow(Role):
        def call(self) -> list[Any]:
            signal.raise_signal(signal.SIGUSR2)  # Python runs its handler in the main thread
            for _ in range(20):
                threading.Event().wait(0.01)
            ended.append(self.name)
            return super().call()

    def stop(*_: object) -> None:
        raise Signalled

    before = signal.signal(signal.SIGUSR2, stop)
    try:
        for meetings in (0, 1):
            log: list[str] = []
            with pytest.raises(Signalled):
                both(Role("a", meetings, log), Slow("b", 3, log))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert ended == ["b", "b"]

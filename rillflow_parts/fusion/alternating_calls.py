"""Alternating calls: run two calls of one rank in two threads, of which one runs at a time.

    caller's thread   first   ── runs ─┐ meet           ┌ runs both meetings, goes on ─┐ meet, or its end
    a helper thread   second           └─ runs ── meet ─┘                              └─ goes on ── ...

A call offers work that it could share (``BatonSide.meet``) and hands the baton on. Once both have offered,
the caller's thread runs the two offers together. A call whose partner has ended runs its own work alone. The
baton changes hands only there and at the end of a call, so ranks that make the same calls switch at the same
points: their collectives keep one order.

    meet        consumes   this call's offer
                waits for  the baton, which the other call hands on at its next meeting or its end
                produces   this call's share of the common work; None if it has no partner left
    an error    ends both calls: the other one raises ``PartnerEnded`` at its next meeting. Then ``run_both``
                raises the first error; so does a stop, which arrives in the caller's thread
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from rillflow.errors import ClusterError

Together = Callable[[Any, Any], tuple[Any, Any] | None]
"""Function that runs the offers of the first and the second call; None if each had better run alone."""


class PartnerEnded(ClusterError):
    """The other of two fused calls raised an error, which is the one that is reported."""


class Sharing(Protocol):
    """Work of a call that it can share with the other call."""

    side: BatonSide | None
    """Side of the baton while two calls run; else None."""


class BatonSide:
    """One of two calls."""

    def __init__(self, baton: Baton, index: int) -> None:
        self._baton, self._index = baton, index

    def meet(self, offer: Any, together: Together) -> Any:
        """Return this call's share of the common work of both offers; None if it has to run alone.

        Args:
            offer: this call's work.
            together: runs both offers; the same function in both calls.

        Raises:
            PartnerEnded: the other call raised an error.
        """
        return self._baton.meet(self._index, offer, together)


class Baton:
    """Turns of two calls; index 0 is the caller's thread."""

    def __init__(self) -> None:
        self.sides = BatonSide(self, 0), BatonSide(self, 1)
        """The sides of the two calls."""
        self._condition = threading.Condition()
        self._holder = 0
        self._open = [True, True]
        self._offers: list[Any] = [None, None]
        self._share: Any = None
        self._has_failed = False

    def meet(self, index: int, offer: Any, together: Together) -> Any:
        """See BatonSide."""
        other = 1 - index
        if not self._has_failed and not self._open[other]:
            return None
        self._offers[index] = offer
        self._hand_on(other)
        self.wait(index)
        if index:  # the caller's thread has run both, or left each to itself
            share, self._share = self._share, None
            return share
        offers, self._offers = self._offers, [None, None]
        if not self._open[other]:
            return None
        own, self._share = together(*offers) or (None, None)
        return own

    def wait(self, index: int) -> None:
        """Wait for the baton.

        Raises:
            PartnerEnded: the other call raised an error.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._holder == index or self._has_failed)
            if self._has_failed:
                raise PartnerEnded("the fused call ended", why="the other role's call raised an error")

    def end(self, index: int, *, has_failed: bool) -> None:
        """End a call, and hand the baton on."""
        self._open[index], self._offers[index] = False, None
        with self._condition:
            self._has_failed = self._has_failed or has_failed
        self._hand_on(1 - index)

    def _hand_on(self, index: int) -> None:
        with self._condition:
            self._holder = index
            self._condition.notify_all()


def run_both(sharing: Sequence[Sharing], calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run two calls with a baton; return both results.

    Args:
        sharing: the work of each call.
        calls: the calls; each returns its result.

    Raises:
        BaseException: the first error of either; the other call has ended too.
    """
    baton, values, errors = Baton(), [None, None], list[BaseException]()

    def run(index: int) -> None:
        try:
            baton.wait(index)
            values[index] = calls[index]()
        except BaseException as error:  # noqa: BLE001  raised below, in the caller's thread
            errors.append(error)
            baton.end(index, has_failed=True)
        else:
            baton.end(index, has_failed=False)

    settled = _thread_settings()

    def help_out() -> None:
        with settled():
            run(1)

    helper = threading.Thread(target=help_out, name="fused call", daemon=True)
    with ExitStack() as fused:
        for work, side in zip(sharing, baton.sides, strict=True):
            fused.callback(setattr, work, "side", None)
            work.side = side
        helper.start()
        try:
            run(0)
        except BaseException as stop:  # noqa: BLE001  it arrived while the baton changed hands
            errors.insert(0, stop)
            baton.end(0, has_failed=True)
        while True:
            try:
                helper.join()
                break
            except BaseException as stop:  # noqa: BLE001  a rank runs no other call before the helper ends
                errors.insert(0, stop)
                baton.end(0, has_failed=True)
    if errors:
        raise errors[0]
    return values


def _thread_settings() -> Callable[[], ExitStack]:
    """Return a function that gives a new thread this thread's settings of torch, within its context.

    The device needs no setting: every rank computes on the first accelerator that it sees.
    """
    has_gradients, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    threads = torch.get_num_threads()

    def settle() -> ExitStack:
        torch.set_num_threads(threads)
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(is_inference))
        stack.enter_context(torch.set_grad_enabled(has_gradients))
        return stack

    return settle

"""Inside the child: load the user's file, call the function, check its scores.

    load frame ── limits, import, signature ──> ready | refused
    call frame ── function(**columns) ── one verdict per row ──> scores | raised | malformed
    run frame ─── function(**columns) ── any JSON ─────────────> returned | raised
    a function with a parameter log_metric gets a callable; its sums travel in the same answer
    in the sandbox: the same calls, each row in its own fork; see rewards/isolated_process.py

    consumes      frames from the request pipe
    waits for     the next frame; the supervisor ends this process when the driver exits
    unblocked by  a frame, or the end of the pipe
    produces      exactly one frame for each
    shuts down    healthy: killed while it waits; crash: the supervisor reports how the process ended

It uses only the standard library, so that a reward function starts as fast as the interpreter.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from rillflow.isolation.frames import Frame, encode, read_frames, write_all
from rillflow.rewards.isolated_process import IsolatedRows
from rillflow.rewards.logged import LOG_METRIC, Logged
from rillflow.rewards.outcome import VALUE_CHARACTERS, shown_value, verdict_of

MESSAGE_CHARACTERS = 2000
"""Longest text about one exception."""

_NOT_ROWS = (str, bytes, bytearray, Mapping, Set)


class Refused(Exception):
    """The file cannot be loaded, or the name is not a function that takes columns by name."""


class _Loader(SourceFileLoader):
    """Loader for a file, or for the text sent in its place; tracebacks find the lines of either."""

    text = ""
    """Source that the driver sent."""

    def get_data(self, path: str) -> bytes:
        """Return the source."""
        return self.text.encode() or super().get_data(path)


def serve(
    requests: int,
    answers: int,
    *,
    level: str = "none",
    shortcomings: Sequence[str] = (),
    isolated: IsolatedRows | None = None,
) -> None:
    """Answer every frame until the request pipe ends.

    Args:
        requests: file descriptor of the request pipe.
        answers: file descriptor of the answer pipe.
        level: sandbox level, reported to the driver.
        shortcomings: guarantees that this machine lacks, reported to the driver.
        isolated: runs every row in a namespace of its own; None calls the function in this process.
    """
    process = os.getpid()

    def answer(frame: Frame) -> None:
        if os.getpid() != process:
            os._exit(0)  # a fork that returned from the user's code must not answer again
        write_all(answers, encode(frame))

    frames = read_frames(requests)
    load = next(frames, None)
    if load is None:
        return
    try:
        shortcomings = [*shortcomings, *_limit(load["memory_bytes"])]
        function = load_function(load)
        if isolated is not None:
            _require_namespace(isolated)
        answer(
            {
                "type": "ready",
                "at_s": time.monotonic(),  # all processes share this clock: a busy driver reads this late
                "level": level,
                "shortcomings": "; ".join(shortcomings),
                **_parameters(function),
            }
        )
    except Refused as refusal:
        answer({"type": "refused", "what": str(refusal)})
        return
    call = partial(_called, function, Path(load["file"]), logs=LOG_METRIC in _named(function))
    for request in frames:
        answered = call(request) if isolated is None else isolated.call(call, request)
        answer({**answered, "number": request["number"]})


def _require_namespace(isolated: IsolatedRows) -> None:
    """Try a namespace before a row needs one.

    Raises:
        Refused: the kernel does not allow one.
    """
    tried = isolated.call(lambda _: {"type": "returned", "what": "null"}, {"type": "try"})
    if tried["type"] != "returned":
        raise Refused(f"could not be sandboxed: a process for one row {tried['what']}")


def _limit(memory_bytes: int) -> list[str]:
    """Limit this process; return the limits that the platform refuses."""
    try:
        for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory_bytes)):
            hard = resource.getrlimit(limit)[1]
            least = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (least, least))
    except (ValueError, OSError) as error:
        return [f"memory is not limited: {error}"]
    return []


def load_function(request: Frame) -> Callable[..., Any]:
    """Load a file, or the text in its place; return what it binds to a name.

    Args:
        request: ``file``, ``text``, ``name``, and ``path`` with further entries of ``sys.path``.

    Raises:
        Refused: the file raises, or the name cannot be called.
    """
    file = Path(request["file"])
    sys.argv = [str(file)]
    sys.path.insert(0, str(file.parent))
    sys.path.extend(entry for entry in request["path"] if entry not in sys.path)
    module_name = file.stem if file.stem not in sys.modules else f"reward_{file.stem}"
    loader = _Loader(module_name, str(file))
    loader.text = request["text"]
    spec = importlib.util.spec_from_file_location(module_name, file, loader=loader)
    assert spec is not None, "a spec made with a loader is never None"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        loader.exec_module(module)
    except BaseException as error:  # noqa: BLE001  the user's file may raise anything
        raise Refused(f"cannot be loaded: {describe(error, file)}") from None
    function: Callable[..., Any] | None = vars(module).get(request["name"])
    if not callable(function):
        raise Refused(f"is {shown_value(function)}, which cannot be called")
    return function


def _parameters(function: Callable[..., Any]) -> Frame:
    try:
        every = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise Refused(f"has no readable signature: {error}") from None
    parameters = [each for each in every.values() if each.name != LOG_METRIC]  # no column, but a callable
    for each in parameters:
        if each.kind is each.POSITIONAL_ONLY and each.default is each.empty:
            raise Refused(f"{_place(function)}takes {each.name!r} by position; columns are passed by name")
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return {
        "accepted": [each.name for each in named],
        "required": [each.name for each in named if each.default is each.empty],
        "takes_any": any(each.kind is each.VAR_KEYWORD for each in parameters),
    }


def _named(function: Callable[..., Any]) -> Set[str]:
    """Return the names of a function's parameters."""
    return inspect.signature(function).parameters.keys()


def _place(function: Callable[..., Any]) -> str:
    """Return the location of a function as the start of a sentence; empty for another kind of callable."""
    plain = inspect.unwrap(function)
    if not inspect.isfunction(plain):
        return ""
    return f"({Path(plain.__code__.co_filename).name}, line {plain.__code__.co_firstlineno}) "


def _called(function: Callable[..., Any], file: Path, request: Frame, *, logs: bool = False) -> Frame:
    """Call the function; ``logs`` says whether it takes ``log_metric``."""
    logged = Logged()
    try:
        result = function(**{**request["columns"], **({LOG_METRIC: logged} if logs else {})})
        if inspect.iscoroutine(result):
            import asyncio  # imported only here: it doubles the start time of a child

            result = asyncio.run(result)
        if request["type"] == "run":
            return {"type": "returned", "what": json.dumps(result), **_sums(logged)}
        values = _entries(result)
        if values is None:
            return {"type": "malformed", "what": f"returned {shown_value(result)}"}
        verdicts = [verdict_of(value) for value in values]
    except BaseException as error:  # noqa: BLE001  the user's function may raise anything
        return {"type": "raised", "what": f"raised {describe(error, file)}"}
    if len(verdicts) != request["rows"]:
        return {"type": "malformed", "what": f"returned {len(verdicts)} scores for {request['rows']} rows"}
    return {"type": "scores", "scores": verdicts, **_sums(logged)}


def _sums(logged: Logged) -> Frame:
    return {"logged": logged.sums} if logged.sums else {}


def _entries(result: Any) -> Iterator[Any] | None:
    """Return an iterator with one entry per row; None if the result is not iterable by rows."""
    if isinstance(result, _NOT_ROWS):
        return None
    try:
        entries: Iterator[Any] = iter(result)
    except TypeError:  # also an array without dimensions, which has __iter__
        return None
    return entries


def describe(error: BaseException, file: Path) -> str:
    """Return the error's type and message, and the last line of the user's file in its traceback."""
    text = "".join(traceback.format_exception_only(error)).strip()
    if len(text) > MESSAGE_CHARACTERS:
        text = f"{text[:MESSAGE_CHARACTERS]}... ({len(text)} characters)"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if not own:
        return text
    line = (own[-1].line or "")[:VALUE_CHARACTERS]
    return f"{text} ({file.name}, line {own[-1].lineno}, in {own[-1].name}: {line})"

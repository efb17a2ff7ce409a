"""The engine queue: requests take turns, and a failing row ends without affecting others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("starlette", reason="the door is the extra `service`")

from rillflow.errors import RillflowError, RowError, StreamError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import EngineLost
from rillflow.rollout.native.engine import NativeEngine
from rillflow.serving.http_body import Declined
from rillflow_parts.endpoint.engine_queue import EngineQueue, Told, Wanted

ROWS = 8
USUAL = RolloutConfig(max_tokens=20, max_rows=ROWS)


class Faulty(NativeEngine):
    """Fails at a given point, and records the order of rows."""

    def __init__(self, model: LanguageModel) -> None:
        how: dict[str, Any] = {"stop_tokens": frozenset(), "seed": 5, "context": model.context, "workers": 1}
        super().__init__(model.module, USUAL, **how)
        self.order: list[RowId] = []
        self.refuses = self.breaks_on = self.names = -1
        self.passes, self.breaks_at = 0, -1
        self.loses_on = self.is_lost_at = -1

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        if rollout.row.prompt == self.loses_on:
            raise EngineLost("its process was killed")
        if rollout.row.prompt == self.refuses:
            raise KeyError(rollout.row.prompt)
        super().add(rollout, sampling)
        self.order.append(rollout.row)

    def step(self) -> list[Rollout]:
        self.passes += 1
        if self.passes == self.is_lost_at:
            raise BrokenPipeError
        running = {row.prompt for row in self._workers[0]._scheduler._rows}
        if running & {self.breaks_on, self.names} or self.passes == self.breaks_at:
            self._clear()
            if self.names in running:
                raise RowError("the logits are odd", row=RowId(0, self.names, 0))
            raise IndexError("an index of nobody's")
        return super().step()


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    new = NewModel(hidden=32, layers=1, heads=2, kv_heads=1, context=64, alphabet="0123456789")
    yield load_model(ModelConfig(new=new), seed=3, device=torch.device("cpu"), base=Path())
    torch.set_num_threads(threads)


@pytest.fixture
def engine(model: LanguageModel) -> Faulty:
    return Faulty(model)


@pytest.fixture
def queue(engine: Faulty, model: LanguageModel) -> Iterator[EngineQueue]:
    made = EngineQueue(engine, model.tokenizer, max_rows=ROWS)
    yield made
    made.close()


def wanted(
    told: dict[int, Told],
    prompt: int,
    sample: int = 0,
    max_tokens: int = 20,
    is_left: Callable[[], bool] = lambda: False,
) -> Wanted:
    def tell(what: Told, is_over: bool) -> None:
        assert is_over and told.setdefault(100 * sample + prompt, what) is what, "told once"

    return Wanted(
        begin=Rollout.start(RowId(0, prompt, sample), [1, 2, 3]),
        sampling=USUAL.model_copy(update={"max_tokens": max_tokens}),
        stops=(),
        is_streamed=False,
        tell=tell,
        is_left=is_left,
    )


def drained(queue: EngineQueue) -> list[RillflowError]:
    """Run passes until nothing is left; return the errors that they raised."""
    errors: list[RillflowError] = []
    for _ in range(2000):
        try:
            if not queue.turn():
                return errors
        except RillflowError as error:
            errors.append(error)
    raise AssertionError("the queue does not come to an end")


def alone(engine: Faulty, prompts: range) -> dict[int, tuple[int, ...]]:
    """Return the tokens of undisturbed rows."""
    rows = [Rollout.start(RowId(0, prompt, 0), [1, 2, 3]) for prompt in prompts]
    for row in rows:
        engine.add(row, USUAL)
    found: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        found |= {row.row.prompt: row.tokens for row in engine.step()}
    engine.order.clear()
    engine.passes = 0
    return found


def tokens_of(told: dict[int, Told]) -> dict[int, tuple[int, ...]]:
    return {number: what.tokens for number, what in told.items() if isinstance(what, Rollout)}


def test_a_small_request_is_admitted_after_one_row_of_each_large_one(
    queue: EngineQueue, engine: Faulty
) -> None:
    told: dict[int, Told] = {}
    left: list[bool] = []
    for client in range(20):
        rows = [wanted(told, client, each, 1 + each % 3, is_left=lambda: bool(left)) for each in range(64)]
        queue.put(*rows)
    queue.turn()
    queue.put(wanted(told, 99))
    small = RowId(0, 99, 0)
    while small not in engine.order:
        queue.turn()
    place = engine.order.index(small)
    assert ROWS <= place <= ROWS + 20, "each of the others had one turn at most before it"
    left.append(True)
    queue.wake()
    assert drained(queue) == []
    assert isinstance(told[99], Rollout)


def test_a_dropped_request_leaves_before_it_was_admitted(queue: EngineQueue, engine: Faulty) -> None:
    told: dict[int, Told] = {}
    left: list[bool] = []
    queue.put(wanted(told, 0), *(wanted(told, 0, each, is_left=lambda: bool(left)) for each in range(1, 20)))
    queue.turn()
    left.append(True)
    queue.wake()
    assert drained(queue) == []
    assert set(told) == {0} and len(engine.order) == ROWS


@pytest.mark.parametrize("late", [False, True], ids=["from its first pass", "after others ran"])
def test_the_row_that_an_error_names_ends_alone(queue: EngineQueue, engine: Faulty, late: bool) -> None:
    told: dict[int, Told] = {}
    expected = alone(engine, range(6))
    queue.put(*(wanted(told, prompt) for prompt in range(6)))
    if late:
        for _ in range(13):
            queue.turn()
    engine.names = 4
    errors = drained(queue)
    assert [error.what for error in errors] == ["the logits are odd"]
    del expected[4]
    assert tokens_of(told) == expected
    assert isinstance(told[4], Declined) and told[4].status == 500


def test_one_of_several_new_rows_is_found_by_trying_each(queue: EngineQueue, engine: Faulty) -> None:
    told: dict[int, Told] = {}
    expected = alone(engine, range(6))
    queue.put(*(wanted(told, prompt) for prompt in range(3)))
    for _ in range(5):
        queue.turn()
    engine.breaks_on = 4
    queue.put(*(wanted(told, prompt) for prompt in range(3, 6)))
    errors = drained(queue)
    assert len(errors) == 2 and "IndexError: an index of nobody's" in errors[0].why
    del expected[4]
    assert tokens_of(told) == expected
    assert isinstance(told[4], Declined) and "the engine failed on the request" in told[4].what


def test_a_row_that_cannot_be_added_ends_alone(queue: EngineQueue, engine: Faulty) -> None:
    told: dict[int, Told] = {}
    expected = alone(engine, range(3))
    engine.refuses = 1
    queue.put(*(wanted(told, prompt) for prompt in range(3)))
    assert drained(queue) == []
    del expected[1]
    assert tokens_of(told) == expected
    assert isinstance(told[1], Declined) and told[1].why == "KeyError: 1"


def test_a_failure_that_is_no_row_s_ends_all_and_is_raised_as_it_is(
    queue: EngineQueue, engine: Faulty
) -> None:
    told: dict[int, Told] = {}
    queue.put(*(wanted(told, prompt) for prompt in range(12)))
    engine.breaks_at = 7
    with pytest.raises(IndexError, match="an index of nobody's"):
        for _ in range(8):
            queue.turn()
    assert sorted(told) == list(range(12)) and tokens_of(told) == {}


def test_a_broken_queue_tells_rows_that_come_later(queue: EngineQueue) -> None:
    told: dict[int, Told] = {}
    queue.put(wanted(told, 0))
    queue.turn()
    queue.put(wanted(told, 1))
    queue.fail(Declined(503, "the engine has broken"))
    queue.put(wanted(told, 2))
    assert [told[each].status for each in range(3) if isinstance(told[each], Declined)] == [503] * 3


def test_a_streamed_row_goes_on_from_what_was_told(queue: EngineQueue, engine: Faulty) -> None:
    told: dict[int, Told] = {}
    expected = alone(engine, range(2))
    pieces: list[Told] = []
    begin = Rollout.start(RowId(0, 0, 0), [1, 2, 3])
    row = Wanted(
        begin=begin,
        sampling=USUAL,
        stops=(),
        is_streamed=True,
        tell=lambda what, _: pieces.append(what),
    )
    queue.put(row)
    for _ in range(9):
        queue.turn()
    engine.names = 1
    queue.put(wanted(told, 1))
    assert len(drained(queue)) == 1
    counts = [len(piece.tokens) for piece in pieces if isinstance(piece, Rollout)]
    assert counts == sorted(counts) and len(counts) > 2
    assert isinstance(pieces[-1], Rollout) and pieces[-1].tokens == expected[0]


def test_an_engine_s_lack_is_told_in_the_request_s_words(queue: EngineQueue) -> None:
    told: dict[int, Told] = {}
    begin = Rollout.start(RowId(0, 0, 0), [1] * 64)
    tell = told.setdefault
    row = Wanted(
        begin=begin,
        sampling=USUAL,
        stops=(),
        is_streamed=False,
        tell=lambda what, _: tell(0, what) and None,
        name="prompt 2 of the request",
    )
    queue.put(row)
    assert drained(queue) == []
    assert isinstance(told[0], StreamError) and told[0].what == "prompt 2 of the request has 64 tokens"


def test_a_client_that_has_left_leaves_the_row_that_another_began_with_its_id(queue: EngineQueue) -> None:
    """A tail-batched run aborts an agent's row and begins it again; the old client's end is noticed later."""
    told: dict[int, Told] = {}
    left: list[bool] = []
    queue.put(wanted({}, 1, is_left=lambda: bool(left)))
    assert queue.turn(), "the old row runs"
    left.append(True)
    queue.put(wanted(told, 1))
    queue.turn()
    queue.wake()
    drained(queue)
    assert isinstance(told[1], Rollout)


def test_a_request_of_a_client_whose_row_was_given_up_samples_nothing(
    queue: EngineQueue, engine: Faulty
) -> None:
    told: dict[int, Told] = {}
    queue.put(wanted(told, 1, is_left=lambda: True))
    drained(queue)
    assert told == {} and engine.order == []


@pytest.mark.parametrize("passes", [0, 1])
def test_a_client_that_leaves_ends_its_own_row(queue: EngineQueue, engine: Faulty, passes: int) -> None:
    told: dict[int, Told] = {}
    left: list[bool] = []
    queue.put(wanted(told, 1, is_left=lambda: bool(left)), wanted(told, 2))
    for _ in range(passes):
        queue.turn()
    left.append(True)
    queue.wake()
    drained(queue)
    assert [*told] == [2] and len(engine.order) == 1 + passes


def test_functions_run_between_passes_in_the_engine_s_thread(queue: EngineQueue) -> None:
    told: dict[int, Told] = {}
    queue.put(wanted(told, 0))
    first, broken, left = queue.call(lambda: 7), queue.call(lambda: {}["x"]), queue.call(lambda: 9)
    assert left.cancel(), "its client has left"
    assert not first.done()
    assert drained(queue) == [] and 0 in told
    assert first.result(0) == 7 and isinstance(broken.exception(0), KeyError)
    waiting, gone = queue.call(lambda: 1), queue.call(lambda: 2)
    gone.cancel()
    queue.fail(StreamError("broken"))
    for each in (waiting, queue.call(lambda: 3)):
        assert str(each.exception(0)).startswith("broken")


def test_rows_with_one_id_run_one_after_the_other(queue: EngineQueue, engine: Faulty) -> None:
    """Two clients may send the same seed and prompt; a third one passes the row that waits."""
    ended: list[Told] = []

    def tell(what: Told, is_over: bool) -> None:
        ended.append(what)

    same = [replace(wanted({}, 3), tell=tell) for _ in range(3)]
    told: dict[int, Told] = {}
    for each in (*same, wanted(told, 4)):
        queue.put(each)
    queue.turn()
    assert engine.order == [RowId(0, 3, 0), RowId(0, 4, 0)]
    assert drained(queue) == [] and 4 in told
    tokens = {each.tokens for each in ended if isinstance(each, Rollout)}
    assert len(ended) == 3 and len(tokens) == 1, "the same numbers, and the same tokens"


@pytest.mark.parametrize("where", ["add", "step"])
def test_a_lost_engine_is_told_to_the_caller_and_to_no_row(
    engine: Faulty, queue: EngineQueue, where: str
) -> None:
    """No row is at fault, so none is told that it failed."""
    told: dict[int, Told] = {}
    for prompt in range(3):
        queue.put(wanted(told, prompt))
    if where == "add":
        engine.loses_on = 1
    else:
        engine.is_lost_at = 3
    with pytest.raises(EngineLost):
        for _ in range(5):
            queue.turn()
    assert not told


def test_a_new_row_waits_for_passes_and_not_for_the_ends_of_long_rows(
    engine: Faulty, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paused rows go on later, and have the tokens that they have alone."""
    monkeypatch.setattr("rillflow_parts.endpoint.engine_queue.SLICE", 4)
    expected = alone(engine, range(2 * ROWS + 1))
    queue = EngineQueue(engine, model.tokenizer, max_rows=ROWS, pauses=True)
    told = dict[int, Told]()
    for prompt in range(2 * ROWS):
        queue.put(wanted(told, prompt))
    for _ in range(6):
        queue.turn()
    queue.put(wanted(told, 2 * ROWS, max_tokens=2))
    for _ in range(9):
        queue.turn()
    assert [*told] == [2 * ROWS]
    assert drained(queue) == [] and len(told) == 2 * ROWS + 1
    for prompt in range(2 * ROWS):
        row = told[prompt]
        assert isinstance(row, Rollout) and row.tokens == expected[prompt], prompt
    assert not (queue._kept or queue._entered or queue._paused or queue._rows)
    queue.close()


def test_many_rows_of_a_request_are_refused_when_too_many_wait(
    queue: EngineQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rillflow_parts.endpoint.engine_queue.MOST_WAITING", 20)
    many, few = dict[int, Told](), dict[int, Told]()
    queue.put(*(wanted(many, 1, sample) for sample in range(20)))
    queue.put(*(wanted(many, 2, sample) for sample in range(9)))
    queue.put(*(wanted(few, 3, sample) for sample in range(8)))
    refused = [each for each in many.values() if isinstance(each, Declined)]
    assert len(refused) == 9 and refused[0].status == 429 and "rows wait" in refused[0].what
    assert drained(queue) == [] and all(isinstance(each, Rollout) for each in few.values())

"""The scheduler against a model of the cache: every instruction is executed on lists of tokens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence as Rows
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rillflow.errors import RolloutError
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.cache_layout import CacheLayout, CacheRow, positions_of
from rillflow.rollout.native.scheduler import Scheduler, Sequence, Step

PLAIN = SamplingConfig()


def test_it_knows_no_torch() -> None:
    code = "import sys; import rillflow.rollout.native.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def sequence(prompt: int, sample: int, tokens: Rows[int], new: int) -> Sequence:
    rollout = Rollout.start(RowId(0, prompt, sample), tokens)
    return Sequence(rollout=rollout, sampling=PLAIN, prefix=tuple(tokens[:-1]), limit=len(tokens) + new)


class Model:
    """Contents of a cache's positions, according to a scheduler's steps."""

    def __init__(self) -> None:
        self.cache_rows: dict[CacheRow, list[int | None]] = {}
        self.prefilled: list[tuple[int, ...]] = []

    def carry_out(self, step: Step) -> None:
        lengths = {bucket.name: (bucket.rows, bucket.length) for bucket in step.buckets}
        assert [bucket.length for bucket in step.buckets] == sorted(
            (b.length for b in step.buckets), reverse=True
        )
        assert all(len(bucket.members) <= bucket.rows for bucket in step.buckets)
        assert len({copy.target for copy in step.copies}) == len(step.copies)
        read = [self.cache_rows[copy.source][: copy.length] for copy in step.copies]
        self.cache_rows |= {copy.target: held for copy, held in zip(step.copies, read, strict=True)}
        for prefill in step.prefills:
            self.prefilled.append(prefill.tokens)
            for place in prefill.cache_rows:
                held = self.cache_rows.setdefault(place, [])
                assert len(held) >= prefill.begin
                self.cache_rows[place] = held[: prefill.begin] + list(prefill.tokens)
        assert [row for bucket in step.buckets for row in bucket.members] == list(step.rows)
        for slot, row in enumerate(step.rows):
            assert row.slot == slot and row.cache_row is not None
            held = self.cache_rows.setdefault(row.cache_row, [])
            fed = step.clock - row.start_step
            tokens = row.rollout.tokens
            assert held[: min(fed, len(row.prefix))] == list(row.prefix[:fed])
            assert len(held) >= fed, "a position was skipped"
            rows, length = lengths[row.cache_row.bucket]
            assert row.cache_row.row < rows and fed < length
            assert fed < step.reaches[[*lengths].index(row.cache_row.bucket)]
            del held[fed:]
            held.append(tokens[fed] if fed < len(tokens) else None)
        self.cache_rows = {
            place: held
            for place, held in self.cache_rows.items()
            if place.row < lengths.get(place.bucket, (0, 0))[0]
        }


def run(scheduler: Scheduler, model: Model) -> list[Sequence]:
    scheduler.requeue(scheduler.overdue())
    step = scheduler.schedule()
    model.carry_out(step)
    ended = [row for row in step.rows if row.last_step == step.clock]
    scheduler.leave(ended)
    return ended


def drawn_rows(chance: Random) -> list[Sequence]:
    """Return short and long prompts, some with a common prefix, and several samples of each."""
    system = [7] * chance.randint(60, 90)
    found = []
    for prompt in range(chance.randint(1, 5)):
        tokens = chance.choices(range(4), k=chance.choice([1, 3, 9, 30, 1200]))
        tokens = system + tokens if chance.random() < 0.5 else tokens
        samples = range(chance.randint(1, 4))
        found += [sequence(prompt, sample, tokens, chance.choice([1, 2, 6, 30])) for sample in samples]
    return found


@settings(max_examples=150, deadline=None)
@given(
    chance=st.randoms(use_true_random=True),
    max_rows=st.integers(1, 5),
    budget=st.sampled_from([4, 11, 40, 4000]),
    spare=st.sampled_from([None, 0, 50, 400, 4000]),
    fixed=st.booleans(),
)
@example(chance=Random(1001), max_rows=3, budget=4, spare=50, fixed=False)
def test_every_row_runs_on_its_own_tokens(
    chance: Random, max_rows: int, budget: int, spare: int | None, fixed: bool
) -> None:
    """Rows come, leave and wait again; memory stays within any budget."""
    layout: CacheLayout[Sequence] = CacheLayout(8 if fixed else None)
    scheduler, model = Scheduler(max_rows, budget, layout=layout, shares_parts=not fixed), Model()
    to_come = drawn_rows(chance)
    if spare is not None:
        scheduler.room = layout.least_positions(max(row.limit for row in to_come)) + spare
    total, gone = len(to_come), list[Sequence]()
    requeues = 3
    while to_come or scheduler.has_work:
        for row in to_come[: chance.randint(0, 3)]:
            to_come.remove(row)
            scheduler.add(row)
        if scheduler.has_work and chance.random() < 0.1:
            aborted = chance.choice([*scheduler.running, *scheduler.waiting(9)])
            scheduler.leave([aborted])
            gone.append(aborted)
        if requeues and chance.random() < 0.1:
            requeues -= 1
            scheduler.requeue(scheduler.running)
            scheduler.forget()
        gone += run(scheduler, model)
        assert len(scheduler.running) <= max_rows
        assert positions_of(layout.buckets) <= scheduler.room
    assert len({row.rollout.row for row in gone}) == total == len(gone)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8])
def test_a_prompt_is_read_once_for_all_its_samples(max_rows: int) -> None:
    scheduler, model = Scheduler(max_rows), Model()
    for prompt in range(3):
        for sample in range(5):
            scheduler.add(sequence(prompt, sample, [prompt, 7, 8, 9], new=1 + (prompt + 2 * sample) % 4))
    while scheduler.has_work:
        run(scheduler, model)
    assert model.prefilled == [(0, 7, 8), (1, 7, 8), (2, 7, 8)]


def test_a_free_slot_is_taken_in_the_next_step_and_the_batch_shrinks_when_nothing_waits() -> None:
    scheduler, model = Scheduler(2), Model()
    for prompt, new in enumerate((1, 3, 1, 2)):
        scheduler.add(sequence(prompt, 0, [1, 2], new))
    seen = []
    while scheduler.has_work:
        step = scheduler.schedule()
        model.carry_out(step)
        seen.append([row.rollout.row.prompt for row in step.rows])
        scheduler.leave([row for row in step.rows if row.last_step == step.clock])
    assert seen == [[0, 1], [2, 1], [3, 1], [3]]


def test_rows_begin_first_come_first_served() -> None:
    scheduler, model = Scheduler(2, prefill_tokens=6), Model()
    for prompt, length in enumerate((4, 9, 2, 2, 2)):
        scheduler.add(sequence(prompt, 0, [prompt] * length, 2))
    begun = []
    while scheduler.has_work:
        step = scheduler.schedule()
        model.carry_out(step)
        begun += [row.rollout.row.prompt for row in step.admitted]
        scheduler.leave([row for row in step.rows if row.last_step == step.clock])
    assert [*dict.fromkeys(begun)] == [0, 1, 2, 3, 4]


def test_rows_that_wait_again_keep_their_order_before_those_that_waited() -> None:
    scheduler = Scheduler(3)
    for prompt in range(5):
        scheduler.add(sequence(prompt, 0, [prompt, 1], 4))
    scheduler.schedule()
    scheduler.requeue(scheduler.running)
    assert [row.rollout.row.prompt for row in scheduler.waiting(9)] == [0, 1, 2, 3, 4]


def test_a_prompt_that_comes_back_after_its_slot_went_to_another_is_read_again() -> None:
    scheduler, model = Scheduler(2), Model()
    for prompt, new in ((0, 9), (1, 1), (2, 1)):  # the second and the third use slot 1 in turn
        scheduler.add(sequence(prompt, 0, [prompt, 7, 8], new))
    for _ in range(3):  # slot 1 is closed in the last
        run(scheduler, model)
    scheduler.add(sequence(1, 1, [1, 7, 8], 1))
    run(scheduler, model)
    assert model.prefilled == [(0, 7), (1, 7), (2, 7), (1, 7)]


@pytest.mark.parametrize("budget", [14, 20])
def test_prefixes_of_one_step_stay_within_their_budget(budget: int) -> None:
    scheduler = Scheduler(8, prefill_tokens=budget)  # two prefixes have 14 tokens
    for prompt in range(6):
        scheduler.add(sequence(prompt, 0, [prompt] * 8, 4))
    assert [len(scheduler.schedule().prefills) for _ in range(3)] == [2, 2, 2]


def test_a_row_id_is_there_once() -> None:
    scheduler = Scheduler(2)
    scheduler.add(sequence(4, 1, [1], 1))
    with pytest.raises(RolloutError, match="epoch 0 prompt 4 sample 1"):
        scheduler.add(sequence(4, 1, [2], 1))


def test_a_row_that_is_not_there_is_named() -> None:
    with pytest.raises(RolloutError, match="epoch 0 prompt 9 sample 2"):
        Scheduler(2).find(RowId(0, 9, 2))

"""Samplers compared with models in plain loops, and leases within a token budget."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rillflow.data_plane.instructions import Lease
from rillflow.data_plane.samplers import BLOCKED, DONE, READY, TAKEN, in_order, ready_first, within
from rillflow.data_plane.table import Table
from tests.unit.data_plane.streams import diamond

STATES = st.lists(st.sampled_from([BLOCKED, READY, TAKEN, DONE]), max_size=20)
TOKENS = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@given(STATES, st.integers(1, 8))
def test_in_order_takes_whichever_nobody_has_up_to_the_first_that_is_not_ready(
    states: list[int], count: int
) -> None:
    expected: list[int] = []
    for group, state in enumerate(states):
        if state == BLOCKED or len(expected) == count:
            break
        expected += [group] if state == READY else []
    assert in_order(np.array(states, np.uint8), count).tolist() == expected


@given(STATES, st.integers(1, 8))
def test_ready_first_takes_the_oldest_that_are_ready_and_waits_for_none(
    states: list[int], count: int
) -> None:
    expected = [group for group, state in enumerate(states) if state == READY][:count]
    assert ready_first(np.array(states, np.uint8), count).tolist() == expected


@given(TOKENS, st.integers(1, 120))
def test_a_budget_of_tokens_is_kept_and_used_up_by_whole_groups(tokens: list[int], budget: int) -> None:
    groups = within(np.array(tokens), budget)
    assert groups == 1 or sum(tokens[:groups]) <= budget
    assert groups == len(tokens) or sum(tokens[: groups + 1]) > budget


@given(TOKENS, st.integers(1, 120), st.sampled_from(["in_order", "ready_first"]), st.data())
def test_takers_with_budgets_get_every_group_once_in_order_with_all_of_its_rows(
    tokens: list[int], budget: int, order: str, data: st.DataObject
) -> None:
    rows = np.array(data.draw(st.lists(st.integers(1, 4), min_size=len(tokens), max_size=len(tokens))))
    table = Table(diamond(sample=order), capacity=16)
    table.begin(len(tokens), holder="task", now=0.0, rows=rows, tokens=np.array(tokens))
    taken: list[int] = []
    while len(taken) < len(tokens):
        count = data.draw(st.integers(1, 6))
        found = table.take("sample", count, holder="a", now=0.0, deadline=9.0, tokens=budget)
        lease = next(each for each in found if isinstance(each, Lease))
        ids = lease.ids.tolist()
        assert 1 <= len(ids) <= count and (len(ids) == 1 or int(lease.tokens.sum()) <= budget)
        assert lease.rows.tolist() == rows[ids].tolist() and lease.tokens.tolist() == [
            tokens[each] for each in ids
        ]
        taken += ids
    assert taken == [*range(len(tokens))]

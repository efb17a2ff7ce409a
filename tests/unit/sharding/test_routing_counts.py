"""Routers' choices are counted exactly, and the balance metrics follow from the counts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from rillflow.models.routing import Routing
from rillflow.records.metrics import Max, Mean


def routing(*experts: int) -> Routing:
    """Return counts of routers that choose among these numbers of experts."""
    routers = SimpleNamespace(all=[SimpleNamespace(experts=each) for each in experts], experts=max(experts))
    return Routing(routers, torch.device("cpu"))  # type: ignore[arg-type]


def test_counts_beyond_those_of_float32_are_exact() -> None:
    many = 2**24 + 1
    found = routing(2)
    found.count(0, torch.tensor([many, 1]), torch.tensor([[0], [1]]))
    assert found.counts.tolist() == [[many, 1]] and found.tokens.tolist() == [many + 1]


def test_a_row_with_copies_counts_for_each_and_each_of_its_experts() -> None:
    found = routing(3, 3)
    found.count(1, torch.tensor([2, 5]), torch.tensor([[0, 2], [2, 1]]))
    assert found.counts.tolist() == [[0, 0, 0], [2, 5, 7]] and found.tokens.tolist() == [0, 7]
    assert found.metrics() == {}, "the first router saw no token"


def test_choices_of_all_routers_are_counted_once_a_token() -> None:
    found = routing(2, 2)
    found.count_all(torch.tensor([[[0], [1]], [[0], [0]], [[1], [0]]]))
    assert found.counts.tolist() == [[2, 1], [2, 1]] and found.tokens.tolist() == [3, 3]


def test_figures_of_balance_by_hand() -> None:
    found = routing(4, 2)
    found.counts += torch.tensor([[6.0, 2.0, 0.0, 0.0], [4.0, 4.0, 0.0, 0.0]])
    found.tokens += 8
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    metrics = found.metrics()
    peaks, entropies = metrics["routing/peak_load/mean"], metrics["routing/entropy/mean"]
    assert isinstance(peaks, Mean) and isinstance(entropies, Mean)
    assert (peaks.total / peaks.count, peaks.count) == (pytest.approx((0.75 * 4 + 0.5 * 2) / 2), 2)
    assert entropies.total / entropies.count == pytest.approx((entropy + 1.0) / 2)
    assert metrics["routing/peak_load/max"] == Max(value=3.0)
    assert metrics["routing/idle/share"] == Mean(total=2.0, count=6.0)
    assert "routing/balance_loss/mean" not in metrics
    found.pull = found.balanced(0.5)
    found.loss += 0.25
    loss = found.metrics()["routing/balance_loss/mean"]
    assert isinstance(loss, Mean) and loss.total / loss.count == 0.25
    assert found.pull[0].tolist() == [0.5 * 4 / 2 * each / 64 for each in (6, 2, 0, 0)]
    assert found.pull[1].tolist() == [0.5 * 2 / 2 * each / 64 for each in (4, 4, 0, 0)]

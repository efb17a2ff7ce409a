"""A decoder on a mesh gives the same outputs and updates as on one rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rillflow.records.metrics import merge_metrics

sys.path.insert(0, str(Path(__file__).parent))
from meshes import Case, decoder, rows, train_all, trained
from processes import together

EXACT = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 5e-2}
"""Largest error of the gradient, divided by its norm."""
STEPPED = {"float64": 1e-6, "float32": 2e-2, "bfloat16": 0.5}
"""Largest error of two steps' changes, divided by their norm; Adam amplifies rounding of small gradients."""

TWO = [
    Case(tp=2, budget=30),
    Case(pp=2, tied=False, most_logits=200),
    Case(dp=2, fsdp=2, checkpointing=True),
    Case(dp=2, fsdp=2, lopsided=True, most_logits=100),
    Case(dp=2, fsdp=2, lopsided=True, scalar=True),
    Case(tp=2, sequence=True, checkpointing=True),
    Case(kind="qwen3", pp=2, budget=1000, dtype="float32"),
]
FOUR = [
    Case(dp=2, pp=2, fsdp=2, lopsided=True, most_logits=100),
    Case(kind="qwen3", dp=2, tp=2, fsdp=2, dtype="float32", sequence=True),
    Case(dp=4, fsdp=2, tied=False),
    Case(pp=2, tp=2, checkpointing=True),
    Case(kind="qwen2", pp=2, tp=2, checkpointing=True, sequence=True, dtype="float32"),
    Case(pp=4, budget=30, scalar=True),
    Case(kind="qwen2", dp=2, tp=2, fsdp=2, dtype="bfloat16"),
]

ANSWERS = [
    Case(loss="pairs", tp=2, budget=30),
    Case(loss="pairs", pp=2, tied=False),
    Case(loss="pairs", dp=2, fsdp=2, checkpointing=True),
    Case(loss="pairs", dp=2, lopsided=True),
    Case(loss="answers", tp=2, budget=30),
    Case(loss="answers", pp=2, tied=False),
    Case(loss="answers", dp=2, fsdp=2),
    Case(loss="answers", dp=2, fsdp=2, lopsided=True),
]


MESHES = [
    (dp, pp, tp) for dp, pp, tp in product((1, 2, 4, 8), repeat=3) if 2 <= dp * pp * tp <= 8 and tp <= 4
]
"""All meshes of up to eight ranks whose tp divides the four heads."""


def every_case(dp: int, pp: int, tp: int) -> Iterator[Case]:
    """Yield cases: sharded or not, tied or not, with and without norms of heads, and with a scalar head."""
    layers = max(5, pp)
    for fsdp, tied in product([size for size in (1, 2, 4, 8) if dp % size == 0], (True, False)):
        yield Case(dp=dp, pp=pp, tp=tp, fsdp=fsdp, tied=tied, layers=layers)
    yield Case(dp=dp, pp=pp, tp=tp, fsdp=dp, layers=layers, scalar=True)
    yield Case(dp=dp, pp=pp, tp=tp, fsdp=dp, layers=layers, kind="qwen3", dtype="float32")


@cache
def alone(case: Case) -> dict[str, Any]:
    """Return the results of a case on one rank."""
    torch.set_num_threads(1)
    module = decoder(case)
    before = {name: p.detach().double().numpy().copy() for name, p in module.named_parameters()}
    return {**trained(case, module, rows()), "before": before}


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the distance of two sets of arrays, each taken as one vector."""
    return float(np.sqrt(sum(np.square(found[name] - expected[name]).sum() for name in found)))


def check(case: Case, results: list[dict[str, Any]]) -> None:
    expected = alone(case.alone)
    names = expected["gradients"].keys()
    assert set().union(*(result["gradients"] for result in results)) == set(names)
    for result in results:
        for kind in ("gradients", "weights"):
            for name, value in result[kind].items():
                first = next(other[kind][name] for other in results if name in other[kind])
                assert np.array_equal(value, first), f"copies of {kind} {name} differ"
    united = {name: value for result in results for name, value in result["gradients"].items()}
    size = distance(expected["gradients"], dict.fromkeys(names, 0))
    assert distance(united, expected["gradients"]) <= EXACT[case.dtype] * size
    stepped = {name: value for result in results for name, value in result["weights"].items()}
    change = distance(expected["weights"], expected["before"])
    assert distance(stepped, expected["weights"]) <= STEPPED[case.dtype] * change
    check_words(case, results, expected)


def check_words(case: Case, results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Check scores and metrics of the ranks that report them."""
    spoken = [result for result in results if result["speaks"]]
    assert len(spoken) == case.dp
    assert all(result["metrics"] == [{}, {}] for result in results if not result["speaks"])
    rough = case.dtype == "bfloat16"
    scores = {row: value for result in spoken for row, value in result["scores"].items()}
    for row, value in expected["scores"].items():
        np.testing.assert_allclose(
            scores[row], value, rtol=0.2 if rough else 1e-5, atol=0.1 if rough else 1e-5
        )
    for step in range(2):
        found = merge_metrics([result["metrics"][step] for result in spoken])
        for name, metric in expected["metrics"][step].items():
            assert found[name].value == pytest.approx(
                metric.value, rel=0.1 if rough else 1e-4, abs=1e-2 if rough else 1e-5
            ), name


def check_all(size: int, cases: list[Case], deadline_s: float = 180.0) -> None:
    by_rank = together(size, train_all, cases, deadline_s=deadline_s)
    for place, case in enumerate(cases):
        check(case, [found[place] for found in by_rank])


def test_two_ranks_train_as_one() -> None:
    check_all(2, TWO)


@pytest.mark.slow
def test_pairs_and_single_answers_train_as_on_one_rank() -> None:
    check_all(2, ANSWERS)


@pytest.mark.slow
def test_four_ranks_train_as_one() -> None:
    check_all(4, FOUR)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_every_mesh_trains_as_one_rank(mesh: tuple[int, int, int]) -> None:
    check_all(prod(mesh), list(every_case(*mesh)), deadline_s=800.0)


@pytest.mark.slow
def test_any_micro_batches_give_the_same_gradient() -> None:
    check_all(4, [Case(dp=2, pp=2, fsdp=2, budget=budget) for budget in (1, 12, 25, 40, 1000)])

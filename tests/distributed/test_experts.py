"""Experts that are sharded over ranks give the same outputs and gradients as on one rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rillflow.errors import ModelError, RillflowError
from rillflow.workers.collectives import Ranks

sys.path.insert(0, str(Path(__file__).parent))
from meshes import Case, decoder, groups_of, rows, train_all, trained
from processes import together
from test_parallel_training import check_words

from rillflow.sharding.module import Parallel

EXACT = {"float64": 1e-6, "float32": 1e-4}
"""Largest error of the gradient, divided by its norm; routers compute their scores in float32."""


def united(results: list[dict[str, Any]], kind: str, case: Case) -> dict[str, np.ndarray]:
    """Return every whole gradient or weight; check that copies on several ranks are bit-identical."""
    found = {}
    for name in results[0][kind]:
        parts = [result[kind][name] for result in results]
        if ".experts." in name:
            for rank, part in enumerate(parts):
                assert np.array_equal(part, parts[rank % case.ep]), f"copies of {kind} {name} differ"
            found[name] = np.concatenate(parts[: case.ep])
        else:
            assert all(np.array_equal(part, parts[0]) for part in parts), f"copies of {kind} {name} differ"
            found[name] = parts[0]
    return found


def check(case: Case, results: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    expected = trained(case.alone, decoder(case.alone), rows())
    for kind, most in (("gradients", EXACT[case.dtype]), ("weights", 1e-2)):
        found = united(results, kind, case)
        assert found.keys() == expected[kind].keys()
        before = {name: each.detach().numpy() for name, each in decoder(case.alone).named_parameters()}
        nothing = before if kind == "weights" else dict.fromkeys(before, 0)
        size = np.sqrt(sum(np.square(expected[kind][name] - nothing[name]).sum() for name in found))
        error = np.sqrt(sum(np.square(found[name] - expected[kind][name]).sum() for name in found))
        assert error <= most * size, kind
    check_words(case, results, expected)


CASES = [
    Case(kind="mixtral", dp=2, layers=2, balance=0.1),
    Case(kind="mixtral", dp=2, ep=2, layers=2, budget=20, balance=0.1),
    Case(kind="mixtral", dp=2, ep=2, layers=2, lopsided=True, checkpointing=True),
    Case(kind="mixtral", dp=2, ep=2, layers=2, dtype="float32"),
]


def test_two_ranks_with_half_the_experts_train_as_one() -> None:
    by_rank = together(2, train_all, CASES, deadline_s=180.0)
    for place, case in enumerate(CASES):
        check(case, [found[place] for found in by_rank])


@pytest.mark.slow
def test_copies_of_experts_shared_out() -> None:
    cases = [Case(kind="mixtral", dp=4, ep=2, layers=2), Case(kind="mixtral", dp=4, ep=4, layers=2)]
    by_rank = together(4, train_all, cases, deadline_s=180.0)
    for place, case in enumerate(cases):
        check(case, [found[place] for found in by_rank])


def refused(ranks: Ranks, cases: list[Case]) -> list[str]:
    said = []
    for case in cases:
        try:
            Parallel(decoder(case), groups_of(case, ranks))
        except RillflowError as error:
            assert isinstance(error, ModelError)
            said.append(str(error))
    return said


@pytest.mark.slow
def test_what_cannot_be_shared_out_is_refused() -> None:
    cases = [Case(dp=2, ep=2, layers=2), Case(kind="mixtral", dp=3, ep=3, layers=2)]
    assert all("has no experts" in found[0] for found in together(2, refused, cases[:1], deadline_s=60.0))
    for found in together(3, refused, cases[1:], deadline_s=60.0):
        assert "has 4 experts" in found[0] and "4 / 3 leaves 1" in found[0]

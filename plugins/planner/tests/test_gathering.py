"""The tail of generation: hand-made batches, reductions, the choice of R and m, impossible input."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.planner.tests.toys import question
from rillflow.errors import PlanError
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan, PlannedPool, PlannedUnit
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import evaluate
from rillflow_planner.gathering import GatherProposal, Tail, best_gathering, gathered, proposed
from rillflow_planner.problem import Work
from rillflow_planner.ranking import PAYS


def flat(_: int) -> float:
    return 1.0


FOUR = Tail(
    lengths=(1, 1, 1, 9),
    replicas=2,
    token_s=flat,
    most_rows=4,
    score_row_s=2.0,
    send_row_s=0.5,
    reread_row_s=1.0,
)
"""Replica 0 has rows of 1 and 1 tokens, replica 1 rows of 1 and 9; a decoding step takes 1 s."""


def log_normal(seed: int, rows: int = 256, sigma: float = 1.0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(min(max(round(draw.lognormvariate(5.0, sigma)), 1), 4000) for _ in range(rows))


def test_without_gathering_scoring_begins_when_all_rows_have_ended() -> None:
    found = gathered(FOUR, 0, 0)
    assert (found.begin_s, found.tail_end_s) == (9.0, 9.0)
    assert found.total_s == 9.0 + 4 * 2.0 / 2


def test_the_last_row_stays_where_it_is_and_the_other_replica_scores() -> None:
    found = gathered(FOUR, 1, 1)
    assert (found.begin_s, found.move_s, found.tail_end_s) == (1.0, 0.0, 9.0)
    assert found.total_s == 9.0 + 2.0  # three rows are scored from 1 s to 7 s, the last one from 9 s


def test_moved_rows_arrive_by_the_faster_way() -> None:
    batch = replace(FOUR, lengths=(1, 1, 5, 9))
    found = gathered(batch, 2, 1)  # rows of 5 and 9 tokens are on two replicas, one of them moves
    assert found.move_s == 0.5
    assert found.tail_end_s == 1.0 + 0.5 + 8.0
    assert not batch.rereads
    again = replace(batch, send_row_s=3.0)
    assert again.rereads
    assert gathered(again, 2, 1).move_s == 1.0


def test_slower_steps_with_more_rows_lengthen_the_tail() -> None:
    batch = replace(FOUR, lengths=(1, 1, 9, 9), token_s=lambda rows: float(rows))
    # both replicas run 2 rows until 2 s, then one each with 8 tokens left; gathered, 2 s a step
    assert gathered(batch, 2, 1).tail_end_s == 2.0 + 0.5 + 16.0
    assert gathered(batch, 2, 2).tail_end_s == 2.0 + 8.0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), rows=st.integers(0, 64), replicas=st.integers(1, 8))
def test_no_total_is_below_the_work_or_the_longest_row(seed: int, rows: int, replicas: int) -> None:
    batch = Tail(
        lengths=log_normal(seed, 64),
        replicas=8,
        token_s=flat,
        most_rows=64,
        score_row_s=3.0,
        send_row_s=1.0,
        reread_row_s=2.0,
    )
    found = gathered(batch, rows, replicas)
    assert found.tail_end_s >= max(batch.lengths) - 1e-6
    assert found.total_s >= found.tail_end_s + 3.0 - 1e-6
    assert found.begin_s <= found.begin_s + found.move_s <= found.tail_end_s + 1e-6


def test_gathering_gains_with_scorers_and_a_long_tail_and_not_without_scorers() -> None:
    def batch(scorers: int, sigma: float = 1.0) -> Tail:
        return Tail(
            lengths=log_normal(0, sigma=sigma),
            replicas=8,
            token_s=lambda rows: 0.02 * max(1.0, rows / 24),
            most_rows=24,
            score_row_s=0.5 * scorers,
            send_row_s=0.05,
            reread_row_s=0.1,
        )

    unfused = {scorers: gathered(batch(scorers), 0, 0).total_s for scorers in (0, 1, 3)}
    best = {scorers: best_gathering(batch(scorers)) for scorers in (0, 1, 3)}
    assert best[0].rows == 0
    assert 0 < best[3].rows <= 0.5 * 256
    assert best[3].total_s < 0.9 * unfused[3]
    assert best[1].total_s <= unfused[1]
    assert best[3].replicas >= batch(3).least_replicas(best[3].rows)


def test_impossible_input_is_refused() -> None:
    with pytest.raises(PlanError, match="the threshold of rows to gather is 5"):
        gathered(FOUR, 5, 1)
    with pytest.raises(PlanError, match="the threshold of rows to gather is -1"):
        gathered(FOUR, -1, 1)
    with pytest.raises(PlanError, match="the number of replicas for 4 rows, 1 on each, is 1"):
        gathered(replace(FOUR, most_rows=1, replicas=4), 4, 1)
    with pytest.raises(PlanError, match="no lengths of rows are known"):
        replace(FOUR, lengths=())
    with pytest.raises(PlanError, match="replicas is 0"):
        replace(FOUR, replicas=0)
    with pytest.raises(PlanError, match="nan"):
        replace(FOUR, score_row_s=math.nan)


WHOLE, PARTED = Grid(dp=64), Grid(dp=8, pp=2, tp=4)


def of_step(response: str, reference: Grid, **changes: int) -> GatherProposal | None:
    """What is proposed for a PPO step on one pool of 64 devices, with its reference on a grid."""
    words = {"prompts": 512, "samples": 4} | changes
    model = Path(__file__).parents[3] / "examples/planning/qwen2.5-7b/config.json"
    problem = question(
        model=model,
        gpus="64xH100",
        algorithm="ppo",
        response=response,
        prompt="2048",
        **words,
    ).problem
    units = {
        name: PlannedUnit(pool="all", grid=grid, generate_tp=4 if name == "policy" else 0)
        for name, grid in (("policy", PARTED), ("reference", reference), ("critic", PARTED))
    }
    pool = PlannedPool(name="all", machine_type=problem.hardware.fleets[0].name, devices=64)
    plan = Plan(name="ppo", pools=(pool,), units=units)
    placed = evaluate(problem, CostModel(problem), plan)
    found = proposed(problem, placed)
    if found is not None:
        stages = [
            stage for stage in problem.graph.stages if problem.work(stage) in (Work.SCORE, Work.GENERATE)
        ]
        planned_s = sum(placed.seconds[stage.index] for stage in stages)
        assert found.without_s == pytest.approx(planned_s, rel=0.15), "the tail has the plan's seconds"
    return found


def test_a_long_tail_is_gathered_while_whole_models_score() -> None:
    found = of_step("mean=300,max=2048", WHOLE)
    assert found is not None and found.is_assumed
    assert 0 < found.rows <= 1024 and 0 < found.replicas < 16
    assert found.seconds < found.without_s / (1 + PAYS)


def test_nothing_is_gathered_where_it_does_not_pay() -> None:
    assert of_step("1000", WHOLE) is None, "rows of one length end together"
    assert of_step("mean=300,max=2048", PARTED) is None, "a model in parts does not score on any one device"


def test_given_lengths_are_not_assumed_and_many_rows_are_simulated_in_parts(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("\n".join(map(str, log_normal(3, 2048))))
    seen = of_step(str(file), WHOLE)
    assert seen is not None and not seen.is_assumed
    many = of_step("mean=300,max=2048", WHOLE, samples=16)
    assert many is not None and many.rows % 2 == many.replicas % 2 == 0

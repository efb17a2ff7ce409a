"""Asking: the order in which the controller submits a step's stages when rows move on part by part.

generate 1 ─ score 1 ─ formula 1 ─ generate 2 ─ score 2 ─ formula 2 ─ ... update 1 ─ update 2 ... ─ publish
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rillflow_planner.problem import Work
from rillflow_planner.schedule import StageTask
from rillflow_planner.simulator.layout import Layout


def asked(layout: Layout, handed_s: Mapping[int, Sequence[float]]) -> list[StageTask]:
    """Return the stages of a step in submission order: every stage of the first part, then of the second, ...

    Part p of stage s has the index s + p x number of stages; p is 0 for a stage that takes all rows. These
    stages run part by part: the policy's generation, and stages that only read such parts (scores, formulas).
    If the plan streams, updates do too, submitted after all previous stages of their role.

    Args:
        layout: the simulated plan.
        handed_s: for each stage that generates, the times when its parts are complete.
    """
    stages, work = layout.problem.graph.stages, layout.problem.work
    kinds = {Work.SCORE, Work.FUNCTION, Work.FORMULA} | ({Work.TRAIN} if layout.plan.streams else set())
    apart, chains = set[int](), list[list[StageTask]]([[]])
    for task in layout.tasks:
        stage, reads = stages[task.stage], set(task.inputs)
        if task.stage in handed_s:
            is_apart = not layout.is_greedy(task.stage)
        else:
            is_apart = work(stage) in kinds and bool(reads) and reads <= apart
        roles = {stages[one.stage].role for one in chains[-1]}
        if not is_apart or (task.stage in layout.problem.training and stage.role in roles):
            chains.append([])
        chains[-1].append(task)
        if is_apart:
            apart.add(task.stage)
        else:
            chains.append([])

    parts = {task.stage: layout.parts if task.stage in apart else 1 for task in layout.tasks}

    def of_part(task: StageTask, part: int) -> StageTask:
        share, handed, inputs = parts[task.stage], handed_s.get(task.stage, ()), dict[int, float]()
        seconds = task.seconds / share
        if handed:
            seconds = handed[part] - handed[part - 1] if part else handed[0 if share > 1 else -1]
        for source, spent in task.inputs.items():
            for one in [part] if share > 1 else range(parts.get(source, 1)):
                inputs[source + one * len(stages) if source >= 0 else source] = spent / share
        return replace(task, stage=task.stage + part * len(stages), seconds=seconds, inputs=inputs)

    whole = [(chain, parts[chain[0].stage]) for chain in chains if chain]
    return [of_part(task, part) for chain, share in whole for part in range(share) for task in chain]

"""Sizes: whether minibatches, replay buffers, batches and trainer ranks fit the fragments of a recipe.

Parts ─> RolloutSize of each policy ─> ClassicAlgorithm.require ─> ConfigError before the start, or nothing
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.errors import ConfigError
from rillflow_classic.algorithm import RolloutSize
from rillflow_classic.algorithms.registry import algorithm_of
from rillflow_classic.workers.trainer_worker import FragmentQueue

if TYPE_CHECKING:
    from rillflow_classic.build import Parts


def require_sizes(parts: Parts) -> None:
    """Compare the sizes of a recipe's fragments with everything that holds or divides them.

    Raises:
        ConfigError: something is too small for a fragment, or too large for it.
    """
    workers, algorithm = parts.workers, algorithm_of(parts.algorithm)
    lanes = workers.actors * workers.ring
    if workers.transport != "calls":
        FragmentQueue(lanes * workers.depth, batch=workers.batch)
    for policy, agents in parts.agents.items():
        each = workers.slots * agents
        if algorithm.is_in_step:
            slots = lanes * each
        elif workers.transport == "calls":
            slots = workers.ring * each
        else:
            slots = workers.batch * each
        if slots < workers.trainers:
            raise ConfigError(
                f"workers.trainers is {workers.trainers}, and a fragment of all actors has {slots} slots",
                why="the slots are divided among the trainers, and each needs one",
                fix=f"set workers.trainers to at most {slots}, or raise workers.slots or workers.actors",
            )
        if algorithm.require is not None:
            is_shared = workers.place != "ray"
            size = RolloutSize(slots=slots, steps=workers.steps, is_one_machine=is_shared)
            algorithm.require(parts.learner_inputs(policy), size)

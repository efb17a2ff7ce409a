"""Build: the heavy half of a launch; model, roles and phases made from a recipe, then run.

    recipe + checkpoint ─> model ─┬─> policy  ┐
                                  ├─> reference ├─ flow ─> phase ─ loop ─> the next phase
                     task ─> reward, streams  ┘

A phase is made when its turn comes: the reference of the second is the policy the first one left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.algorithms.registry import ALGORITHMS, warm_start
from rillflow.assembly.recipe import Recipe
from rillflow.dataflow.checkpoint import Checkpoint
from rillflow.dataflow.flow import Flow, Role
from rillflow.errors import ConfigError
from rillflow.models.checkpoint import save_model
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import choose_device, load_model
from rillflow.observe.progress import Progress
from rillflow.observe.run_directory import RunDirectory
from rillflow.pipeline.evaluate import Evaluation, evaluate
from rillflow.pipeline.interrupt import Interruption
from rillflow.pipeline.loop import Cadence, Loop, Phase, Stream
from rillflow.records.batch import Batch
from rillflow.rewards.function import parse_function
from rillflow.rewards.workers import RewardWorkers
from rillflow.roles.policy import Policy
from rillflow.roles.reference import Reference
from rillflow.roles.reward import Reward
from rillflow.rollout.config import SamplingConfig
from rillflow.tasks.example import Example
from rillflow.tasks.prompts import PromptStream, StreamPosition, prompt_batch, supervised_batch
from rillflow.tasks.task import Task
from rillflow.train.config import TrainConfig

HELD_OUT_EPOCH = -1
"""The epoch in the row ids of held-out prompts: their random numbers are no training row's."""


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """A phase before anything is built for it."""

    name: str
    """What the records call it."""
    algorithm: Algorithm
    """What it runs."""
    config: AlgorithmConfig
    """The algorithm's settings."""
    train: TrainConfig
    """Its optimiser's settings."""
    first: int
    """The run's steps before it."""
    evaluated: bool
    """Whether the policy is judged around it."""


def phase_plans(recipe: Recipe) -> list[PhasePlan]:
    """The recipe's phases in order: the warm start, where there is one, and the algorithm."""
    plans, first = [], 0
    if recipe.warm_start is not None:
        algorithm, config = warm_start(recipe.warm_start)
        plans.append(
            PhasePlan(
                name="warm_start",
                algorithm=algorithm,
                config=config,
                train=recipe.warm_start,
                first=0,
                evaluated=False,
            )
        )
        first = config.steps
    algorithm = ALGORITHMS[recipe.algorithm.name]
    plans.append(
        PhasePlan(
            name=recipe.algorithm.name,
            algorithm=algorithm,
            config=recipe.algorithm,
            train=recipe.policy,
            first=first,
            evaluated=True,
        )
    )
    return plans


class Build:
    """A recipe's run in this process.

    Args:
        recipe: the checked settings.
        base: the recipe's folder.
        task: its data.
        run: where everything is recorded.
        checkpoint: where to go on from, or None to begin.
        stack: closes the reward's children when the run ends, however it ends.
    """

    def __init__(
        self,
        recipe: Recipe,
        base: Path,
        task: Task,
        run: RunDirectory,
        checkpoint: Checkpoint | None,
        stack: ExitStack,
    ) -> None:
        self._recipe, self._task, self._run, self._checkpoint = recipe, task, run, checkpoint
        self.device = choose_device(recipe.run.device)
        if recipe.run.threads:
            torch.set_num_threads(recipe.run.threads)
        config = recipe.policy.model
        if checkpoint is not None:
            config = ModelConfig(path=str(checkpoint.policy.absolute()), dtype=config.dtype)
        self._model = load_model(config, seed=recipe.run.seed, device=self.device, base=base)
        self._reward = self._make_reward(base, stack)

    def train(self, progress: Progress, interruption: Interruption) -> None:
        """Run what is left of every phase."""
        recipe, plans = self._recipe, phase_plans(self._recipe)
        cadence = Cadence(
            evaluate_every=recipe.evaluate.every,
            checkpoint_every=recipe.run.checkpoint_every,
            keep_checkpoints=recipe.run.keep_checkpoints,
        )
        judge = self._judge if self._task.held_out and self._reward is not None else None
        total = plans[-1].first + plans[-1].config.steps
        loop = Loop(self._run, progress, cadence, judge, interruption, total)
        state = self._checkpoint.state if self._checkpoint else {"phase": 0, "done": 0, "version": 0}
        index, version = state["phase"], state["version"]
        if state["done"] == plans[index].config.steps:
            index, state = index + 1, {"done": 0}
        for number in range(index, len(plans)):
            resumed = state if number == index and state["done"] else None
            phase = self._phase(plans[number], version, resumed)
            loop.run_phase(phase, number, plans[number].first, resumed["done"] if resumed else 0)
            version = phase.policy.version

    def _phase(self, plan: PhasePlan, version: int, resumed: Mapping[str, Any] | None) -> Phase:
        policy = Policy(
            self._model,
            train=plan.train,
            rollout=self._recipe.rollout,
            seed=self._recipe.run.seed,
            updates=plan.config.updates,
            version=version,
        )
        if resumed is not None and self._checkpoint is not None:
            policy.trainer.load_state(self._checkpoint.tensors(), resumed["trainer"])
        needed = plan.algorithm.roles(plan.config)
        roles: dict[str, Role] = {"policy": policy}
        if "reward" in needed and self._reward is not None:
            roles["reward"] = self._reward
        if "reference" in needed:
            roles["reference"] = self._reference(plan.train)
        return Phase(
            name=plan.name,
            steps=plan.config.steps,
            rows=plan.config.prompts_per_step,
            step=plan.algorithm.step,
            config=plan.config,
            flow=Flow(roles, self._run.spans),
            policy=policy,
            stream=self._stream(plan.algorithm.data, resumed["stream"] if resumed else None),
            evaluated=plan.evaluated,
        )

    def _make_reward(self, base: Path, stack: ExitStack) -> Reward | None:
        """The recipe's reward, or else the task's own; None where there is none and no phase asks for it."""
        settings = self._recipe.reward
        chosen = settings.function or self._task.reward
        if chosen is None:
            if any("reward" in plan.algorithm.roles(plan.config) for plan in phase_plans(self._recipe)):
                raise ConfigError(
                    f"reward.function is not set and the task {self._task.name} has no reward of its own",
                    why="the algorithm scores what it samples",
                    fix='write reward.function = "reward.py:name", relative to the recipe',
                )
            return None
        workers = stack.enter_context(RewardWorkers(parse_function(chosen, base), settings))
        return Reward(workers, self._model.tokenizer, max_failures=settings.max_failures)

    def _reference(self, train: TrainConfig) -> Reference:
        """The policy as this phase found it; kept in the run directory so that a resume finds the same."""
        folder = self._run.path / "reference"
        if not folder.exists():
            save_model(self._model, folder)
        config = ModelConfig(path=str(folder), dtype=self._recipe.policy.model.dtype)
        model = load_model(config, seed=self._recipe.run.seed, device=self.device, base=Path())
        return Reference(model, train=train, temperature=self._recipe.rollout.temperature)

    def _stream(self, data: Data, saved: Mapping[str, int] | None) -> Stream:
        """The training rows in the order of every epoch, from the saved place on."""
        position = StreamPosition(**(saved or {}))
        rows = PromptStream(self._task.train, seed=self._recipe.run.seed, position=position)

        def take(count: int) -> Batch:
            drawn = rows.take(count)
            return self._batch(data, [draw.example for draw in drawn], [draw.epoch for draw in drawn])

        return Stream(take=take, state=rows.state)

    def _batch(self, data: Data, examples: Sequence[Example], epochs: int | Sequence[int]) -> Batch:
        tokenizer, context, too_long = self._model.tokenizer, self._model.context, self._recipe.task.too_long
        if data is Data.DEMONSTRATIONS:
            return supervised_batch(examples, tokenizer, epoch=epochs, context=context, too_long=too_long)
        room = self._recipe.rollout.max_tokens
        return prompt_batch(
            examples, tokenizer, epoch=epochs, context=context, max_tokens=room, too_long=too_long
        )

    def _judge(self, policy: Policy) -> Evaluation:
        recipe = self._recipe
        prompts = self._batch(Data.PROMPTS, self._task.held_out[: recipe.evaluate.problems], HELD_OUT_EPOCH)
        sampling = SamplingConfig(
            temperature=recipe.evaluate.temperature,
            max_tokens=recipe.rollout.max_tokens,
            stop=recipe.rollout.stop,
        )
        assert self._reward is not None
        return evaluate(policy, self._reward, prompts, sampling)

"""Build: the heavy half of a launch; model, roles and phases made from a recipe, then run.

    recipe ─> backend, pools ─┬─> policy    ┐
       checkpoint ────────────┼─> reference ├─ groups ─ executor ─ flow ─> phase ─ loop ─> the next phase
         task ─> streams      └─> reward    ┘

The policy and the reward live as long as the run; a phase is made when its turn comes: the reference of
the second is the policy the first one left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.algorithms.registry import warm_start
from rillflow.assembly import casting
from rillflow.assembly.recipe import Recipe
from rillflow.cluster.start import start_backend
from rillflow.dataflow.checkpoint import Checkpoint
from rillflow.dataflow.executor import GroupExecutor
from rillflow.dataflow.flow import Flow
from rillflow.errors import ConfigError
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import choose_device
from rillflow.observe.progress import Progress
from rillflow.observe.run_directory import RunDirectory
from rillflow.pipeline.evaluate import Evaluation, judged
from rillflow.pipeline.interrupt import Interruption
from rillflow.pipeline.loop import Cadence, Loop, Phase, Stream
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch
from rillflow.rewards.function import parse_function
from rillflow.roles.critic import Critic
from rillflow.roles.policy import Policy
from rillflow.roles.reference import Reference
from rillflow.roles.reward import Cost, Reward
from rillflow.roles.reward_model import CostModel, RewardModel
from rillflow.rollout.config import SamplingConfig
from rillflow.tasks.example import Example
from rillflow.tasks.prompts import PromptStream, StreamPosition, prompt_batch, supervised_batch
from rillflow.tasks.task import Task
from rillflow.train.config import TrainConfig
from rillflow.workers.endpoint import endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.program import Factory

CRITICS = ("critic", "cost_critic")
"""Roles that are critics: of the reward, and of the cost."""
BESIDE_SEED = 2**32
"""Beyond every run's seed: what a step is given beside its data comes in an order of its own."""
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
    plans.append(
        PhasePlan(
            name=recipe.algorithm.name,
            algorithm=recipe.chosen,
            config=recipe.algorithm,
            train=recipe.policy,
            first=first,
            evaluated=True,
        )
    )
    return plans


class Build:
    """A recipe's run.

    Args:
        recipe: the checked settings.
        base: the recipe's folder.
        task: its data.
        run: where everything is recorded.
        checkpoint: where to go on from, or None to begin.
        stack: ends every rank when the run ends, however it ends.
    """

    def __init__(
        self,
        recipe: Recipe,
        base: Path,
        task: Task[Example],
        run: RunDirectory,
        checkpoint: Checkpoint | None,
        stack: ExitStack,
    ) -> None:
        self._recipe, self._task, self._run, self._checkpoint = recipe, task, run, checkpoint
        self._base = base.absolute()
        self.device = choose_device(recipe.run.device)
        placement = recipe.placement
        self._backend = start_backend(placement, devices=0 if self.device.type == "cpu" else 1)
        stack.callback(self._backend.close)
        self._groups: dict[str, Group] = {}
        self._executor = GroupExecutor(self._groups, self._backend)
        self._start("policy", Policy, self._policy_factory())
        voiced = self._executor.look("policy", casting.voice).read(placement.deadline_s)
        self._tokenizer, self._context = voiced
        self._start_scorers()

    def train(self, progress: Progress, interruption: Interruption) -> None:
        """Run what is left of every phase."""
        recipe, plans = self._recipe, phase_plans(self._recipe)
        cadence = Cadence(
            evaluate_every=recipe.evaluate.every,
            checkpoint_every=recipe.run.checkpoint_every,
            keep_checkpoints=recipe.run.keep_checkpoints,
        )
        judge = self._judge if self._task.held_out and "reward" in self._groups else None
        total = plans[-1].first + plans[-1].config.steps
        loop = Loop(self._run, progress, cadence, judge, interruption, total, recipe.placement.deadline_s)
        state = self._checkpoint.state if self._checkpoint else {"phase": 0, "done": 0, "version": 0}
        index, loop.version = state["phase"], state["version"]
        if state["done"] == plans[index].config.steps:
            index, state = index + 1, {"done": 0}
        for number in range(index, len(plans)):
            resumed = state if number == index and state["done"] else None
            phase = self._phase(plans[number], resumed)
            loop.run_phase(phase, number, plans[number].first, resumed["done"] if resumed else 0)

    def _phase(self, plan: PhasePlan, resumed: Mapping[str, Any] | None) -> Phase:
        goes_on = self._checkpoint if resumed is not None else None
        begun = self._groups["policy"].call(
            "begin",
            train=plan.train,
            updates=plan.config.updates,
            resume=goes_on.optimizer("policy").absolute() if goes_on else None,
        )
        begun.read(self._recipe.placement.deadline_s)
        critics = [role for role in plan.algorithm.roles(plan.config) if role in CRITICS]
        for role in critics:
            self._start_critic(role, plan, goes_on)
        if "reference" in plan.algorithm.roles(plan.config):
            temperature = self._recipe.rollout.temperature
            factory = partial(
                casting.reference, self._kept_policy(), self._recipe.run.device, plan.train, temperature
            )
            self._start("reference", Reference, factory)
        return Phase(
            name=plan.name,
            steps=plan.config.steps,
            rows=plan.config.prompts_per_step,
            step=plan.algorithm.step,
            config=plan.config,
            flow=Flow(self._executor, resumed["numbers"] if resumed else None),
            executor=self._executor,
            trained=("policy", *critics),
            stream=self._stream(plan.algorithm.data, resumed["stream"] if resumed else None),
            beside=self._beside(plan, resumed),
            evaluated=plan.evaluated,
        )

    def _start_critic(self, role: str, plan: PhasePlan, goes_on: Checkpoint | None) -> None:
        """A critic as the phase begins: the policy with a new head, or what recipe or checkpoint have."""
        recipe = self._recipe
        done = goes_on.state["done"] if goes_on is not None else 0
        model = self._kept_policy()
        if recipe.critic.path is not None:
            model = model.model_copy(update={"path": recipe.critic.path})
        if goes_on is not None:
            model = model.model_copy(update={"path": str((goes_on.path / role).absolute())})
        train = TrainConfig(**{name: getattr(plan.train, name) for name in TrainConfig.model_fields})
        if recipe.critic.lr is not None:
            train = train.model_copy(update={"lr": recipe.critic.lr})
        factory = partial(
            casting.critic,
            model,
            self._base,
            recipe.run.device,
            train,
            recipe.run.seed,
            plan.config.updates,
            done,
            role,
            self._tokenizer,
        )
        self._start(role, Critic, factory)
        if goes_on is not None:
            resume = goes_on.optimizer(role).absolute()
            begun = self._groups[role].call("begin", train=train, updates=plan.config.updates, resume=resume)
            begun.read(recipe.placement.deadline_s)

    def _start(self, role: str, kind: type, factory: Factory) -> None:
        """Make a role on every rank of its pool."""
        placement = self._recipe.placement
        pool = placement.pool_of(role)
        mesh = Mesh.of(dp=placement.pools[pool])
        group = Group(role, endpoints_of(kind), mesh=mesh, pool=pool, backend=self._backend)
        group.start(factory, placement.deadline_s)
        self._groups[role] = group

    def _policy_factory(self) -> Factory:
        recipe, checkpoint = self._recipe, self._checkpoint
        model = recipe.policy.model
        if checkpoint is not None:
            model = ModelConfig(path=str(checkpoint.policy.absolute()), dtype=model.dtype)
        return partial(
            casting.policy,
            model,
            self._base,
            recipe.run.device,
            recipe.run.threads,
            recipe.policy,
            recipe.rollout,
            recipe.run.seed,
            checkpoint.state["version"] if checkpoint is not None else 0,
        )

    def _kept_policy(self) -> ModelConfig:
        """The policy as this phase found it; kept in the run directory so that a resume finds the same."""
        folder = (self._run.path / "reference").absolute()
        self._executor.look("policy", casting.keep_policy, folder).read(self._recipe.placement.deadline_s)
        return ModelConfig(path=str(folder), dtype=self._recipe.policy.model.dtype)

    def _start_scorers(self) -> None:
        """The reward, the recipe's or the task's own, and the cost; none where no phase asks for one."""
        recipe = self._recipe
        asked = {role for plan in phase_plans(recipe) for role in plan.algorithm.roles(plan.config)}
        function = recipe.reward.function or self._task.reward
        if recipe.reward.model is not None:
            self._start("reward", RewardModel, self._model_factory(recipe.reward.model, RewardModel))
        elif function is not None:
            settings = (parse_function(function, self._base), recipe.reward, self._tokenizer)
            self._start("reward", Reward, partial(casting.reward, *settings))
        elif "reward" in asked:
            raise ConfigError(
                f"reward.function is not set and the task {self._task.name} has no reward of its own",
                why="the algorithm scores what it samples",
                fix='write reward.function = "reward.py:name", relative to the recipe',
            )
        if recipe.cost.model is not None:
            self._start("cost", CostModel, self._model_factory(recipe.cost.model, CostModel))
        elif recipe.cost.function is not None:
            settings = (parse_function(recipe.cost.function, self._base), recipe.reward, self._tokenizer)
            self._start("cost", Cost, partial(casting.cost, *settings))
        elif "cost" in asked:
            raise ConfigError(
                "cost.function and cost.model are not set",
                why=f"{recipe.algorithm.name} keeps a cost below a limit, and nothing says what a row costs",
                fix='write cost.function = "cost.py:name", relative to the recipe',
            )

    def _model_factory(self, path: str, kind: type[RewardModel]) -> Factory:
        recipe = self._recipe
        model = ModelConfig(path=path, dtype=recipe.policy.model.dtype)
        train = TrainConfig(tokens_per_micro_batch=recipe.policy.tokens_per_micro_batch)
        bound = (model, self._base, recipe.run.device, train, recipe.run.seed, self._tokenizer, kind)
        return partial(casting.reward_model, *bound)

    def _beside(self, plan: PhasePlan, resumed: Mapping[str, Any] | None) -> Stream | None:
        """What the phase's step is given beside its data."""
        data = plan.algorithm.beside(plan.config)
        if data is None:
            return None
        return self._stream(data, resumed["beside"] if resumed else None, shift=BESIDE_SEED)

    def _stream(self, data: Data, saved: Mapping[str, int] | None, shift: int = 0) -> Stream:
        """The training rows in the order of every epoch, from the saved place on; a ``shift`` changes it."""
        position = StreamPosition(**(saved or {}))
        rows = PromptStream(self._task.train, seed=self._recipe.run.seed + shift, position=position)

        def take(count: int) -> Batch:
            drawn = rows.take(count)
            return self._batch(data, [draw.example for draw in drawn], [draw.epoch for draw in drawn])

        return Stream(take=take, state=rows.state)

    def _batch(self, data: Data, examples: Sequence[Example], epochs: int | Sequence[int]) -> Batch:
        tokenizer, context, too_long = self._tokenizer, self._context, self._recipe.task.too_long
        if data is Data.DEMONSTRATIONS:
            return supervised_batch(examples, tokenizer, epoch=epochs, context=context, too_long=too_long)
        room = self._recipe.rollout.max_tokens
        return prompt_batch(
            examples, tokenizer, epoch=epochs, context=context, max_tokens=room, too_long=too_long
        )

    def _judge(self, executor: GroupExecutor) -> Evaluation:
        recipe = self._recipe
        prompts = self._batch(Data.PROMPTS, self._task.held_out[: recipe.evaluate.problems], HELD_OUT_EPOCH)
        sampling = SamplingConfig(
            temperature=recipe.evaluate.temperature,
            max_tokens=recipe.rollout.max_tokens,
            stop=recipe.rollout.stop,
        )
        rollouts = executor.call("policy", "generate", [prompts], {"samples": 1, "sampling": sampling})
        scores = executor.call("reward", "score", [rollouts], {})
        found = executor.apply(judged, rollouts, scores, place=rollouts.places[0])
        evaluation: Evaluation = found.read(recipe.placement.deadline_s)
        return evaluation

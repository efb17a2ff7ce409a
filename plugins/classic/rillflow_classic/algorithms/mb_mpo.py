"""MB-MPO: a policy that adapts to each model of an ensemble (Clavera et al., arXiv 1809.05214, algorithm 1).

    f_k = argmin E_k[ |f(s, a) - (s' - s, r)|^2 ]        E_k: a bootstrap of all real transitions
    theta <- MAML's meta update, in which model k is task k: both rollouts are imagined with f_k

    real rollouts ─ store ─ fit models ─ meta updates on imagined rollouts ─> adapted policies for the actors

Models that differ are tasks that differ, so the policy need not trust any of them; real steps show which is
right. The adapted policies take turns in the slots: each plays real episodes, also with fewer slots than
models. Two things differ from the paper: a model predicts the reward too, and imagined episodes begin at any
real observation. Both controls have ``inner_lr`` = 0: the same models, or only one (``members`` = 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rillflow.errors import ConfigError, TrainingError
from rillflow.records.metrics import Mean, Metrics, merge_metrics
from rillflow_classic.algorithm import ClassicAlgorithm, LearnerInputs
from rillflow_classic.algorithms.maml import MamlConfig, MamlLearner, send_tasks
from rillflow_classic.environments.vector import Stepped, VectorEnvironment
from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.networks.ensemble import EnsembleMLP
from rillflow_classic.off_policy import make_replay
from rillflow_classic.on_policy import fragment_metrics
from rillflow_classic.operators.context import Operator, PlanContext
from rillflow_classic.policy import Weights
from rillflow_classic.replay import ReplayBuffer, ReplayConfig
from rillflow_classic.workers.actor import Actor


class MbMpoConfig(MamlConfig):
    """``[algorithm]`` of MB-MPO."""

    members: int = Field(5, ge=1, description="Models.")
    model_hidden: tuple[int, ...] = Field((64, 64), strict=False, description="Widths of a model's layers.")
    model_lr: float = Field(3e-3, gt=0, description="Learning rate of Adam for the models.")
    model_steps: int = Field(400, ge=1, description="Optimiser steps of each fit, which begins anew.")
    model_batch: int = Field(
        64, ge=1, description="Transitions in each optimiser step of a fit, for each model."
    )
    imagined: int = Field(32, ge=1, description="Imagined episodes of each model in a rollout.")
    horizon: int = Field(20, ge=1, description="Steps of an imagined episode.")
    updates: int = Field(20, ge=1, description="Meta updates after each real rollout.")
    num_steps: Literal[1] = Field(1, description="Rewards of a transition.")
    replay: ReplayConfig = ReplayConfig()


class Models:
    """Dynamics models, each fitted to a bootstrap of the real transitions.

    Args:
        data: the transitions.
        settings: settings of the algorithm.
        actions: bounds of the actions.
        seed: seed of the first weights and of the order of the transitions.
    """

    def __init__(
        self, data: ReplayBuffer, settings: MbMpoConfig, actions: gymnasium.spaces.Box, seed: int
    ) -> None:
        self.low, self.high = actions.low, actions.high
        generator, members = torch.Generator().manual_seed(seed), settings.members
        samples = [data.sample(data.num_transitions) for _ in range(members)]
        self.starts = samples[0].observations
        """[B, F] real observations."""
        inputs = torch.stack([self._inputs(each.observations, each.actions) for each in samples])
        changes = [np.c_[each.next_observations - each.observations, each.returns] for each in samples]
        targets = torch.from_numpy(np.stack(changes))
        self._shift, self._scale = _moments(inputs)
        self._change, self._spread = _moments(targets)
        inputs, targets = (inputs - self._shift) / self._scale, (targets - self._change) / self._spread
        widths = (inputs.shape[2], *settings.model_hidden, targets.shape[2])
        self._network = EnsembleMLP(members, widths, generator)
        optimizer = torch.optim.Adam(self._network.parameters(), settings.model_lr)
        rows = torch.arange(members)[:, None]
        for _ in range(settings.model_steps):
            part = torch.randint(inputs.shape[1], (members, settings.model_batch), generator=generator)
            loss = (self._network(inputs[rows, part]) - targets[rows, part]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.loss = float(loss.detach())
        """Squared error of the last step, relative to the variance."""

    @torch.inference_mode()
    def predict(self, observations: Array, actions: Array) -> tuple[Array, Array]:
        """Return next observations [N, F] and rewards [N]; model k predicts the k-th part of the rows."""
        inputs = (self._inputs(observations, actions) - self._shift) / self._scale
        inputs = inputs.view(len(self._network.weights[0]), -1, inputs.shape[1])
        found = (self._network(inputs) * self._spread + self._change).flatten(0, 1).numpy()
        return observations + found[:, :-1], found[:, -1]

    def _inputs(self, observations: Array, actions: Array) -> Tensor:
        return torch.from_numpy(np.c_[observations, actions.clip(self.low, self.high)])


class ImaginedEnvironment(VectorEnvironment):
    """A vector environment made of models: each steps an equal part of the slots.

    Args:
        models: the models.
        num_slots: slots, a multiple of the number of models.
        spaces: space of one observation, and of one action.
        horizon: steps of an episode.
    """

    def __init__(self, models: Models, num_slots: int, spaces: tuple[Any, Any], horizon: int) -> None:
        super().__init__(("",) * num_slots, *spaces)
        self._models, self._horizon = models, horizon
        self._observations = models.starts[:0]

    def begin(self, seed: int) -> Array:
        """Begin every episode at a real observation."""
        starts = self._models.starts
        chosen = np.random.default_rng(seed).integers(len(starts), size=self.num_slots)
        self._observations = starts[chosen]
        return self._observations

    def advance(self, actions: Array) -> Stepped:
        """Step every slot; all episodes are truncated at the horizon, and then ``reset`` comes."""
        self._observations, rewards = self._models.predict(self._observations, actions)
        truncated = self._steps - self._starts >= self._horizon - 1
        ends: dict[str, Any] = {"terminated": np.zeros_like(truncated), "truncated": truncated}
        return Stepped(observations=self._observations, rewards=rewards, **ends)


class MbMpoLearner(MamlLearner):
    """The learner of MAML, whose tasks are models.

    Raises:
        ConfigError: observations or actions are no vectors of floats.
    """

    _settings: MbMpoConfig

    def __init__(self, inputs: LearnerInputs) -> None:
        super().__init__(inputs, inputs.settings.imagined)
        self.inputs = inputs
        """Arguments of its constructor."""
        for space in (inputs.observation_space, inputs.action_space):
            if not isinstance(space, gymnasium.spaces.Box) or space.dtype != np.float32:
                raise ConfigError(
                    f"a model does not fit the space {space}",
                    why="models predict vectors of floats from vectors of floats",
                    fix="use an environment with Box observations and Box actions",
                )

    def search(self, data: ReplayBuffer) -> tuple[list[Weights], Metrics]:
        """Fit the models, take all meta updates, and return the weights of each model's adapted policy."""
        settings, given = self._settings, self.inputs
        box: Any = given.action_space
        models = Models(data, settings, box, given.seed + self.version)
        spaces = given.observation_space, given.action_space
        slots = settings.members * settings.imagined
        environment = ImaginedEnvironment(models, slots, spaces, settings.horizon)
        actor = Actor([environment], {given.policy: self.policy}, settings.horizon)
        metrics: list[Metrics] = []
        for _ in range(settings.updates):
            before = self._played(actor, 0)
            self.tasks.load_tasks(self.version, self.adapted(before))
            after = self._played(actor, 1)
            metrics.append(self.update([(before, after)]))
            self.tasks.load_tasks(self.version, ())
        found = merge_metrics(metrics)
        named = {name.replace("episode/", "imagined/"): value for name, value in found.items()}
        named["model/loss/mean"] = Mean(total=models.loss, count=1)
        return self.adapted(self._played(actor, 0)), named

    def _played(self, actor: Actor, place: int) -> Fragment:
        actor.reset(2 * self.version + place)
        found: Any = actor.sample()
        return found  # type: ignore[no-any-return]


def plan(system: Any, settings: MbMpoConfig) -> Iterator[Metrics]:
    """Return the dataflow: real rollouts, their transitions, and the search for policies."""
    data = system.kept.keep("replay", partial(make_replay, system.learner.inputs))
    return system.rollouts("bulk_sync").for_each(search(system, settings, data))  # type: ignore[no-any-return]


def search(system: Any, settings: MbMpoConfig, data: ReplayBuffer) -> Operator:
    """Keep the transitions, search for adapted policies, and let the actors act with them."""
    learner: MbMpoLearner = system.learner

    def begin(context: PlanContext) -> Callable[[Fragment], Metrics]:
        def searched(fragment: Fragment) -> Metrics:
            if fragment.terminated.any():
                raise TrainingError(
                    "an episode has terminated, and models predict no termination",
                    why="imagined episodes would go on where real ones end",
                    fix="use an environment whose episodes only a time limit ends",
                )
            data.add(fragment)
            acted = fragment_metrics(fragment, learner.version)
            weights, metrics = learner.search(data)
            slots, num_actors = fragment.valid.shape[1], system.actors.size
            first = learner.version // settings.updates * slots
            for actor in range(num_actors):
                begin = (first + actor * slots // num_actors) % len(weights)
                send_tasks(system, context, actor, [*weights[begin:], *weights[:begin]])
            return {**metrics, **acted}

        return searched

    return Operator(label="search", begin=begin)


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each column, [F], of rows [E, B, F]."""
    flat = values.flatten(0, 1)
    return flat.mean(0), flat.std(0) + 1e-6


ALGORITHM = ClassicAlgorithm(
    name="mb_mpo",
    config=MbMpoConfig,
    learner=MbMpoLearner,
    plan=plan,
    calls_actors=True,
    remark="the policy acts as it is before it adapts to a model; adapting needs the plan of a run",
)

"""On-policy learning: the learner of PPO, and of A2C as PPO with one epoch and one minibatch.

Fragment ─ values, GAE ─> advantages, returns ─ epochs x minibatches ─> loss ─ backward ─┐
                                                                                         v
weights <─ Adam <─ clip by norm <─ sum over trainer ranks <────────────────── one flat gradient

Legend: T steps, N slots, B rows of a minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rillflow.errors import ConfigError, TrainingError
from rillflow.records.metrics import Mean, Metric, Metrics, Sum
from rillflow.workers.collectives import Ranks
from rillflow_classic.algorithm import LearnerInputs, RolloutSize
from rillflow_classic.flat_learner import FlatLearner, LearnerConfig
from rillflow_classic.formulas import gae, moments, scaled
from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.networks.acting import NetworkPolicy
from rillflow_classic.networks.build import ActorCritic, build_network
from rillflow_classic.networks.distributions import Floats
from rillflow_classic.networks.flat import views
from rillflow_classic.networks.passes import ForwardPass, NumpyMLP, torch_pass

TERMS = {
    "policy loss": "policy/loss/mean",
    "value loss": "policy/value_loss/mean",
    "entropy": "policy/entropy/mean",
    "KL divergence": "policy/approximate_kl/mean",
    "clipped share": "policy/clipped/share",
}
"""Metric of each sum over rows that a minibatch reports."""


class OnPolicyConfig(LearnerConfig):
    """Settings that PPO and A2C share; the defaults are PPO's for small networks."""

    lr: float = Field(2.5e-4, gt=0, description="Learning rate of Adam.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of the advantage estimates.")
    epochs: int = Field(4, gt=0, description="Passes over each fragment.")
    minibatches: int = Field(4, gt=0, description="Optimiser steps of each pass.")
    clip: float = Field(0.2, gt=0, description="Largest change of the probability ratio that has a gradient.")
    value_weight: float = Field(1.0, ge=0, description="Weight of the value loss, 0.5 (V - R)^2.")
    entropy_weight: float = Field(0.01, ge=0, description="Weight of the entropy.")
    max_gradient_norm: float = Field(0.5, gt=0, description="Norm to which larger gradients are scaled.")
    normalise_advantages: bool = Field(
        True, description="Whether advantages of an update get mean 0 and deviation 1."
    )


@dataclass(frozen=True, kw_only=True)
class _Experience:
    """A fragment as tensors, with its advantages."""

    observations: Tensor
    """[T, N, ...]."""
    actions: Tensor
    """[T, N] or [T, N, A]."""
    columns: Tensor
    """[T, N, 3] acted log probabilities, advantages, returns."""
    valid: Tensor
    """[T, N] bool."""
    starts: Tensor
    """[T, N] bool: rows before which an LSTM's state is zero again."""
    state: Tensor | None
    """[N, 2, H] recurrent state before step 0."""
    metrics: Mapping[str, Metric]
    """Metrics of acting and of the estimates; they replace those of the minibatches."""


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Advantages and value targets of a fragment, computed once before its first minibatch."""

    logprobs: Tensor
    """[T, N] log probabilities that a ratio of 1 has."""
    advantages: Tensor
    """[T, N]."""
    returns: Tensor
    """[T, N] targets of the value function."""
    weights: Tensor | None = None
    """[T, N] factors of the advantages, after they are normalised; None for 1."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics that replace those of the minibatches."""


def require_rows(inputs: LearnerInputs, size: RolloutSize) -> None:
    """Raise ConfigError if fragments have fewer rows, or slots with an LSTM, than minibatches."""
    is_lstm, minibatches = inputs.network.kind == "lstm", inputs.settings.minibatches
    rows = size.slots if is_lstm else size.slots * size.steps
    if rows < minibatches:
        unit = "slots, which an LSTM needs whole" if is_lstm else "rows: workers.slots x workers.steps"
        raise ConfigError(
            f"algorithm.minibatches is {minibatches}, and an update has {rows} {unit}",
            why="no minibatch can be empty",
            fix=f"set algorithm.minibatches to at most {rows}, or raise workers.slots",
        )


class OnPolicyLearner(FlatLearner[ActorCritic]):
    """The learner of PPO (Schulman et al., arXiv 1707.06347).

    Args:
        inputs: spaces, settings and seed; the settings are an ``OnPolicyConfig``.
        ranks: trainer ranks that hold the other slots; gradients are summed over them. Every rank has the
            same seed.
    """

    def __init__(self, inputs: LearnerInputs, ranks: Ranks | None = None) -> None:
        network = build_network(inputs.network, inputs.observation_space, inputs.action_space, inputs.seed)
        make_policy = partial(NetworkPolicy, seed=inputs.seed)
        super().__init__(network, make_policy, inputs.settings, eps=1e-5, norm_eps=1e-6, ranks=ranks)
        self._seed = inputs.seed
        self._mlp = NumpyMLP(network) if NumpyMLP.fits(network) else None

    def update(self, data: Fragment) -> Metrics:
        """Take all optimiser steps on a fragment.

        Raises:
            NotFiniteError: a loss or a gradient is not finite; the weights are those before its minibatch.
            TrainingError: the fragment has fewer rows, or slots with an LSTM, than minibatches.
        """
        experience = self._experience(data)
        totals, norms = torch.zeros(len(TERMS), dtype=torch.float64), []
        for part, count in self._minibatches(experience):
            if count:
                terms = self._backward(experience, part, count)
                norms.append(self._step(dict(zip(TERMS, terms.tolist(), strict=True))))
                totals += terms
        self._count_update()
        return self._metrics(experience, totals, norms)

    def gradients(self, data: Fragment) -> tuple[list[Tensor], Metrics]:
        """Return the gradient of every parameter for a whole fragment, without a step.

        The settings have one epoch and one minibatch, as those of A3C.
        """
        experience = self._experience(data)
        [(part, count)] = self._minibatches(experience)
        ordered = part.sort().values  # so that the rounding does not depend on a learner's seed
        terms = self._backward(experience, ordered, count)
        gradients = views(self._gradient.clone(), self.network.parameters())
        return gradients, self._metrics(experience, terms, [])

    def apply(self, gradients: list[Tensor]) -> None:
        """Take one optimiser step with given gradients.

        Raises:
            NotFiniteError: a gradient is not finite; the weights stay.
        """
        torch.cat([each.flatten() for each in gradients], out=self._gradient)
        self._step()
        self._count_update()

    @torch.no_grad()
    def _experience(self, data: Fragment) -> _Experience:
        """Return a fragment as tensors, with its estimates."""
        valid = as_tensor(data.valid)
        starts = torch.zeros(len(valid) + 1, valid.shape[1], dtype=torch.bool)
        starts[1:] = ~valid
        found = self.estimates(data, starts)
        advantages = found.advantages
        if self._settings.normalise_advantages:
            total = moments(advantages, valid)
            self.ranks.sum_([total])
            advantages = scaled(advantages, valid, total)
        if found.weights is not None:
            advantages = advantages * found.weights
        return _Experience(
            observations=as_tensor(data.observations)[:-1],
            actions=as_tensor(data.actions),
            columns=torch.stack([found.logprobs, advantages, found.returns], dim=-1),
            valid=valid,
            starts=starts[:-1],
            state=None if data.state is None else as_tensor(data.state),
            metrics={**fragment_metrics(data, self.version), **found.metrics},
        )

    def estimates(self, data: Fragment, starts: Tensor) -> Estimates:
        """Return advantages and returns from the values of the policy that acted.

        Args:
            data: the fragment.
            starts: [T + 1, N] bool: rows before which an LSTM's state is zero again.
        """
        observations = as_tensor(data.observations)
        if data.state is None:
            last = self.network(observations[-1]).values
            values = torch.cat([as_tensor(data.outputs["values"]), last[None]])
        else:
            values = self.network.unroll(observations, as_tensor(data.state), starts).values
        values = values.view(starts.shape)
        settings = self._settings
        advantages = gae(values=values, gamma=settings.gamma, lam=settings.lam, **steps_of(data))
        logprobs = as_tensor(data.outputs["logprobs"])
        return Estimates(logprobs=logprobs, advantages=advantages, returns=advantages + values[:-1])

    def _minibatches(self, experience: _Experience) -> list[tuple[Tensor, float]]:
        """Return this rank's part of every minibatch, and the number of valid rows of all ranks in it.

        A part has rows t * N + n, or slots n with an LSTM. Minibatches are parts of a permutation over all
        ranks, which has a seed of its own for every update. So they are the same for any division of the
        slots among ranks.
        """
        settings, valid = self._settings, experience.valid
        num_slots = valid.shape[1]
        if self.network.lstm_size:
            unit, units = "slots, which an LSTM needs whole", torch.arange(num_slots)[None]
            rows = valid.sum(0)
        else:
            unit, units = "rows", torch.arange(valid.numel()).view(valid.shape)
            units, rows = torch.where(valid, units, -1), valid.flatten()
        slots = self.ranks.stack(torch.tensor(num_slots)).tolist()
        first = sum(slots[: self.ranks.rank])
        own = torch.full((len(units), sum(slots)), -1)
        own[:, first : first + num_slots] = units
        if own.numel() < settings.minibatches:
            raise TrainingError(
                f"{settings.minibatches} minibatches are made of {own.numel()} {unit}",
                why="no minibatch can be empty",
                fix="lower algorithm.minibatches, or use more environments",
            )
        generator = np.random.default_rng((self._seed, self.version))
        drawn = (torch.from_numpy(generator.permutation(own.numel())) for _ in range(settings.epochs))
        parts = [own.flatten()[part] for order in drawn for part in order.tensor_split(settings.minibatches)]
        parts = [part[part >= 0] for part in parts]
        counts = torch.stack([rows[part].sum() for part in parts])
        self.ranks.sum_([counts])
        return list(zip(parts, counts.double().tolist(), strict=True))

    def _backward(self, experience: _Experience, part: Tensor, count: float) -> Tensor:
        """Write the gradient of a minibatch into the flat tensor, and return the sums of its terms.

        The derivatives of the loss are written out: by a log probability -A rho where it is not clipped, by a
        value w (V - R), by an entropy -h, all divided by ``count``.
        """
        settings = self._settings
        passed, actions, columns = self._rows(experience, part)
        acted_logprobs, advantages, returns = columns.T
        with np.errstate(over="ignore", invalid="ignore"):  # _step refuses what is not finite
            derived = self.network.distribution.derive(passed.parameters, actions)
            log_ratios = derived.logprobs - acted_logprobs
            ratios = np.exp(log_ratios)
            clipped = np.clip(ratios, 1 - settings.clip, 1 + settings.clip)
            gains, clipped_gains = advantages * ratios, advantages * clipped
            errors = passed.values - returns
            by_logprobs = np.where(gains > clipped_gains, np.float32(0), gains) * np.float32(-1 / count)
            by_parameters = derived.gradient(by_logprobs, -settings.entropy_weight / count)
            passed.backward(by_parameters, errors * np.float32(settings.value_weight / count))
            policy_loss, value_loss = -np.minimum(gains, clipped_gains).sum(), 0.5 * errors.dot(errors)
            divergence, share = (ratios - 1 - log_ratios).sum(), (ratios != clipped).sum()
        terms = [policy_loss, value_loss, derived.entropies.sum(), divergence, share]
        return torch.tensor([float(each) for each in terms], dtype=torch.float64)

    def _rows(self, experience: _Experience, part: Tensor) -> tuple[ForwardPass, Array, Floats]:
        """Return the pass, the actions and the columns [B, 3] of a minibatch's valid rows."""
        fields = (experience.actions, experience.columns)
        if experience.state is None:
            observations = experience.observations.flatten(0, 1)
            actions, columns = (each.flatten(0, 1)[part].numpy() for each in fields)
            if self._mlp is not None:
                return self._mlp.forward(observations.numpy()[part.numpy()]), actions, columns
            return torch_pass(self.network(observations[part]), self._gradient), actions, columns
        kept = experience.valid[:, part].flatten()
        starts, state = experience.starts[:, part], experience.state[part]
        output = self.network.unroll(experience.observations[:, part], state, starts)
        actions, columns = (each[:, part].flatten(0, 1)[kept].numpy() for each in fields)
        return torch_pass(output, self._gradient, kept), actions, columns

    def _metrics(self, experience: _Experience, totals: Tensor, norms: Sequence[float]) -> Metrics:
        count, sums = self._settings.epochs * float(experience.valid.sum()), totals.tolist()
        means = {name: Mean(total=each, count=count) for name, each in zip(TERMS.values(), sums, strict=True)}
        norm = Mean(total=sum(norms), count=len(norms))
        return {**means, "policy/gradient_norm/mean": norm, **experience.metrics}


def as_tensor(array: Array) -> Tensor:
    """Return a tensor that shares an array's memory; a read-only array is copied, as torch requires."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def steps_of(data: Fragment) -> dict[str, Tensor]:
    """Return the arguments of the formulas that a fragment has, by name."""
    names = ("rewards", "terminated", "truncated", "valid")
    return {name: as_tensor(getattr(data, name)) for name in names}


def fragment_metrics(data: Fragment, version: int) -> dict[str, Metric]:
    """Return what a fragment says about acting, if weights of a version learn from it."""
    returns = [episode.total_reward for episode in data.episodes]
    lengths = [episode.length for episode in data.episodes]
    lag = version * len(data.versions) - int(data.versions.sum())
    return {
        "episode/return/mean": Mean(total=sum(returns), count=len(returns)),
        "episode/length/mean": Mean(total=sum(lengths), count=len(lengths)),
        "actor/steps/sum": Sum(value=data.num_steps),
        "actor/lag/mean": Mean(total=lag, count=len(data.versions)),
    }

"""Random batches, and the results of Rillflow's formulas on them, both in the padded form that peers use.

    seed, scenario, dtype ──> fields [B], [B, L] ─┬─ safetensors ──> the peers' own code
                                                  └─ ragged rows, loss tokens ──> ``formulas`` ──> [B, L]

Legend: B rows (5 prompts x 4), L the longest answer, N loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from rillflow import formulas
from rillflow.formulas.config import Estimator, PolicyLossConfig
from rillflow.formulas.losses import Aggregation, correction_weights
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged

GROUPS, SAMPLES, LONGEST = 5, 4, 14
SPREAD = {"plain": 0.3, "holes": 0.3, "edge": 0.3, "wide": 2.0, "small": 0.002}
"""Standard deviation of log pi - log old in each scenario.

holes: tool tokens inside rows, at the beginning of one row and the end of another. edge: holes, a group of
equal rewards, a group with a single scored row, a group with none, an abstained row, a row of one token, and
a row without a loss token.
"""
CREDIT = ((1.0, 1.0), (1.0, 0.95), (0.97, 0.9), (0.9, 0.0))
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 0.0, "ratio": "sequence"}
CISPO = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0, "surrogate": "weight"}
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The origin of a batch."""

    seed: int
    """Seed of its numbers."""
    scenario: str
    """A key of SPREAD."""
    dtype: torch.dtype
    """Dtype of its numbers."""

    @property
    def name(self) -> str:
        """Name in files."""
        return f"{self.seed}-{self.scenario}-{str(self.dtype).removeprefix('torch.')}"


def scenes(seeds: int) -> Iterator[Scene]:
    """Yield all scenes."""
    for seed, scenario, dtype in product(range(seeds), SPREAD, (torch.float64, torch.float32)):
        yield Scene(seed=seed, scenario=scenario, dtype=dtype)


def batch_of(scene: Scene) -> Tensors:
    """Return the fields of a batch; float32 numbers are the rounded float64 ones."""
    numbers = torch.Generator().manual_seed(scene.seed * len(SPREAD) + [*SPREAD].index(scene.scenario))
    rows = GROUPS * SAMPLES

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float64)

    lengths = torch.randint(1, LONGEST + 1, (rows,), generator=numbers)
    lengths[0] = LONGEST
    valid = torch.ones(rows, dtype=torch.bool)
    rewards = (normal(rows) * 2).round() / 2
    if scene.scenario == "edge":
        rewards[:4], lengths[5] = 0.1, 1
        valid[5:8] = valid[8:12] = valid[13] = valid[19] = False
    mask = _mask(lengths, scene.scenario)
    old = -normal(rows, LONGEST).abs() - 0.1
    now = old + SPREAD[scene.scenario] * normal(rows, LONGEST)
    sampler = old + 0.1 * normal(rows, LONGEST)
    fields = {
        "rewards": rewards,
        "greedy_rewards": normal(rows),
        "old": old,
        "now": now,
        "sampler": sampler,
        "reference": now + 0.5 * normal(rows, LONGEST),
        "weights": (old - sampler).exp().clamp_max(1.05),
        "values": normal(rows, LONGEST),
        "returns": normal(rows, LONGEST),
        "entropy": normal(rows, LONGEST).abs(),
        "advantages": normal(rows),
        "token_advantages": normal(rows, LONGEST),
    }
    fields["paid"] = _at_the_last(rewards, mask)
    fixed = {"lengths": lengths, "mask": mask, "valid": valid, "constant": torch.tensor(LONGEST)}
    fixed["groups"] = torch.arange(GROUPS).repeat_interleave(SAMPLES)
    return {**{name: field.to(scene.dtype) for name, field in fields.items()}, **fixed}


def _mask(lengths: Tensor, scenario: str) -> Tensor:
    """Return the mask of sampled tokens, [B, L]."""
    mask = torch.arange(LONGEST) < lengths[:, None]
    if scenario in ("holes", "edge", "wide"):
        mask[1::3, 2:5] = False
        mask[0, 0] = False
        mask[3, lengths[3] - 1] = lengths[3] == 1
        mask[:, 0] |= ~mask.any(1)
    if scenario == "edge":
        mask[19] = False
    return mask


def _at_the_last(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return each row's reward at its last loss token, else 0; [B, L]."""
    last = torch.where(mask, torch.arange(LONGEST), -1).amax(1)
    found = torch.zeros(mask.shape, dtype=rewards.dtype)
    found[last >= 0, last[last >= 0]] = rewards[last >= 0]
    return found


def ours(batch: Tensors) -> Tensors:
    """Return every quantity that a peer has too, by the peer's name."""
    return {**_row_advantages(batch), **_token_advantages(batch), **_losses(batch)}


def _ragged(batch: Tensors, name: str) -> Ragged:
    inside = torch.arange(LONGEST) < batch["lengths"][:, None]
    return Ragged(values=batch[name][inside], lengths=batch["lengths"])


def _padded(field: Ragged) -> Tensor:
    found = field.padded(0)
    return torch.nn.functional.pad(found, (0, LONGEST - found.shape[1]))


def _row_advantages(batch: Tensors) -> Tensors:
    rewards, groups, valid, mask = batch["rewards"], batch["groups"], batch["valid"], _ragged(batch, "mask")
    found: Tensors = {}
    for scale in ("std", "off"):
        name = cast(Literal["std", "off"], scale)
        found[f"GRPO, {scale}"] = formulas.group_advantages(rewards, groups, valid, scale=name)
    found["RLOO"] = formulas.leave_one_out(rewards, groups, valid)
    ids = torch.tensor([[0, row, 0] for row in range(len(rewards))])
    fields = {"rewards": batch["greedy_rewards"], "valid": torch.ones_like(valid)}
    found["ReMax"] = formulas.over_greedy(rewards, valid, ids, greedy=Batch(ids=ids, fields=fields))
    sampler, reference = _ragged(batch, "sampler"), _ragged(batch, "reference")
    charged = formulas.penalised_rewards(rewards, sampler, reference, mask, weight=0.1, estimator="k1")
    found["RLOO, divergence in the reward"] = formulas.leave_one_out(charged, groups, valid)
    return found


def _token_advantages(batch: Tensors) -> Tensors:
    rewards, valid, mask = batch["rewards"], batch["valid"], _ragged(batch, "mask")
    values = _ragged(batch, "values")
    earned = formulas.token_rewards(rewards, mask)
    found: Tensors = {}
    for gamma, lam in CREDIT:
        settings = {"gamma": gamma, "lam": lam}
        advantages = formulas.gae(earned, values, mask, valid, **settings)
        found[f"GAE, {gamma}, {lam}"] = _padded(advantages)
        returns = formulas.value_targets(advantages, values, mask)
        found[f"GAE, returns, {gamma}, {lam}"] = _padded(returns)
        found[f"GAE, whitened, {gamma}, {lam}"] = _padded(formulas.whitened(advantages, mask, valid))
    for gamma in (1.0, 0.97):
        returns = formulas.returns_to_go(earned, mask, valid, gamma=gamma)
        found[f"REINFORCE++, returns, {gamma}"] = _padded(returns)
        white = formulas.whitened_returns(earned, mask, valid, gamma=gamma)
        found[f"REINFORCE++, whitened, {gamma}"] = _padded(white)
    prices = (_ragged(batch, "sampler"), _ragged(batch, "reference"), mask)
    for estimator in ("k1", "k2", "k3"):
        name = cast(Estimator, estimator)
        paid = formulas.penalised_token_rewards(rewards, *prices, weight=0.1, estimator=name)
        found[f"token rewards less divergence, {estimator}"] = _padded(paid)
    return found


def _losses(batch: Tensors) -> Tensors:
    """Return loss values and their gradients with respect to the log probabilities."""
    mask, lengths = batch["mask"], batch["mask"].sum(1)
    known = {"rows": batch["advantages"][:, None].expand_as(mask), "tokens": batch["token_advantages"]}
    chosen = {name: batch[name][mask] for name in ("old", "sampler", "reference", "entropy")}
    found: Tensors = {}

    def add(name: str, aggregation: Aggregation, of: Callable[[Tensor], Tensor]) -> None:
        now = batch["now"].clone().requires_grad_()
        weights = formulas.loss_weights(_ragged(batch, "mask"), aggregation, LONGEST)
        share = _padded(weights.values).to(now.dtype)[mask]
        value = (of(now[mask]) * share).sum() / weights.denominator
        value.backward()
        assert now.grad is not None
        found[name], found[f"{name}/gradient"] = value.detach(), now.grad

    def policy(level: str, **settings: Any) -> Callable[[Tensor], Tensor]:
        is_row = settings.pop("ratio", "token") == "sequence"

        def losses(now: Tensor) -> Tensor:
            ratio = now - chosen["old"]
            if is_row:
                ratio = formulas.sequence_log_ratio(Ragged(values=ratio, lengths=lengths))
            return formulas.clipped_policy_loss(ratio, known[level][mask], **settings)

        return losses

    def divergence(estimator: Estimator) -> Callable[[Tensor], Tensor]:
        return lambda now: formulas.divergence(now - chosen["reference"], estimator)

    clip = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    for name, level in product(AGGREGATIONS, known):
        for high, dual in product((0.2, 0.28), (3.0, 0.0)):
            bounds = {"clip_low": 0.2, "clip_high": high, "dual_clip": dual}
            add(f"PPO, clip {high}, dual {dual:g}, {level}, {name}", name, policy(level, **bounds))
        add(f"GSPO, {level}, {name}", name, policy(level, **GSPO))
        add(f"CISPO, {level}, {name}", name, policy(level, **CISPO))
    one_bound = policy("rows", **{**CISPO, "clip_low": 1.0})
    add("CISPO, one bound, rows, token_mean", "token_mean", one_bound)
    ppo, flat = policy("rows", **clip), policy("rows", **{**clip, "dual_clip": 0.0})
    moved = Ragged(values=chosen["old"] - chosen["sampler"], lengths=lengths)
    tis = PolicyLossConfig(correction="tis", correction_bounds=(0, 1.05))
    capped, _ = correction_weights(moved, known["rows"][mask], tis)
    sampled = "truncated importance sampling, token_mean"
    add(f"PPO, dual 3, {sampled}", "token_mean", lambda now: ppo(now) * capped)
    add(f"PPO, dual 0, {sampled}", "token_mean", lambda now: flat(now) * capped)
    add("PPO, entropy, token_mean", "token_mean", lambda now: flat(now) - 0.1 * chosen["entropy"])
    for name in AGGREGATIONS:
        for estimator in ("k2", "k3"):
            add(f"divergence in the loss, {estimator}, {name}", name, divergence(cast(Estimator, estimator)))
        price = divergence("k3")
        add(f"PPO and divergence in the loss, k3, {name}", name, lambda now: flat(now) + 0.1 * price(now))  # noqa: B023
    values = (batch["values"][mask], batch["returns"][mask])
    for bound in (0.2, 0.0):
        add(
            f"value loss, clip {bound:g}",
            "token_mean",
            lambda now: formulas.value_loss(now, values[1], clip=bound, old_values=values[0]).losses,  # noqa: B023
        )
    return found


def adaptive_weights(observed: Sequence[float]) -> Tensor:
    """Return the KL weight after each step with this observed divergence."""
    weight, found = 0.05, []
    for each in observed:
        weight = formulas.next_kl_weight(weight, each, 0.1, 1000.0, SAMPLES * GROUPS)
        found.append(weight)
    return torch.tensor(found, dtype=torch.float64)

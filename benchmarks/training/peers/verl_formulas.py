"""verl's own formulas on the batches of ``benchmarks/training/differential.py`` with ``--verl-python``.

child (this)   IN.safetensors: ``batch/name`` [B], [B, L] or a number
               OUT.safetensors: ``batch/quantity``, and ``batch/quantity/gradient`` of the log probabilities

verl's functions compute every number. One line of its trainer is repeated here: it subtracts the weighted
divergence from a reward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from verl.trainer.ppo import core_algos as verl
from verl.workers.config import ActorConfig

Tensors = dict[str, Tensor]
UNBOUNDED = 1e9
"""A bound that never applies, for clipping that verl cannot switch off."""
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}


def advantages(batch: Tensors) -> Tensors:
    """Return advantages of the rows that have a score; verl has no other rows."""
    scored, mask = batch["valid"], batch["mask"][batch["valid"]].to(batch["rewards"].dtype)
    paid, groups = batch["paid"][scored], batch["groups"][scored].numpy()
    found = {}
    for scale in ("std", "off"):
        rows, _ = verl.compute_grpo_outcome_advantage(
            paid, mask, groups, norm_adv_by_std_in_grpo=scale == "std"
        )
        found[f"GRPO, {scale}"] = rows
    found["RLOO"] = verl.compute_rloo_outcome_advantage(paid, mask, groups)[0]
    found["ReMax"] = verl.compute_remax_outcome_advantage(paid, batch["greedy_rewards"][scored], mask)[0]
    values = batch["values"][scored]
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.97, 0.9), (0.9, 0.0)):
        white, returns = verl.compute_gae_advantage_return(paid, values, mask, gamma, lam)
        found[f"GAE, returns, {gamma}, {lam}"] = returns * mask
        found[f"GAE, whitened, {gamma}, {lam}"] = white * mask
    for gamma in (1.0, 0.97):
        white, returns = verl.compute_reinforce_plus_plus_outcome_advantage(
            paid, mask, config=SimpleNamespace(gamma=gamma)
        )
        found[f"REINFORCE++, returns, {gamma}"] = returns
        found[f"REINFORCE++, whitened, {gamma}"] = white
    for estimator in ("k1", "k2", "k3"):
        price = verl.kl_penalty(batch["sampler"], batch["reference"], estimator) * batch["mask"]
        found[f"token rewards less divergence, {estimator}"] = (batch["paid"] - 0.1 * price)[scored]
    return found


def losses(batch: Tensors) -> Tensors:
    """Return losses with their gradients."""
    mask = batch["mask"].to(batch["rewards"].dtype)
    known = {"rows": batch["advantages"][:, None].expand_as(mask), "tokens": batch["token_advantages"]}
    found: Tensors = {}

    def add(name: str, of: Callable[[Tensor], Tensor]) -> None:
        now = batch["now"].clone().requires_grad_()
        value = of(now)
        value.backward()
        found[name], found[f"{name}/gradient"] = value.detach(), now.grad

    vanilla, gspo, cispo = (
        verl.compute_policy_loss_vanilla,
        verl.compute_policy_loss_gspo,
        verl.compute_policy_loss_cispo,
    )

    def policy(loss: Any, level: str, mode: str, bounds: tuple[float, float, float], *more: Tensor) -> Any:
        config = actor(batch, *bounds)
        return lambda now: loss(batch["old"], now, known[level], mask, mode, config, *more)[0]

    for (name, mode), level in product(AGGREGATIONS.items(), known):
        for high, dual in product((0.2, 0.28), (3.0, 0.0)):
            of = policy(vanilla, level, mode, (0.2, high, dual or UNBOUNDED))
            add(f"PPO, clip {high}, dual {dual:g}, {level}, {name}", of)
        add(f"GSPO, {level}, {name}", policy(gspo, level, mode, (3e-4, 4e-4, 3.0)))
        add(f"CISPO, {level}, {name}", policy(cispo, level, mode, (0.2, 0.28, 3.0)))
    weighed = policy(vanilla, "rows", "token-mean", (0.2, 0.2, 3.0), batch["weights"])
    add("PPO, dual 3, truncated importance sampling, token_mean", weighed)
    for (name, mode), estimator in product(AGGREGATIONS.items(), ("k2", "k3")):

        def divergence(now: Tensor, mode: str = mode, estimator: str = estimator) -> Tensor:
            price = verl.kl_penalty(now, batch["reference"], estimator)
            return verl.agg_loss(price, mask, mode, loss_scale_factor=int(batch["constant"]))

        add(f"divergence in the loss, {estimator}, {name}", divergence)
    for clip in (0.2, 0.0):

        def value(now: Tensor, clip: float = clip or UNBOUNDED) -> Tensor:
            return verl.compute_value_loss(now, batch["returns"], batch["values"], mask, clip)[0]

        add(f"value loss, clip {clip:g}", value)
    return found


def actor(batch: Tensors, low: float, high: float, dual: float) -> ActorConfig:
    """Return an actor's settings with the divisor of the constant aggregation."""
    config = ActorConfig(
        strategy="fsdp",
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        rollout_n=1,
        use_dynamic_bsz=True,
    )
    config.global_batch_info["loss_scale_factor"] = int(batch["constant"])
    return config


def main() -> None:
    """Read the batches of one file and write the quantities to the other."""
    given, made = map(Path, sys.argv[1:])
    batches: dict[str, Tensors] = {}
    for name, tensor in load_file(given).items():
        batch, _, field = name.rpartition("/")
        batches.setdefault(batch, {})[field] = tensor
    found = {
        f"{name}/{quantity}": tensor.contiguous().clone()
        for name, batch in batches.items()
        for quantity, tensor in {**advantages(batch), **losses(batch)}.items()
    }
    controller = verl.AdaptiveKLController(0.05, 0.1, 1000)
    prices = []
    for observed in torch.linspace(0, 0.4, 50).tolist():
        controller.update(observed, 20)
        prices.append(controller.value)
    found["controller/adaptive weight"] = torch.tensor(prices, dtype=torch.float64)
    save_file(found, made)


if __name__ == "__main__":
    main()

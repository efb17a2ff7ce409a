"""TRL's own formulas on the batches of ``benchmarks/training/differential.py`` with ``--trl-python``.

child (this)   IN.safetensors: ``batch/name`` [B], [B, L] or a number
               OUT.safetensors: ``batch/quantity``, and ``batch/quantity/gradient`` of the log probabilities

``GRPOTrainer._compute_loss`` runs on a stand-in object with the attributes that it reads. The advantages of
both trainers are blocks inside methods. Their lines are copied from the installed source and become
functions.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

Tensors = dict[str, Tensor]
TYPES = {"token_mean": "bnpo", "sequence_mean": "grpo", "constant": "dr_grpo"}
SAMPLES = 4
LAST = "advantages = torch.nan_to_num(advantages, nan=0.0)"
READ = (
    "self",
    "rewards_per_func",
    "num_generations",
    "device",
    "gather",
    "old_per_token_logps",
    "ref_per_token_logps",
    "completion_mask",
)
"""Names that the blocks read in their methods."""


def block(folder: Path, method: Any, first: str) -> Callable[..., Tensor]:
    """Return a function with the lines of a method from one that starts with ``first`` to the line LAST.

    The function is in a separate file, with the imports of the method's module.
    """
    lines = textwrap.dedent(inspect.getsource(method)).splitlines()
    start = next(place for place, line in enumerate(lines) if line.strip().startswith(first))
    end = next(place for place, line in enumerate(lines) if line.strip() == LAST and place > start)
    body = textwrap.indent(textwrap.dedent("\n".join(lines[start : end + 1])), "    ")
    file = folder / f"{method.__module__.rpartition('.')[2]}_advantages.py"
    head = f"from {method.__module__} import *\nfrom {method.__module__} import nanstd, torch\n"
    file.write_text(f"{head}\n\ndef made({', '.join(READ)}):\n{body}\n    return advantages\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Callable[..., Tensor] = module.made
    return made


def advantages(batch: Tensors, grpo: Callable[..., Tensor], rloo: Callable[..., Tensor]) -> Tensors:
    """Return row advantages; a row without a score has the reward NaN."""
    rewards = batch["rewards"].masked_fill(~batch["valid"], torch.nan)
    given = {
        "num_generations": SAMPLES,
        "device": torch.device("cpu"),
        "gather": lambda tensor: tensor,
        "old_per_token_logps": batch["sampler"],
        "ref_per_token_logps": batch["reference"],
        "completion_mask": batch["mask"].to(rewards.dtype),
    }
    settings = {
        "multi_objective_aggregation": "sum_then_normalize",
        "num_generations": SAMPLES,
        "reward_weights": rewards.new_ones(1),
        "reward_clip_range": None,
        "normalize_advantages": False,
    }
    found = {}
    for scale, name in (("std", "group"), ("off", "none")):
        trainer = SimpleNamespace(**settings, scale_rewards=name)
        found[f"GRPO, {scale}"] = grpo(self=trainer, rewards_per_func=rewards[:, None].clone(), **given)
    for beta, name in ((0.0, "RLOO"), (0.1, "RLOO, divergence in the reward")):
        trainer = SimpleNamespace(**settings, beta=beta)
        found[name] = rloo(self=trainer, rewards_per_func=rewards[:, None].clone(), **given)
    return found


def losses(batch: Tensors) -> Tensors:
    """Return losses with their gradients."""
    found: Tensors = {}
    for (name, kind), high in product(TYPES.items(), (0.2, 0.28)):
        found |= loss(f"PPO, clip {high}, dual 0, rows, {name}", batch, kind, 0.2, high)
    for name, kind in TYPES.items():
        found |= loss(f"GSPO, rows, {name}", batch, kind, 3e-4, 4e-4, level="sequence")
        found |= loss(f"PPO and divergence in the loss, k3, {name}", batch, kind, 0.2, 0.2, beta=0.1)
    found |= loss("CISPO, one bound, rows, token_mean", batch, "cispo", 0.2, 1.28)
    sampled = "PPO, dual 0, truncated importance sampling, token_mean"
    found |= loss(sampled, batch, "bnpo", 0.2, 0.2, use_vllm=True)
    found |= loss("PPO, entropy, token_mean", batch, "bnpo", 0.2, 0.2, entropy=0.1)
    return found


def loss(
    name: str,
    batch: Tensors,
    kind: str,
    low: float,
    high: float,
    *,
    level: str = "token",
    beta: float = 0.0,
    use_vllm: bool = False,
    entropy: float = 0.0,
) -> Tensors:
    """Run ``_compute_loss`` with one setting."""
    now = batch["now"].clone().requires_grad_()
    mask = batch["mask"].to(now.dtype)
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=False,
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
        reduce=lambda tensor, **_: tensor,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, batch["entropy"].to(now.dtype), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        args=args,
        loss_type=kind,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=use_vllm,
        vllm_importance_sampling_correction=use_vllm,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=int(batch["constant"]),
        accelerator=accelerator,
        _entropy_bonus_enabled=entropy > 0,
        use_adaptive_entropy=False,
        entropy_coef=entropy,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["reference"],
        "importance_sampling_ratio": batch["weights"],
        "num_items_in_batch": mask.sum(),
    }
    value = GRPOTrainer._compute_loss(trainer, None, inputs)
    value.backward()
    assert now.grad is not None
    return {name: value.detach(), f"{name}/gradient": now.grad}


def main() -> None:
    """Read the batches of one file and write the quantities to the other."""
    given, made = map(Path, sys.argv[1:])
    batches: dict[str, Tensors] = {}
    for name, tensor in load_file(given).items():
        batch, _, field = name.rpartition("/")
        batches.setdefault(batch, {})[field] = tensor
    first, found = "unscorable_mask =", {}
    grpo = block(made.parent, GRPOTrainer._generate_and_score_completions, first)
    rloo = block(made.parent, RLOOTrainer._generate_and_score_completions, first)
    for name, batch in batches.items():
        for quantity, tensor in {**advantages(batch, grpo, rloo), **losses(batch)}.items():
            found[f"{name}/{quantity}"] = tensor.contiguous().clone()
    save_file(found, made)


if __name__ == "__main__":
    main()

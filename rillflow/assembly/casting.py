"""Casting: what makes each role's object, on whatever rank it is to be.

    settings ─ partial(policy, ...) ─ travels ─> rank: policy(..., site) ─> the role's object

A factory is a function of this module with its settings bound. Settings travel; models are loaded where
they are used.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rillflow.cluster.backend import Site
from rillflow.models.checkpoint import save_model
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import choose_device, load_model
from rillflow.models.scalar_model import load_scalar_model
from rillflow.models.tokenizer import Tokenizer
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.workers import RewardWorkers
from rillflow.roles.critic import Critic
from rillflow.roles.policy import Policy
from rillflow.roles.reference import Reference
from rillflow.roles.reward import Cost, Reward
from rillflow.roles.reward_model import RewardModel
from rillflow.rollout.config import RolloutConfig
from rillflow.train.config import TrainConfig


def policy(
    model: ModelConfig,
    base: Path,
    device: str,
    threads: int,
    train: TrainConfig,
    rollout: RolloutConfig,
    seed: int,
    version: int,
    site: Site,
) -> Policy:
    """The policy; the first phase says what it is trained with."""
    if threads:
        torch.set_num_threads(threads)
    loaded = load_model(model, seed=seed, device=choose_device(device), base=base)
    return Policy(
        loaded, train=train, rollout=rollout, seed=seed, updates=1, version=version, ranks=site.ranks
    )


def reference(
    model: ModelConfig, device: str, train: TrainConfig, temperature: float, site: Site
) -> Reference:
    """The reference, from the directory that ``keep_policy`` wrote."""
    loaded = load_model(model, seed=0, device=choose_device(device), base=Path())
    del site
    return Reference(loaded, train=train, temperature=temperature)


def reward(function: FunctionPath, settings: RewardConfig, tokenizer: Tokenizer, site: Site) -> Reward:
    """The reward function, in children that end with the rank."""
    workers = site.stack.enter_context(RewardWorkers(function, settings))
    return Reward(workers, tokenizer, max_failures=settings.max_failures)


def scorer(
    model: ModelConfig,
    base: Path,
    device: str,
    train: TrainConfig,
    seed: int,
    tokenizer: Tokenizer,
    kind: type[RewardModel],
    section: str,
    site: Site,
) -> RewardModel:
    """A reward or cost model that only scores, from a directory that has a scalar head."""
    loaded = load_scalar_model(model, seed=seed, device=choose_device(device), base=base, section=section)
    return kind(loaded, tokenizer=tokenizer, train=train, seed=seed, updates=1, ranks=site.ranks)


def learner(
    model: ModelConfig,
    base: Path,
    device: str,
    threads: int,
    train: TrainConfig,
    seed: int,
    version: int,
    site: Site,
) -> RewardModel:
    """A reward or cost model to train, alone: its tokens are its own; the first phase says with what."""
    if threads:
        torch.set_num_threads(threads)
    loaded = load_scalar_model(
        model, seed=seed, device=choose_device(device), base=base, section="policy.model"
    )
    return RewardModel(
        loaded,
        tokenizer=loaded.tokenizer,
        train=train,
        seed=seed,
        updates=1,
        version=version,
        ranks=site.ranks,
    )


def cost(function: FunctionPath, settings: RewardConfig, tokenizer: Tokenizer, site: Site) -> Reward:
    """The cost function, under the reward's limits; its scores are called ``costs``."""
    workers = site.stack.enter_context(RewardWorkers(function, settings))
    return Cost(workers, tokenizer, max_failures=settings.max_failures)


def critic(
    model: ModelConfig,
    base: Path,
    device: str,
    train: TrainConfig,
    seed: int,
    updates: int,
    version: int,
    name: str,
    tokenizer: Tokenizer,
    site: Site,
) -> Critic:
    """A critic, its new head at zero, or as a checkpoint has it."""
    loaded = load_scalar_model(
        model, seed=seed, device=choose_device(device), base=base, section=f"{name}.path"
    )
    return Critic(
        loaded,
        tokenizer=tokenizer,
        train=train,
        seed=seed,
        updates=updates,
        version=version,
        name=name,
        ranks=site.ranks,
    )


def voice(lead: Policy | RewardModel) -> tuple[Tokenizer, int]:
    """The lead's tokeniser, and its context in tokens: what rows are made with."""
    return lead.model.tokenizer, lead.model.context


def keep_policy(policy: Policy, folder: Path) -> None:
    """Write the policy as it is now, so that a reference, and a resumed run's reference, can be it."""
    if not folder.exists():
        save_model(policy.model, folder)

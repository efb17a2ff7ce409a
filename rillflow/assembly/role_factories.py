"""Role factories: what makes each role's object, on whatever rank it is to be.

    settings ─ partial(policy, ...) ─ travels ─> rank: policy(..., site) ─> the role's object

A factory is a function of this module with its settings bound. Settings travel; models are loaded where
they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rillflow.assembly.engines import engine_class
from rillflow.cluster.backend import Site
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import LanguageModel, choose_device, load_model, load_scalar_model
from rillflow.models.tokenizer import Tokenizer
from rillflow.observe.durable import write_error
from rillflow.placement.mesh import Mesh
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.weighted import WeightedWorkers
from rillflow.roles.critic import Critic
from rillflow.roles.policy import Policy
from rillflow.roles.publishing import ReceivedWeights, ReshardedWeights, SentWeights, SharedWeights, lay_out
from rillflow.roles.reference import Reference
from rillflow.roles.reward import Cost, Reward
from rillflow.roles.reward_model import RewardModel
from rillflow.roles.sampler import Sampler
from rillflow.roles.share import Model, Share
from rillflow.rollout.config import RolloutConfig
from rillflow.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class RoleSetting:
    """What is there when a role is made.

    Example:
        class Verifier:
            def __init__(self, setting: RoleSetting) -> None:
                self.tokenizer = setting.tokenizer

            @endpoint(DP, reads=("tokens", "loss_mask"), writes=("verdicts",))
            def verify(self, rollouts: Batch) -> Batch: ...

        ALGORITHM = Algorithm(config=..., step=step, data=Data.PROMPTS, brings={"verifier": Verifier})
    """

    role: str
    """Its name."""
    tokenizer: Tokenizer
    """The policy's."""
    context: int
    """Tokens of a row at most."""
    seed: int
    """The run's."""
    device: str
    """Where the recipe wants tensors: auto, cpu, cuda."""
    base: Path
    """The recipe's folder."""
    site: Site
    """The rank: its peers in the pool, and a stack that is closed when it ends."""


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The grids of a role's ranks."""

    train: Mesh
    """While it trains and scores: dp, pp, tp."""
    is_sharded: bool
    """Whether its parameters are cut over dp as well."""

    def share(self, model: Model, site: Site) -> Share[Model]:
        """A rank's share of a model that it has loaded."""
        return Share.of(model, mesh=self.train, is_sharded=self.is_sharded, ranks=site.ranks)


def policy(
    model: ModelConfig,
    base: Path,
    device: str,
    threads: int,
    train: TrainConfig,
    meshes: Meshes,
    generate: Mesh | None,
    rollout: RolloutConfig,
    seed: int,
    version: int,
    site: Site,
) -> Policy:
    """The policy; the first phase says what it is trained with.

    ``generate`` is the grid of its ranks while they generate; None where others do.
    """
    if threads:
        torch.set_num_threads(threads)
    loaded = load_model(model, seed=seed, device=choose_device(device), base=base)
    if generate is None:
        share: Share[LanguageModel] = meshes.share(loaded, site)
        weights: SentWeights | SharedWeights | ReshardedWeights = SentWeights(share)
    else:
        share, weights = lay_out(
            loaded,
            mesh=meshes.train,
            is_sharded=meshes.is_sharded,
            generate=generate,
            ranks=site.ranks,
            version=version,
        )
    return Policy(share, train=train, rollout=rollout, seed=seed, updates=1, version=version, weights=weights)


def sampler(rollout: RolloutConfig, seed: int, site: Site) -> Sampler:
    """The sampler on the policy's own ranks."""
    policy = site.objects["policy"]
    return Sampler(
        policy.weights, model=policy.model, rollout=rollout, seed=seed, engine=engine_class(rollout.engine)
    )


def sampler_apart(
    model: ModelConfig,
    base: Path,
    device: str,
    threads: int,
    mesh: Mesh,
    first: int,
    rollout: RolloutConfig,
    seed: int,
    site: Site,
) -> Sampler:
    """The sampler on ranks of its own, counted from ``first``: its weights are what the policy sends."""
    if threads:
        torch.set_num_threads(threads)
    loaded = load_model(model, seed=seed, device=choose_device(device), base=base)
    after = Mesh(axes=mesh.axes, ranks=tuple(first + rank for rank in mesh.ranks))
    weights = ReceivedWeights(loaded, mesh=after, ranks=site.ranks)
    return Sampler(weights, model=loaded, rollout=rollout, seed=seed, engine=engine_class(rollout.engine))


def reference(
    model: ModelConfig, device: str, train: TrainConfig, temperature: float, meshes: Meshes, site: Site
) -> Reference:
    """The reference, from the directory that ``keep_policy`` wrote."""
    loaded = load_model(model, seed=0, device=choose_device(device), base=Path())
    return Reference(meshes.share(loaded, site), train=train, temperature=temperature)


def reward(
    functions: Sequence[FunctionPath], settings: RewardConfig, tokenizer: Tokenizer, site: Site
) -> Reward:
    """The reward functions, in children that end with the rank."""
    workers = site.stack.enter_context(WeightedWorkers(functions, settings))
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
    meshes: Meshes,
    site: Site,
) -> RewardModel:
    """A reward or cost model that only scores, from a directory that has a scalar head."""
    loaded = load_scalar_model(model, seed=seed, device=choose_device(device), base=base, section=section)
    return kind(meshes.share(loaded, site), tokenizer=tokenizer, train=train, seed=seed, updates=1)


def learner(
    model: ModelConfig,
    base: Path,
    device: str,
    threads: int,
    train: TrainConfig,
    meshes: Meshes,
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
        meshes.share(loaded, site),
        tokenizer=loaded.tokenizer,
        train=train,
        seed=seed,
        updates=1,
        version=version,
    )


def cost(
    functions: Sequence[FunctionPath], settings: RewardConfig, tokenizer: Tokenizer, site: Site
) -> Reward:
    """The cost function, under the reward's limits; its scores are called ``costs``."""
    workers = site.stack.enter_context(WeightedWorkers(functions, settings))
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
    meshes: Meshes,
    site: Site,
) -> Critic:
    """A critic, its new head at zero, or as a checkpoint has it."""
    loaded = load_scalar_model(
        model, seed=seed, device=choose_device(device), base=base, section=f"{name}.path"
    )
    return Critic(
        meshes.share(loaded, site),
        tokenizer=tokenizer,
        train=train,
        seed=seed,
        updates=updates,
        version=version,
        name=name,
    )


def brought(
    kind: type, role: str, tokenizer: Tokenizer, context: int, seed: int, device: str, base: Path, site: Site
) -> Any:
    """A role that the algorithm brings; see RoleSetting."""
    return kind(
        RoleSetting(
            role=role,
            tokenizer=tokenizer,
            context=context,
            seed=seed,
            device=device,
            base=base,
            site=site,
        )
    )


def voice(lead: Policy | RewardModel) -> tuple[Tokenizer, int]:
    """The lead's tokeniser, and its context in tokens: what rows are made with."""
    return lead.model.tokenizer, lead.model.context


def keep_policy(policy: Policy, folder: Path) -> None:
    """Write the policy as it is now, so that a reference, and a resumed run's reference, can be it.

    Raises:
        RunDirectoryError: the disk is full or cannot be written.
    """
    try:
        policy.save_weights(folder)
    except (OSError, SafetensorError) as error:
        raise write_error(folder, error) from error

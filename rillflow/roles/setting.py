"""RoleSetting: everything from which a role's object is made on its rank.

    partial(made, Critic.make, partial(RoleSetting, ...)) ─ sent ─> rank: Critic.make(RoleSetting) ─> Critic

Settings are sent to ranks; models are loaded where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rillflow.config.schema import Section
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import Model, choose_device, outline
from rillflow.models.tokenizer import ModelInput, Tokenizer
from rillflow.placement.mesh import Mesh
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.judge_prompt import FrameConfig
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.trained_role import Training
from rillflow.rollout.config import NATIVE, RolloutConfig
from rillflow.sharding.codec import EdgeCodecs
from rillflow.tasks.config import TaskConfig
from rillflow.training.config import TrainConfig
from rillflow.workers.backend import Site
from rillflow.workers.config import MeshSizes


@dataclass(frozen=True, kw_only=True)
class RoleSetting:
    """Everything that a role's class receives.

    Example:
        class Verifier:
            def __init__(self, setting: RoleSetting) -> None:
                self.tokenizer = setting.tokenizer

            @endpoint(DP, reads=("tokens", "loss_mask"), writes=("verdicts",))
            def verify(self, rollouts: Batch) -> Batch: ...

        ALGORITHM = Algorithm(config=..., step=step, brings={"verifier": Verifier})
    """

    role: str
    """Name of the role."""
    site: Site
    """The rank: its peers in the pool, and a stack that is closed when the rank ends."""
    base: Path
    """The recipe's folder."""
    run: Path
    """The run directory."""
    device: str
    """Device for tensors in the recipe: auto, cpu, cuda."""
    threads: int
    """CPU threads of the rank; 0 lets torch choose."""
    seed: int
    """The run's seed."""
    train: TrainConfig
    """Settings of the optimiser and of micro-batches."""
    rollout: RolloutConfig
    """Sampling settings of the policy, without the sections of plugins."""
    task: TaskConfig
    """Settings that turn prompts into tokens."""
    limits: RewardConfig
    """Settings and limits of reward functions."""
    sizes: MeshSizes
    """Grid of the role's ranks in training and scoring."""
    engine: str = NATIVE
    """``package.module:Class`` of the rollout engine, or ``native``."""
    engine_options: str | None = None
    """``package.module:function`` that returns arguments that only this engine has; None for none."""
    codecs: EdgeCodecs = field(default_factory=EdgeCodecs)
    """Codecs of its edges to other ranks."""
    sections: Mapping[str, Section] = field(default_factory=dict)
    """Sections that plugins added to the recipe, by dotted key."""
    generate: Mesh | None = None
    """Grid on which the policy generates; None for a policy whose sampler has ranks of its own."""
    model: ModelConfig | None = None
    """Model to start from; None for a role that has none, or that only scores."""
    version: int = 0
    """Number of publishes, or of training calls, so far."""
    functions: Sequence[FunctionPath] = ()
    """Functions that score."""
    scorers: Mapping[str, ModelConfig] = field(default_factory=dict)
    """Models that score, by the name of their setting."""
    wraps: Sequence[Callable[..., Callable[..., Any]]] = ()
    """Each is called with what makes the rollout engine, this setting and the policy's model; it returns what
    makes an engine whose rows something else writes together with the policy, such as agents."""
    columns: Mapping[str, Callable[..., Sequence[Any]]] = field(default_factory=dict)
    """Columns that a sampler adds to ended rows: a function of this setting and the rows, by name."""
    judge: FunctionPath | None = None
    """Judge over HTTP; None for a judge that is a model, or none."""
    frame: FrameConfig | None = None
    """Frame of the judge that is trained; None if none is."""
    model_input: ModelInput | None = None
    """Tokeniser and context of the trained model; None while that model itself is made."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokeniser of the trained model."""
        return self._known.tokenizer

    @property
    def context(self) -> int:
        """Most tokens in a row of the trained model."""
        return self._known.context

    @property
    def training(self) -> Training:
        """Settings of its training before the first phase begins."""
        return Training(config=self.train, seed=self.seed, version=self.version, codecs=self.codecs)

    @property
    def _known(self) -> ModelInput:
        assert self.model_input is not None, f"{self.role} is made before the trained model"
        return self.model_input

    def load(self, kind: type[Model], scorer: str = "") -> Model:
        """Return the model to start from, or else the one of a setting, without reading its weights."""
        config, section = (self.model, "policy.model") if self.model else (self.scorers[scorer], scorer)
        device = choose_device(self.device)
        model = outline(kind, config, seed=self.seed, device=device, base=self.base, section=section)
        return replace(model, tokenizer=model.tokenizer.at(self.task.moment))

    def share(self, model: Model) -> ModelShard[Model]:
        """Load the rank's share of the model; two adapters of one base share the policy's base weights."""
        trained = self.site.objects.get("policy")
        return ModelShard.of(model, self.sizes, self.site.ranks, beside=trained and trained.share)


def made(make: Callable[[RoleSetting], Any], setting: Callable[..., RoleSetting], site: Site) -> Any:
    """Make a role's object on its rank."""
    whole = setting(site=site)
    if whole.threads:
        torch.set_num_threads(whole.threads)
    return make(whole)

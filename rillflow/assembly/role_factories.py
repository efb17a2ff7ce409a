"""Role factories: what makes each role's object, on whatever rank it is to be.

    partial(made, "critic", partial(RoleSetting, ...)) ─ travels ─> rank: critic(RoleSetting) ─> Critic

A factory is named in the role table and takes one RoleSetting; the class it is annotated with has the
role's endpoints. Settings travel; models are loaded where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError

from rillflow.assembly.encoding import ModelInput
from rillflow.assembly.engines import engine_class, server_python
from rillflow.assembly.other_tokens import OtherTokens
from rillflow.assembly.preflight import no_frame
from rillflow.assembly.role_table import NO_ROLE, RoleKind
from rillflow.cluster.backend import Site
from rillflow.cluster.config import MeshSizes
from rillflow.errors import ConfigError
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import (
    LanguageModel,
    Model,
    ScalarModel,
    choose_device,
    outline,
)
from rillflow.models.tokenizer import Tokenizer
from rillflow.observe.durable import write_error
from rillflow.placement.mesh import Mesh
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.frame import FrameConfig, kept_frame
from rillflow.rewards.function import FunctionPath, parse_function
from rillflow.rewards.weighted import WeightedWorkers
from rillflow.roles.judge import Judge
from rillflow.roles.panel import Panel
from rillflow.roles.policy import EarlierAdapter, Policy, Reference
from rillflow.roles.publishing import ReceivedWeights, SampledWeights, SentWeights, lay_out
from rillflow.roles.reward import Cost, Reward
from rillflow.roles.sampler import Sampler
from rillflow.roles.scalar_roles import Critic, RewardModel, SafetyCostModel
from rillflow.roles.share import Share
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.engine import Capability
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.encoded import Encoder
from rillflow.training.config import TrainConfig
from rillflow.workers.endpoint import endpoints_of


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
    """The role's name."""
    site: Site
    """The rank: its peers in the pool, and a stack that is closed when it ends."""
    base: Path
    """The recipe's folder."""
    device: str
    """Where the recipe wants tensors: auto, cpu, cuda."""
    threads: int
    """Processor threads of the rank; 0 leaves the choice to torch."""
    seed: int
    """The run's seed."""
    train: TrainConfig
    """The optimiser's settings, and how a batch is cut into micro-batches."""
    rollout: RolloutConfig
    """How the policy is sampled."""
    task: TaskConfig
    """How prompts become tokens."""
    limits: RewardConfig
    """What reward functions are held to."""
    sizes: MeshSizes
    """The grid of the role's ranks while they train and score."""
    generate: Mesh | None = None
    """The grid on which the policy answers; None for a policy whose sampler has ranks of its own."""
    model: ModelConfig | None = None
    """The model to load; None for a role without one."""
    version: int = 0
    """Publishes, or training calls, so far."""
    functions: Sequence[FunctionPath] = ()
    """The functions that score."""
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    """The models of a role that has several, by what they are."""
    frame: FrameConfig | None = None
    """How the judge that is trained is asked; None where none is."""
    model_input: ModelInput | None = None
    """What the trained model reads; None while that model itself is made."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The trained model's."""
        assert self.model_input is not None, f"{self.role} is made before the trained model"
        return self.model_input.tokenizer

    @property
    def context(self) -> int:
        """Tokens of a row at most."""
        assert self.model_input is not None, f"{self.role} is made before the trained model"
        return self.model_input.context

    def language_model(self, section: str = "policy.model") -> LanguageModel:
        """The model, its weights not read; errors call its setting ``section``."""
        return self._outline(LanguageModel, section)

    def scalar_model(self, section: str) -> ScalarModel:
        """The model with a scalar head, its weights not read; errors call its setting ``section``."""
        return self._outline(ScalarModel, section)

    def _outline(self, kind: type[Model], section: str) -> Model:
        assert self.model is not None, f"{self.role} has no model"
        device = choose_device(self.device)
        return outline(kind, self.model, seed=self.seed, device=device, base=self.base, section=section)

    def file(self, name: str) -> Path | None:
        """Where a role of a phase keeps something beside the model that it begins from."""
        path = None if self.model is None else self.model.path
        return None if path is None else Path(path).with_name(f"{self.role}_{name}")

    def share(self, model: Model) -> Share[Model]:
        """The rank's share of a model, read; two adapters of one base have it together with the policy."""
        trained = self.site.objects.get("policy")
        return Share.of(model, self.sizes, self.site.ranks, beside=trained and trained.share)


def made(factory: str | type, setting: Callable[..., RoleSetting], site: Site) -> Any:
    """A role's object, on its rank."""
    whole = setting(site=site)
    if whole.threads:
        torch.set_num_threads(whole.threads)
    return (globals()[factory] if isinstance(factory, str) else factory)(whole)


def role_class(role: str, kind: RoleKind) -> type:
    """The class of a role's object, whose endpoints a step calls.

    Raises:
        ConfigError: the class that an algorithm brings has no endpoint.
    """
    factory = kind.factory
    found: type = get_type_hints(globals()[factory])["return"] if isinstance(factory, str) else factory
    if not endpoints_of(found):
        raise ConfigError(f"the algorithm brings {role!r}, which is no role: {found!r:.60}", why=NO_ROLE)
    return found


def policy(setting: RoleSetting) -> Policy:
    """The policy; the first phase says what it is trained with."""
    loaded = setting.language_model()
    how: dict[str, Any] = {"train": setting.train, "rollout": setting.rollout, "seed": setting.seed}
    how |= {"updates": 1, "version": setting.version}
    how["has_canary"] = Capability.SCORE in engine_class(setting.rollout.engine).can
    if setting.generate is None:
        share = setting.share(loaded)
        return Policy(share, weights=SentWeights(share), **how)
    share, weights = lay_out(
        loaded,
        sizes=setting.sizes,
        generate=setting.generate,
        ranks=setting.site.ranks,
        version=setting.version,
    )
    return Policy(share, weights=weights, **how)


def sampler(setting: RoleSetting) -> Sampler:
    """The sampler: on the policy's own ranks, or with a model of its own, whose weights the policy sends."""
    weights: SampledWeights
    if setting.model is None:
        trained = setting.site.objects["policy"]
        model, weights = trained.model, trained.weights
    else:
        assert setting.generate is not None, "a sampler lies on generation's grid"
        model = setting.language_model()
        weights = ReceivedWeights(model, mesh=setting.generate, ranks=setting.site.ranks)
    rollout, engine = setting.rollout, engine_class(setting.rollout.engine)
    if rollout.server is not None:
        rollout = rollout.model_copy(update={"server": str(server_python(rollout.server, setting.base))})
    how: dict[str, Any] = {"model": model, "rollout": rollout, "seed": setting.seed}
    if rollout.agent is None:
        return Sampler(weights, engine=engine, **how)
    from rillflow.service.agents import AgentEngine

    made_by = partial(
        AgentEngine,
        inner=engine,
        function=parse_function(rollout.agent.function, setting.base, "agent"),
        encoder=Encoder.of(model.tokenizer, setting.task),
        stack=setting.site.stack,
    )
    return Sampler(weights, engine=made_by, **how)


def reference(setting: RoleSetting) -> Reference:
    """The reference, as ``keep_policy`` wrote it: a model, or an adapter in the policy's own module."""
    loaded = setting.language_model()
    how: dict[str, Any] = {"train": setting.train, "temperature": setting.rollout.temperature}
    how["kept"] = setting.file("totals.jsonl")
    trained: Policy | None = setting.site.objects.get("policy")
    how |= {"policy": trained, "version": setting.version, "name": setting.role}
    if trained is None or not trained.share.has_base_of(loaded, setting.sizes):
        return Reference(Share.of(loaded, setting.sizes, setting.site.ranks), **how)
    earlier = EarlierAdapter(trained, trained.share.read_trained(loaded))
    return Reference(trained.share, within=earlier, **how)


def reward(setting: RoleSetting) -> Reward:
    """The reward functions, in children that end with the rank."""
    workers = setting.site.stack.enter_context(WeightedWorkers(setting.functions, setting.limits))
    return Reward(workers, setting.tokenizer, max_failures=setting.limits.max_failures)


def cost(setting: RoleSetting) -> Cost:
    """The cost function, under the reward's limits; its scores are called ``costs``."""
    workers = setting.site.stack.enter_context(WeightedWorkers(setting.functions, setting.limits))
    return Cost(workers, setting.tokenizer, max_failures=setting.limits.max_failures)


def frozen_reward_model(setting: RoleSetting) -> RewardModel:
    """A reward model that only scores, from a directory that has a scalar head; its tokens may be its own."""
    model = setting.scalar_model(f"{setting.role}.model")
    return RewardModel(setting.share(model), **_scalar(setting), reread=_reread(setting, model))


def frozen_cost_model(setting: RoleSetting) -> SafetyCostModel:
    """A cost model that only scores, from a directory that has a scalar head."""
    model = setting.scalar_model(f"{setting.role}.model")
    return SafetyCostModel(setting.share(model), **_scalar(setting), reread=_reread(setting, model))


def _reread(setting: RoleSetting, model: ScalarModel) -> OtherTokens | None:
    """What reads the policy's rows for a model whose tokens are others; None where they are the same."""
    if model.tokenizer.first_difference(setting.tokenizer) is None:
        return None
    encoder = Encoder.of(model.tokenizer, setting.task)
    return OtherTokens(wrote=setting.tokenizer, encoder=encoder, context=model.context)


def reward_model(setting: RoleSetting) -> RewardModel:
    """A reward or cost model to train, alone: its tokens are its own."""
    loaded = setting.scalar_model("policy.model")
    return RewardModel(setting.share(loaded), **_scalar(setting, loaded.tokenizer))


def judge(setting: RoleSetting) -> Judge:
    """A judge to train, alone: its tokens are its own, and its directory keeps how it is asked."""
    assert setting.frame is not None, "an algorithm that trains a judge says how it is asked"
    return Judge(setting.share(setting.language_model()), frame=setting.frame, **_begun(setting))


def frozen_judge(setting: RoleSetting) -> Judge:
    """A judge that only scores, asked as the recipe says, or as its directory keeps it."""
    judging = setting.limits.judge
    assert judging is not None, "a recipe without a judge has no such role"
    model = setting.language_model("reward.judge.model")
    frame = judging.frame or kept_frame(model.module.config.to_dict())
    if frame is None:
        raise no_frame(judging.model)
    own: dict[str, Any] = {"tokenizer": setting.tokenizer, "judging": judging}
    return Judge(setting.share(model), frame=frame, **own, **_begun(setting))


def panel(setting: RoleSetting) -> Panel:
    """Functions, a reward model and a judge, whose weighted sum is the reward."""
    weights = setting.limits.weights
    assert weights is not None, "a recipe without weights has no panel"
    makers: dict[str, Callable[[RoleSetting], Any]]
    makers = {"function": reward, "model": frozen_reward_model, "judge": frozen_judge}
    members = {name: makers[name](replace(setting, model=setting.models.get(name))) for name in weights}
    return Panel(members, weights)


def critic(setting: RoleSetting) -> Critic:
    """A critic, its new head at zero, or as a checkpoint has it; errors and metrics bear the role's name."""
    share = setting.share(setting.scalar_model(f"{setting.role}.path"))
    return Critic(share, name=setting.role, **_scalar(setting))


def _scalar(setting: RoleSetting, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """What every role with a scalar head is given; a phase begins its training."""
    return {"tokenizer": tokenizer or setting.tokenizer, **_begun(setting)}


def _begun(setting: RoleSetting) -> dict[str, Any]:
    """What every role that has an optimiser is given beside its model."""
    return {"train": setting.train, "seed": setting.seed, "updates": 1, "version": setting.version}


def model_input(trained: Policy | RewardModel | Judge) -> ModelInput:
    """What rows are made for."""
    return ModelInput(tokenizer=trained.model.tokenizer, context=trained.model.context)


def keep_policy(policy: Policy, folder: Path) -> None:
    """Write the policy as it is now, so that a reference, and a resumed run's reference, can be it.

    Raises:
        RunDirectoryError: the disk is full or cannot be written.
    """
    try:
        policy.save_weights(folder)
    except (OSError, SafetensorError) as error:
        raise write_error(folder, error) from error

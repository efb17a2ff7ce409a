"""Role factories: make each role's object on its rank.

    partial(made, "critic", partial(RoleSetting, ...)) ─ sent ─> rank: critic(RoleSetting) ─> Critic

The role table names a factory, which takes one RoleSetting; its return annotation is the class with the
role's endpoints. Settings are sent to ranks; models are loaded where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError

from rillflow.app.encoding import ModelInput
from rillflow.app.engines import engine_class, server_python
from rillflow.app.facts import no_frame
from rillflow.app.role_table import NO_ROLE, RoleKind
from rillflow.app.second_tokenizer import OtherTokens
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
from rillflow.placement.mesh import Mesh
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath, parse_function
from rillflow.rewards.judge_prompt import FrameConfig, kept_frame
from rillflow.rewards.workers import WeightedWorkers
from rillflow.roles.combined_scores import Panel
from rillflow.roles.judge import Judge
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.policy import EarlierAdapter, Policy, Reference
from rillflow.roles.publishing import ReceivedWeights, SampledWeights, SentWeights, lay_out
from rillflow.roles.reward import Cost, Reward
from rillflow.roles.sampler import Sampler
from rillflow.roles.scalar_roles import Critic, RewardModel, SafetyCostModel
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.engine import Capability
from rillflow.runs.durable import write_error
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.encoded import Encoder
from rillflow.training.config import TrainConfig
from rillflow.workers.backend import Site
from rillflow.workers.config import MeshSizes
from rillflow.workers.endpoint import endpoints_of


@dataclass(frozen=True, kw_only=True)
class RoleSetting:
    """Everything that a role's factory receives.

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
    device: str
    """Device for tensors in the recipe: auto, cpu, cuda."""
    threads: int
    """CPU threads of the rank; 0 lets torch choose."""
    seed: int
    """The run's seed."""
    train: TrainConfig
    """Settings of the optimiser and of micro-batches."""
    rollout: RolloutConfig
    """Sampling settings of the policy."""
    task: TaskConfig
    """Settings that turn prompts into tokens."""
    limits: RewardConfig
    """Settings and limits of reward functions."""
    sizes: MeshSizes
    """Grid of the role's ranks in training and scoring."""
    generate: Mesh | None = None
    """Grid on which the policy generates; None for a policy whose sampler has ranks of its own."""
    model: ModelConfig | None = None
    """Model to load; None for a role without one."""
    version: int = 0
    """Number of publishes, or of training calls, so far."""
    functions: Sequence[FunctionPath] = ()
    """Functions that score."""
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    """Models of a role that has several, by kind."""
    frame: FrameConfig | None = None
    """Frame of the judge that is trained; None if none is."""
    model_input: ModelInput | None = None
    """Tokeniser and context of the trained model; None while that model itself is made."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokeniser of the trained model."""
        assert self.model_input is not None, f"{self.role} is made before the trained model"
        return self.model_input.tokenizer

    @property
    def context(self) -> int:
        """Most tokens in a row of the trained model."""
        assert self.model_input is not None, f"{self.role} is made before the trained model"
        return self.model_input.context

    def language_model(self, section: str = "policy.model") -> LanguageModel:
        """Return the model without reading its weights; errors call its setting ``section``."""
        return self._outline(LanguageModel, section)

    def scalar_model(self, section: str) -> ScalarModel:
        """Return the model with a scalar head, without reading its weights; errors name ``section``."""
        return self._outline(ScalarModel, section)

    def _outline(self, kind: type[Model], section: str) -> Model:
        assert self.model is not None, f"{self.role} has no model"
        device = choose_device(self.device)
        return outline(kind, self.model, seed=self.seed, device=device, base=self.base, section=section)

    def file(self, name: str) -> Path | None:
        """Return the path of a file that a phase's role keeps next to its initial model, if it has one."""
        path = None if self.model is None else self.model.path
        return None if path is None else Path(path).with_name(f"{self.role}_{name}")

    def share(self, model: Model) -> ModelShard[Model]:
        """Load the rank's share of the model; two adapters of one base share the policy's base weights."""
        trained = self.site.objects.get("policy")
        return ModelShard.of(model, self.sizes, self.site.ranks, beside=trained and trained.share)


def made(factory: str | type, setting: Callable[..., RoleSetting], site: Site) -> Any:
    """Make a role's object on its rank."""
    whole = setting(site=site)
    if whole.threads:
        torch.set_num_threads(whole.threads)
    return (globals()[factory] if isinstance(factory, str) else factory)(whole)


def role_class(role: str, kind: RoleKind) -> type:
    """Return the class of a role's object, which has the endpoints that a step calls.

    Raises:
        ConfigError: the class that an algorithm brings has no endpoint.
    """
    factory = kind.factory
    found: type = get_type_hints(globals()[factory])["return"] if isinstance(factory, str) else factory
    if not endpoints_of(found):
        raise ConfigError(f"the algorithm brings {role!r}, which is no role: {found!r:.60}", why=NO_ROLE)
    return found


def policy(setting: RoleSetting) -> Policy:
    """Make the policy; each phase sets its training settings in ``begin``."""
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
    """Make the sampler on the policy's ranks, or with its own model that receives the policy's weights."""
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
    from rillflow.serving.agents import AgentEngine

    made_by = partial(
        AgentEngine,
        inner=engine,
        function=parse_function(rollout.agent.function, setting.base, "agent"),
        encoder=Encoder.of(model.tokenizer, setting.task),
        stack=setting.site.stack,
    )
    return Sampler(weights, engine=made_by, **how)


def reference(setting: RoleSetting) -> Reference:
    """Make the reference that ``keep_policy`` wrote: a model, or an adapter in the policy's own module."""
    loaded = setting.language_model()
    how: dict[str, Any] = {"train": setting.train, "temperature": setting.rollout.temperature}
    how["kept"] = setting.file("totals.jsonl")
    trained: Policy | None = setting.site.objects.get("policy")
    how |= {"policy": trained, "version": setting.version, "name": setting.role}
    if trained is None or not trained.share.has_base_of(loaded, setting.sizes):
        return Reference(ModelShard.of(loaded, setting.sizes, setting.site.ranks), **how)
    earlier = EarlierAdapter(trained, trained.share.read_trained(loaded))
    return Reference(trained.share, within=earlier, **how)


def reward(setting: RoleSetting) -> Reward:
    """Make the reward role; its functions run in child processes that end with the rank."""
    workers = setting.site.stack.enter_context(WeightedWorkers(setting.functions, setting.limits))
    return Reward(workers, setting.tokenizer, max_failures=setting.limits.max_failures)


def cost(setting: RoleSetting) -> Cost:
    """Make the cost role, under the reward's limits; its scores are called ``costs``."""
    workers = setting.site.stack.enter_context(WeightedWorkers(setting.functions, setting.limits))
    return Cost(workers, setting.tokenizer, max_failures=setting.limits.max_failures)


def frozen_reward_model(setting: RoleSetting) -> RewardModel:
    """Make a reward model that only scores, from a directory with a scalar head; its tokeniser may differ."""
    model = setting.scalar_model(f"{setting.role}.model")
    return RewardModel(setting.share(model), **_scalar(setting), reread=_reread(setting, model))


def frozen_cost_model(setting: RoleSetting) -> SafetyCostModel:
    """Make a cost model that only scores, from a directory with a scalar head."""
    model = setting.scalar_model(f"{setting.role}.model")
    return SafetyCostModel(setting.share(model), **_scalar(setting), reread=_reread(setting, model))


def _reread(setting: RoleSetting, model: ScalarModel) -> OtherTokens | None:
    """Return the converter of the policy's rows to a model's tokeniser; None if the tokenisers agree."""
    if model.tokenizer.first_difference(setting.tokenizer) is None:
        return None
    encoder = Encoder.of(model.tokenizer, setting.task)
    return OtherTokens(wrote=setting.tokenizer, encoder=encoder, context=model.context)


def reward_model(setting: RoleSetting) -> RewardModel:
    """Make a reward or cost model to train; it uses its own tokeniser."""
    loaded = setting.scalar_model("policy.model")
    return RewardModel(setting.share(loaded), **_scalar(setting, loaded.tokenizer))


def judge(setting: RoleSetting) -> Judge:
    """Make a judge to train; it uses its own tokeniser, and its directory keeps the frame."""
    assert setting.frame is not None, "an algorithm that trains a judge says how it is asked"
    return Judge(setting.share(setting.language_model()), frame=setting.frame, **_begun(setting))


def frozen_judge(setting: RoleSetting) -> Judge:
    """Make a judge that only scores, with the recipe's frame or the one in its directory."""
    judging = setting.limits.judge
    assert judging is not None, "a recipe without a judge has no such role"
    model = setting.language_model("reward.judge.model")
    frame = judging.frame or kept_frame(model.module.config.to_dict())
    if frame is None:
        raise no_frame(judging.model)
    own: dict[str, Any] = {"tokenizer": setting.tokenizer, "judging": judging}
    return Judge(setting.share(model), frame=frame, **own, **_begun(setting))


def panel(setting: RoleSetting) -> Panel:
    """Make the panel of functions, a reward model and a judge; their weighted sum is the reward."""
    weights = setting.limits.weights
    assert weights is not None, "a recipe without weights has no panel"
    makers: dict[str, Callable[[RoleSetting], Any]]
    makers = {"function": reward, "model": frozen_reward_model, "judge": frozen_judge}
    members = {name: makers[name](replace(setting, model=setting.models.get(name))) for name in weights}
    return Panel(members, weights)


def critic(setting: RoleSetting) -> Critic:
    """Make a critic with a zero head or a checkpoint's; errors and metrics carry the role's name."""
    share = setting.share(setting.scalar_model(f"{setting.role}.path"))
    return Critic(share, name=setting.role, **_scalar(setting))


def _scalar(setting: RoleSetting, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Return the common arguments of roles with a scalar head; a phase begins their training."""
    return {"tokenizer": tokenizer or setting.tokenizer, **_begun(setting)}


def _begun(setting: RoleSetting) -> dict[str, Any]:
    """Return the common arguments of roles with an optimiser, besides the model."""
    return {"train": setting.train, "seed": setting.seed, "updates": 1, "version": setting.version}


def model_input(trained: Policy | RewardModel | Judge) -> ModelInput:
    """Return the tokeniser and context that rows are encoded for."""
    return ModelInput(tokenizer=trained.model.tokenizer, context=trained.model.context)


def keep_policy(policy: Policy, folder: Path) -> None:
    """Write the present policy, so that a reference can be made from it, also after a resume.

    Raises:
        RunDirectoryError: the disk is full or cannot be written.
    """
    try:
        policy.save_weights(folder)
    except (OSError, SafetensorError) as error:
        raise write_error(folder, error) from error

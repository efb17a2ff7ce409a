"""RoleGroups: the roles of a run, each on the ranks of its pool.

    recipe ─┬─ [policy] ─────────────> lead: the policy, or what is trained in its place ┐ as long
            ├─ [reward], [cost], task ─> reward, cost, judge                             ┘ as the run
            └─ a phase begins ───────> critics; the reference: the policy as it is then    each phase

The reference of the second phase is the policy the first one left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rillflow.assembly import role_factories
from rillflow.assembly.phases import PhasePlan
from rillflow.assembly.preflight import scorer_source
from rillflow.assembly.recipe import Recipe
from rillflow.cluster.backend import Backend
from rillflow.cluster.config import SAMPLER
from rillflow.dataflow.checkpoint import Checkpoint
from rillflow.dataflow.delivery import Delivery
from rillflow.dataflow.executor import GroupExecutor
from rillflow.errors import ConfigError
from rillflow.models.config import ModelConfig
from rillflow.observe import layout
from rillflow.placement.mesh import Mesh
from rillflow.rewards.function import FunctionPath
from rillflow.roles.critic import Critic
from rillflow.roles.policy import Policy
from rillflow.roles.reference import Reference
from rillflow.roles.reward import Cost, Reward
from rillflow.roles.reward_model import RewardModel, SafetyCostModel
from rillflow.roles.sampler import Sampler
from rillflow.roles.trained_role import TrainedRole
from rillflow.training.config import TrainConfig
from rillflow.training.skipping import leave_out
from rillflow.weights.layout import generation_mesh
from rillflow.workers.endpoint import endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.program import Factory

CRITICS = ("critic", "cost_critic")
"""Roles that are critics: of the reward, and of the cost."""
JUDGE = "judge"
"""The role that says how good held-out answers are, where a model is what is trained on."""


def kinds(recipe: Recipe) -> Mapping[str, type]:
    """The class of every role that a recipe may have, those that its algorithm brings among them.

    Raises:
        ConfigError: the algorithm brings something that is no role, or takes a shipped one's name.
    """
    known: dict[str, type] = {
        "policy": Policy,
        SAMPLER: Sampler,
        "reference": Reference,
        "critic": Critic,
        "cost_critic": Critic,
        "reward": RewardModel if recipe.reward.model else Reward,
        "cost": SafetyCostModel if recipe.cost.model else Cost,
        "reward_model": RewardModel,
        JUDGE: Reward,
    }
    for name, kind in recipe.chosen.brings.items():
        what = f"{recipe.algorithm.name} brings a role {name!r}"
        if name in known:
            raise ConfigError(f"{what}, which is a shipped one's name", why="a role is found by its name")
        if not isinstance(kind, type) or not endpoints_of(kind):
            raise ConfigError(
                f"{what}, which is no role: {kind!r:.60}",
                why="a role is a class whose methods are marked as endpoints",
                fix="mark what a step calls as an endpoint; see assembly.role_factories.RoleSetting",
            )
        known[name] = kind
    return known


class RoleGroups:
    """A recipe's roles; its lead is made at once.

    Args:
        recipe: the checked settings.
        base: the recipe's folder.
        run: the run directory.
        checkpoint: where to go on from, or None to begin.
        backend: where the ranks are.
    """

    def __init__(
        self, recipe: Recipe, base: Path, run: Path, checkpoint: Checkpoint | None, backend: Backend
    ) -> None:
        self._recipe, self._base, self._run, self._backend = recipe, base, run.absolute(), backend
        self._checkpoint = checkpoint
        self._groups: dict[str, Group] = {}
        self.executor = GroupExecutor(self._groups, backend)
        self._start(recipe.lead, self._lead_factory())
        if recipe.has_policy:
            self._start_sampler(self._lead_model())
        voiced = self.executor.on_first_rank(recipe.lead, role_factories.voice)
        self.tokenizer, self.context = voiced.read(recipe.placement.deadline_s)

    def __contains__(self, role: str) -> bool:
        return role in self._groups

    def start_scorers(self, functions: Sequence[FunctionPath], costs: Sequence[FunctionPath]) -> None:
        """Make the reward, the cost and the judge; none of them where nothing is sampled or no one asks.

        Args:
            functions: what scores, or judges where a model scores.
            costs: what says what a row costs.
        """
        if not self._recipe.has_policy:
            return
        reward, cost = self._recipe.reward, self._recipe.cost
        if functions:
            self._start(
                JUDGE if reward.model else "reward", self._function_factory(role_factories.reward, functions)
            )
        if reward.model is not None:
            self._start("reward", self._scorer_factory("reward", reward.model, RewardModel))
        if cost.model is not None:
            self._start("cost", self._scorer_factory("cost", cost.model, SafetyCostModel))
        elif costs:
            self._start("cost", self._function_factory(role_factories.cost, costs))

    def begin(self, plan: PhasePlan, goes_on: Checkpoint | None) -> tuple[str, ...]:
        """Get everything ready for a phase; the roles it trains, the lead first.

        Args:
            plan: the phase.
            goes_on: a checkpoint of this very phase; None where the phase begins.
        """
        critics = [role for role in plan.roles if role in CRITICS]
        for role in critics:
            self._start(role, self._critic_factory(role, plan, goes_on))
        recipe = self._recipe
        for role, kind in recipe.chosen.brings.items():
            if role in plan.roles and role not in self:
                where = (self.tokenizer, self.context, recipe.run.seed, recipe.run.device, self._base)
                self._start(role, partial(role_factories.brought, kind, role, *where))
        if "reference" in plan.roles:
            settings = (self._recipe.run.device, plan.train, self._recipe.rollout.temperature)
            bound = (*settings, self._meshes("reference"))
            self._start("reference", partial(role_factories.reference, self._kept_policy(), *bound))
        trained = (self._recipe.lead, *critics)
        for role in trained:
            begun = self._groups[role].call(
                "begin",
                train=self._critic_train(plan) if role in CRITICS else plan.train,
                updates=plan.config.updates,
                resume=goes_on.optimizer(role).absolute() if goes_on else None,
            )
            begun.read(self._recipe.placement.deadline_s)
            drafts = self._run / layout.BUNDLES / layout.DRAFT
            self.executor.on_all_ranks(role, leave_out, drafts / role).read(self._recipe.placement.deadline_s)
        return trained

    def _start(self, role: str, factory: Factory, mesh: Mesh | None = None, of: str = "") -> None:
        """Make a role on every rank of its pool, under its mesh, or with rows shared out over all of them."""
        placement, kind = self._recipe.placement, kinds(self._recipe)[role]
        pool = placement.pool_of(role)
        if mesh is None:
            is_model = issubclass(kind, TrainedRole | Reference)
            mesh = self._meshes(role).train if is_model else Mesh.of(dp=placement.pools[pool])
        group = Group(role, endpoints_of(kind), mesh=mesh, pool=pool, backend=self._backend, of=of)
        group.start(factory, placement.deadline_s)
        self._groups[role] = group

    def _start_sampler(self, model: ModelConfig) -> None:
        """Make the half of the policy that answers: on its ranks, or on others that it sends weights to."""
        recipe = self._recipe
        settings, mesh = (recipe.rollout, recipe.run.seed), self._generate_mesh()
        if not recipe.placement.samples_apart:
            self._start(SAMPLER, partial(role_factories.sampler, *settings), mesh, of="policy")
            return
        where = (model, self._base, recipe.run.device, recipe.run.threads)
        grid = (mesh, recipe.placement.mesh_of("policy").ranks)
        factory = partial(role_factories.sampler_apart, *where, *grid, *settings)
        self._start(SAMPLER, factory, mesh, of="policy")
        delivery = Delivery(self.executor, recipe.placement.deadline_s)
        delivery.begin()
        self.executor.follows["policy.publish"] = delivery

    def _meshes(self, role: str) -> role_factories.Meshes:
        """The grid of a role that is a model."""
        sizes = self._recipe.placement.mesh_of(role)
        return role_factories.Meshes(
            train=Mesh.of(dp=sizes.dp, pp=sizes.pp, tp=sizes.tp), is_sharded=sizes.is_sharded
        )

    def _generate_mesh(self) -> Mesh:
        """The grid of the ranks that answer prompts."""
        placement = self._recipe.placement
        tp = placement.generate_tp
        if placement.samples_apart:
            return Mesh.of(dp=placement.pools[placement.pool_of(SAMPLER)] // tp, tp=tp)
        meshes = self._meshes("policy")
        return generation_mesh(meshes.train, tp, is_sharded=meshes.is_sharded)

    def _lead_model(self) -> ModelConfig:
        """The model of the section [policy], or the checkpoint's."""
        recipe, checkpoint = self._recipe, self._checkpoint
        if checkpoint is None:
            return recipe.policy.model
        return _directory(checkpoint.model(recipe.lead), recipe)

    def _lead_factory(self) -> Factory:
        """What the section [policy] describes, or as the checkpoint has it."""
        recipe, state = self._recipe, self._checkpoint.state if self._checkpoint is not None else {}
        where = (self._lead_model(), self._base, recipe.run.device, recipe.run.threads)
        settings = (*where, recipe.policy.as_train(), self._meshes(recipe.lead))
        if recipe.has_policy:
            version = state["version"] if state else 0
            generate = None if recipe.placement.samples_apart else self._generate_mesh()
            return partial(
                role_factories.policy, *settings, generate, recipe.rollout, recipe.run.seed, version
            )
        return partial(role_factories.learner, *settings, recipe.run.seed, state["done"] if state else 0)

    def _critic_factory(self, role: str, plan: PhasePlan, goes_on: Checkpoint | None) -> Factory:
        """A critic as the phase begins: the policy with a new head, or what recipe or checkpoint have."""
        recipe = self._recipe
        model = self._kept_policy()
        if recipe.critic.path is not None:
            model = model.model_copy(update={"path": recipe.critic.path})
        if goes_on is not None:
            model = _directory(goes_on.model(role), recipe)
        done = goes_on.state["done"] if goes_on is not None else 0
        train = self._critic_train(plan)
        settings = (self._base, recipe.run.device, train, recipe.run.seed, plan.config.updates, done)
        return partial(role_factories.critic, model, *settings, role, self.tokenizer, self._meshes(role))

    def _critic_train(self, plan: PhasePlan) -> TrainConfig:
        lr = self._recipe.critic.lr
        return plan.train if lr is None else plan.train.model_copy(update={"lr": lr})

    def _kept_policy(self) -> ModelConfig:
        """The policy as this phase found it; kept in the run directory so that a resume finds the same."""
        folder = self._run / layout.REFERENCE
        if not folder.exists():
            kept = self.executor.on_all_ranks("policy", role_factories.keep_policy, folder)
            kept.read(self._recipe.placement.deadline_s)
        return _directory(folder, self._recipe)

    def _function_factory(self, kind: Callable[..., Reward], functions: Sequence[FunctionPath]) -> Factory:
        return partial(kind, functions, self._recipe.reward, self.tokenizer)

    def _scorer_factory(self, role: str, path: str, kind: type[RewardModel]) -> Factory:
        recipe = self._recipe
        source = scorer_source(f"{role}.model", path, self._base)
        model = ModelConfig(path=source, dtype=recipe.policy.model.dtype)
        train = TrainConfig(tokens_per_micro_batch=recipe.policy.tokens_per_micro_batch)
        settings = (self._base, recipe.run.device, train, recipe.run.seed, self.tokenizer, kind)
        return partial(role_factories.scorer, model, *settings, f"{role}.model", self._meshes(role))


def _directory(path: Path, recipe: Recipe) -> ModelConfig:
    return ModelConfig(path=str(path.absolute()), dtype=recipe.policy.model.dtype)

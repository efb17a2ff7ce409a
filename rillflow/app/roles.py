"""RoleGroups: make a run's roles, as the role table describes, on the ranks of their pools.

    recipe ─┬─ [policy] ─────────────> the policy and its sampler, or the reward model   ┐ as long
            ├─ [reward], [cost], task ─> reward, cost, eval_reward                       ┘ as the run
            └─ a phase begins ───────> critics; the reference: a copy of the policy        each phase

The reference of the second phase is the policy that the first phase left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any

from rillflow.app.engine_sources import engine_source
from rillflow.app.facts import RecipeFacts
from rillflow.app.meshes import require_near
from rillflow.app.phases import PhasePlan
from rillflow.app.plugin_sections import own_settings, sections_for_ranks
from rillflow.app.plugins import imported, installed
from rillflow.app.resolved import Resolved
from rillflow.app.role_table import EVAL_REWARD, Start
from rillflow.app.row_writers import row_columns
from rillflow.controller.checkpoint import Checkpoint
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.weight_sync import WeightSync
from rillflow.errors import ConfigError
from rillflow.models.config import ModelConfig
from rillflow.models.tokenizer import ModelInput
from rillflow.placement.mesh import Mesh
from rillflow.rewards.function import FunctionPath
from rillflow.roles.setting import RoleSetting, made
from rillflow.roles.trained_role import TrainedRole
from rillflow.rollout.config import RolloutConfig
from rillflow.runs import layout
from rillflow.runs.layout import checkpoint_folders
from rillflow.sharding.codec import EdgeCodecs
from rillflow.sharding.layout import generation_mesh
from rillflow.training.config import TrainConfig
from rillflow.training.skipping import leave_out
from rillflow.workers.awaited import Replies
from rillflow.workers.backend import Backend, Place, Pool, Replacement
from rillflow.workers.config import SAMPLER
from rillflow.workers.group import Group
from rillflow.workers.pending import Pending


class RoleGroups:
    """Roles of a recipe; the constructor makes the trained one.

    Args:
        facts: the recipe and its models.
        run: the run directory.
        checkpoint: the checkpoint to resume from; None to start from the beginning.
        backend: the backend with the ranks.
    """

    def __init__(
        self, facts: RecipeFacts, run: Path, checkpoint: Checkpoint | None, backend: Backend
    ) -> None:
        recipe, self._base = facts.recipe, facts.base.absolute()
        self._facts, self._recipe, self._run, self._backend = facts, recipe, run.absolute(), backend
        self._engine = engine_source(recipe.rollout.engine)
        self._specs = facts.resolved.roles
        self._codecs = edge_codecs(facts.resolved)
        self._groups: dict[str, Group] = {}
        self._settings: dict[str, Callable[..., RoleSetting]] = {}
        self.executor = GroupExecutor(self._groups, backend)
        self.delivery: WeightSync | None = None
        """WeightSync to a sampler on its own ranks; None if it shares the policy's ranks."""
        role, model, done = facts.resolved.trained_role, facts.model, 0
        if checkpoint is not None:
            model = self._directory(checkpoint.model(role))
            done = checkpoint.state["version" if facts.resolved.has_policy else "done"]
        self._model_input: ModelInput | None = None
        here = facts.resolved.has_policy and not recipe.placement.samples_apart
        generate = self._generate_mesh() if here else None
        self._start(role, model=model, version=done, generate=generate)
        if facts.resolved.has_policy:
            self._start_sampler(model)
        found = self.executor.on_first_rank(role, TrainedRole.model_input)
        self._model_input = found.read(recipe.placement.deadline_s)

    @property
    def model_input(self) -> ModelInput:
        """Tokeniser and context that rows are encoded for."""
        assert self._model_input is not None, "the trained role is made first"
        return self._model_input

    def __contains__(self, role: str) -> bool:
        return role in self._groups

    def start_scorers(
        self,
        functions: Sequence[FunctionPath],
        costs: Sequence[FunctionPath],
        judge: FunctionPath | None = None,
    ) -> None:
        """Make the roles that score; a role without a function is left out.

        Args:
            functions: functions that score, or that score held-out answers if a model is the reward.
            costs: functions that compute a row's cost.
            judge: a judge over HTTP, which scores training rows instead of the functions, or with them.
        """
        dtype, sources = self._recipe.policy.model.dtype, self._facts.scorers
        models = {setting: ModelConfig(path=source, dtype=dtype) for setting, source in sources.items()}
        is_alone = judge is not None and self._recipe.reward.weights is None
        trained = [judge] if judge is not None and is_alone else functions
        for role, scoring in {"reward": trained, EVAL_REWARD: functions, "cost": costs}.items():
            if role in self._specs and (scoring or self._specs[role].is_model):
                self._start(role, functions=scoring, scorers=models, judge=judge)

    def begin(self, plan: PhasePlan, goes_on: Checkpoint | None) -> tuple[str, ...]:
        """Prepare a phase and return the roles it trains; the policy or its replacement comes first.

        Args:
            plan: the phase.
            goes_on: a checkpoint of this phase; None at the start of the phase.
        """
        for role in plan.roles:
            if self._specs[role].start is Start.PHASE:
                done = goes_on.state["done"] if goes_on is not None else 0
                how: dict[str, Any] = {"train": self._train(role, plan), "version": done}
                self._start(role, model=self._phase_model(role, goes_on), **how)
            elif self._specs[role].start is Start.CALLED and role not in self:
                self._start(role)
        trained = self.trained(plan)
        for role in trained:
            begun = self._groups[role].call(
                "begin",
                train=self._train(role, plan),
                updates=plan.config.updates,
                resume=goes_on.optimizer(role).absolute() if goes_on else None,
            )
            begun.read(self._recipe.placement.load_s)
            drafts = self._run / layout.BUNDLES / layout.DRAFT
            self.executor.on_all_ranks(role, leave_out, drafts / role).read(self._recipe.placement.deadline_s)
        if self.delivery is not None and plan.evaluated:
            order = plan.schedule
            self.delivery.begin(is_ahead=order.is_beside, keeps_initial=order.is_by_group)
        return trained

    def trained(self, plan: PhasePlan) -> tuple[str, ...]:
        """Return the roles that a phase trains; the policy or its replacement comes first."""
        return tuple(role for role in plan.roles if self._specs[role].is_trained)

    def moving(self, plan: PhasePlan) -> tuple[str, ...]:
        """Return the roles of a phase that are not trained but change; checkpoints hold them too."""
        called = plan.heard.calls
        return tuple(role for role in plan.roles if f"{role}.follow" in called)

    def _start(self, role: str, lies: Mesh | None = None, of: str = "", **given: Any) -> None:
        """Make a role on every rank of its pool: on its grid, or with rows split over all of them.

        Args:
            role: its name.
            lies: its grid; None for the grid that the recipe gives it.
            of: the role that it belongs to; the policy, for a sampler.
            given: further fields of its RoleSetting.
        """
        recipe, spec = self._recipe, self._specs[role]
        placement, sizes = recipe.placement, recipe.placement.mesh_of(role)
        pool = placement.pool_of(role)
        rows = Mesh.of(dp=placement.pools[pool])
        world = len(self._backend.world_of(Place(pool, 0)))
        setting = partial(
            RoleSetting,
            role=role,
            base=self._base,
            run=self._run,
            device=self._backend.devices[pool],
            threads=recipe.run.threads,
            seed=recipe.run.seed,
            rollout=own_settings(recipe.rollout, RolloutConfig),
            engine=self._engine.path,
            engine_options=self._engine.options,
            codecs=self._codecs,
            sections=sections_for_ranks(recipe),
            task=recipe.task,
            limits=recipe.reward,
            sizes=sizes if role == SAMPLER else replace(sizes, dp=world // (sizes.pp * sizes.tp)),
            frame=recipe.algorithm.judge_frame,
            model_input=self._model_input,
            **{"train": recipe.policy.as_train(), **given},
        )
        mesh = lies or (sizes.mesh if spec.is_model else rows)
        if not placement.tp_across_nodes:
            require_near(
                role,
                pool,
                mesh,
                {at.rank: node.address for at, node in self._backend.nodes.items() if at.pool == pool},
            )
        group = Group(role, spec.endpoints(role), mesh=mesh, pool=pool, backend=self._backend, of=of)
        group.start(partial(made, spec.make, setting), placement.load_s)
        self._groups[role], self._settings[role] = group, setting

    def _start_sampler(self, model: ModelConfig) -> None:
        """Make the sampler on the policy's ranks, or on other ranks that the policy sends weights to."""
        placement, mesh = self._recipe.placement, self._generate_mesh()
        how: dict[str, Any] = {"wraps": [each.wrap for each in self._facts.resolved.writers.values()]}
        how["columns"] = {
            name: imported(each.path, f"the column {name} of a plugin")
            for name, each in row_columns().items()
        }
        if not placement.samples_apart:
            self._start(SAMPLER, mesh, of="policy", **how)
            return
        first = placement.mesh_of("policy").ranks
        counted = Mesh(axes=mesh.axes, ranks=tuple(first + rank for rank in mesh.ranks))
        self._start(SAMPLER, mesh, of="policy", model=model, generate=counted, **how)
        self.delivery = WeightSync(self.executor, placement.deadline_s)

    @property
    def may_restart_sampler(self) -> bool:
        """Whether the sampler's ranks hold no other role, so that they can be replaced alone."""
        if self._codecs.weights is not None:
            return False  # what is on its way may be a difference to weights that a new process lacks
        pools = [group.places[0].pool for group in self._groups.values()]
        return pools.count(self._groups[SAMPLER].places[0].pool) == 1 and self.delivery is not None

    def may_restart(self, pool: str) -> bool:
        """Whether ranks of a pool can be replaced: all of its roles can be made again without other ranks."""
        roles = [role for role, group in self._groups.items() if group.places[0].pool == pool]
        able = (Start.FUNCTIONS, Start.NAMED, Start.PHASE)
        return all(self._specs[role].start in able and not self._specs[role].is_trained for role in roles)

    def restart(self, places: Sequence[Place]) -> Iterator[Replacement | Replies]:
        """Replace ranks and make their roles again; yield each step, which is then waited for.

        Raises:
            ClusterError: a new process does not start, or cannot make its roles.
        """
        placement = self._recipe.placement
        yield (replacement := self._backend.replace(places))
        replacement.read(placement.start_s)
        for role, group in self._groups.items():
            ranks = [rank for rank, place in enumerate(group.places) if place in replacement.places]
            if ranks:
                factory = partial(made, self._specs[role].make, self._settings[role])
                yield (replies := group.begin_restart(ranks, factory))
                replies.read(placement.load_s)

    def restart_sampler(self, ranks: Sequence[int]) -> Iterator[Replacement | Replies | Pending]:
        """Replace ranks of a sampler that has ranks of its own; yield each step, which is then waited for.

        Raises:
            ClusterError: a new process does not start, or cannot make its model.
        """
        assert self.delivery is not None, "the sampler has ranks of its own"
        group, placement = self._groups[SAMPLER], self._recipe.placement
        yield (replacement := self._backend.replace([group.places[rank] for rank in ranks]))
        replacement.read(placement.start_s)
        setting = self._settings[SAMPLER]
        newest = next(iter(checkpoint_folders(self._run / layout.CHECKPOINTS)), None)
        if newest is not None:  # the checkpoint that the run began with may be gone; weights are sent anyway
            setting = partial(setting, model=self._directory(newest / self._facts.resolved.trained_role))
        factory = partial(made, self._specs[SAMPLER].make, setting)
        yield (replies := group.begin_restart(ranks, factory))
        replies.read(placement.load_s)
        yield (connected := self.delivery.connect(ranks))
        connected.wait(placement.deadline_s)

    def _generate_mesh(self) -> Mesh:
        """Return the grid of the ranks that generate."""
        placement = self._recipe.placement
        tp = placement.generate_tp
        if placement.samples_apart:
            return Mesh.of(dp=placement.pools[placement.pool_of(SAMPLER)] // tp, tp=tp)
        sizes = placement.mesh_of("policy")
        return generation_mesh(sizes.mesh, tp, is_sharded=sizes.is_sharded)

    def _phase_model(self, role: str, goes_on: Checkpoint | None) -> ModelConfig:
        """Return the model that a role of a phase starts from: the policy, its section's, or a checkpoint's.

        The run directory keeps the policy, so that a resume starts from the same one.
        """
        folder, spec = self._run / layout.REFERENCE, self._specs[role]
        if not folder.exists():
            kept = self.executor.on_all_ranks("policy", TrainedRole.save_weights, folder)
            kept.read(self._recipe.placement.load_s)
        if goes_on is not None and goes_on.model(role).is_dir():
            return self._directory(goes_on.model(role))
        found, path = self._directory(folder), self._recipe.critic.path
        return found.model_copy(update={"path": path}) if spec.is_trained and path is not None else found

    def _train(self, role: str, plan: PhasePlan) -> TrainConfig:
        """Return the optimiser settings of a role in a phase."""
        lr = self._recipe.critic.lr if self._specs[role].section == "critic" else None
        return plan.train if lr is None else plan.train.model_copy(update={"lr": lr})

    def _directory(self, path: Path) -> ModelConfig:
        return ModelConfig(path=str(path.absolute()), dtype=self._recipe.policy.model.dtype)


def pools_of(resolved: Resolved) -> list[Pool]:
    """Return the pools, with their worlds, and whether a role in them computes on a device.

    Reward functions need no device.
    """
    placement = resolved.recipe.placement
    taking = {
        placement.pool_of(role) for role, spec in resolved.roles.items() if spec.start is not Start.FUNCTIONS
    }
    return [
        Pool(name=name, size=size, takes_device=name in taking, world=_world(resolved, name))
        for name, size in placement.pools.items()
    ]


def _world(resolved: Resolved, pool: str) -> int:
    """Return the number of ranks of a replica, if all roles of a pool consist of replicas; else 0.

    The ranks of a judge divide its work among them, so its replicas work alone only where they take groups
    one by one: if the step takes the groups that are ready first.
    """
    placement, sizes = resolved.recipe.placement, [1]
    for role, spec in resolved.roles.items():
        if placement.pool_of(role) != pool:
            continue
        if not (spec.has_replicas or (spec.start is Start.NAMED and resolved.recipe.schedule.is_by_group)):
            return 0
        if role == SAMPLER:
            sizes.append(placement.generate_tp)
        elif spec.is_model:
            sizes.append(placement.mesh_of(role).replica)
    return lcm(*sizes)


def edge_codecs(resolved: Resolved) -> EdgeCodecs:
    """Return the codecs that plugins bring for a recipe; none without such a plugin.

    Raises:
        ConfigError: two plugins bring one for the same edge.
    """
    codecs, owners = dict[str, Any](), dict[str, str]()
    for plugin, each in installed().items():
        found = each.codecs(resolved) if each.codecs else EdgeCodecs()
        for edge, codec in vars(found).items():
            if codec is not None and edge in codecs:
                raise ConfigError(
                    f"the plugins {owners[edge]} and {plugin} both bring a codec of {edge}",
                    why="the tensors of an edge are encoded once",
                    fix="turn one of them off in the recipe",
                )
            if codec is not None:
                codecs[edge], owners[edge] = codec, plugin
    return EdgeCodecs(**codecs)

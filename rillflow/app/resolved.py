"""Resolved: a recipe's settings with everything that follows from them alone, computed once.

    run.toml ─ load_recipe ──────────┐   ┌─ recipe, given ──> settings, and where each came from
    config.json ─ recorded_recipe ───┼─> ├─ phases, roles ──> what runs, and which roles take part
    Resolved ─ changed(overrides) ───┘   └─ meshes, graphs ─> where roles lie; the dataflow of each phase

Facts, checks, build, memory, planner, resume and replay read it; none of them computes these again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rillflow.algorithms.config import SampledConfig
from rillflow.app.any_recipe import AUTO, AnyRecipe
from rillflow.app.phases import PhasePlan, listen, phase_plans
from rillflow.app.role_table import ROLES, RoleSpec, Start, roles_of, table_of
from rillflow.app.row_writers import RowWriter, row_writers
from rillflow.app.sections import Recipe
from rillflow.config.schema import with_values
from rillflow.graph.trace import Listener
from rillflow.workers.config import MeshSizes

if TYPE_CHECKING:
    from rillflow.graph.graph import Graph


NOTHING_GIVEN: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of a recipe."""

    heard: tuple[Listener, ...]
    """Calls of the step of each phase."""
    table: Mapping[str, RoleSpec]
    """Every role that there may be, including the roles that the algorithm brings."""
    called: tuple[str, ...]
    """Roles that the phases call, in the order of their first call."""
    part: Mapping[str, RoleSpec]
    """Roles that take part: the called ones, in order, and the ones that join them."""

    @classmethod
    def of(cls, recipe: Recipe, heard: tuple[Listener, ...] | None = None) -> Roles:
        """Return the roles of a recipe; ``heard`` spares listening to its steps again.

        Raises:
            ConfigError: the algorithm brings or calls something that is no role.
        """
        heard = listen(recipe) if heard is None else heard
        called, table = tuple(dict.fromkeys(role for each in heard for role in each.heard)), table_of(recipe)
        return cls(heard=heard, table=table, called=called, part=roles_of(recipe, table, called))


@dataclass(frozen=True, kw_only=True)
class Resolved(AnyRecipe):
    """A recipe of a language model, its defaults chosen, with everything that its settings determine.

    Example:
        load_recipe(Path("recipes/arithmetic/run.toml"), ["policy.lr=1e-5"]).called
    """

    recipe: Recipe
    """The settings."""
    found: Roles = field(compare=False, repr=False)
    """The roles of the recipe, and the calls of its steps."""

    def changed(self, values: Mapping[str, Any], given: Mapping[str, str] = NOTHING_GIVEN) -> Resolved:
        """Return this recipe with other values, which are not checked; only what they affect is computed.

        Args:
            values: values by dotted key.
            given: origins of the values that count as given, or chosen; others keep their origin.
        """
        old, recipe = self.recipe, with_values(self.recipe, values)
        if recipe == old and not given:
            return self
        roles = self.found
        if (recipe.algorithm, recipe.warm_start) != (old.algorithm, old.warm_start):
            roles = Roles.of(recipe)
        elif (recipe.reward, recipe.cost) != (old.reward, old.cost):
            roles = Roles.of(recipe, roles.heard)
        return replace(self, recipe=recipe, given={**self.given, **given}, found=roles)

    @cached_property
    def phases(self) -> tuple[PhasePlan, ...]:
        """What the run does, one phase after the other."""
        return phase_plans(self.recipe, self.found.heard)

    @property
    def called(self) -> tuple[str, ...]:
        """Roles that the phases call, in the order of their first call."""
        return self.found.called

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        """Roles that take part: the called ones, in order, and the ones that join them."""
        return self.found.part

    @property
    def table(self) -> Mapping[str, RoleSpec]:
        """Every role that there may be, including the roles that the algorithm brings."""
        return self.found.table

    @property
    def main(self) -> PhasePlan:
        """The phase of the algorithm; it is the last one."""
        return self.phases[-1]

    def models(self, roles: Sequence[str] | None = None) -> list[str]:
        """Return the roles among ``roles`` that are models; None for the called ones."""
        return [role for role in (self.called if roles is None else roles) if self.table[role].is_model]

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.config.steps for phase in self.phases)

    @cached_property
    def trained_role(self) -> str:
        """Role whose model the section ``policy`` describes: the first role that starts from it."""
        own = (role for role in self.called if role in ROLES and ROLES[role].start is Start.SECTION)
        return next(own, self.called[0])

    @property
    def has_policy(self) -> bool:
        """Whether there is a policy; without one, nothing is sampled and no answer is scored."""
        return "policy" in self.called

    @property
    def generates(self) -> bool:
        """Whether the policy writes answers: those that it trains on, or those of an evaluation.

        An algorithm with its own scores of held-out rows evaluates the answers that are given there.
        """
        task, judged = self.recipe.task, self.recipe.evaluate
        has_rows = bool(judged.sets) or task.held_out_source is not None or task.held_out > 0
        is_evaluated = judged.problems > 0 and has_rows and self.recipe.chosen.score is None
        return self.has_policy and (isinstance(self.recipe.algorithm, SampledConfig) or is_evaluated)

    @property
    def shares_reference(self) -> bool:
        """Whether the reference is the policy's own module with an earlier adapter."""
        placement, adapter = self.recipe.placement, self.recipe.policy.model.adapter
        roles = ("policy", "reference")
        pools = {(placement.pool_of(role), placement.mesh_of(role)) for role in roles}
        return adapter is not None and set(roles) <= set(self.called) and len(pools) == 1

    @cached_property
    def meshes(self) -> Mapping[str, MeshSizes]:
        """Mesh of each role that takes part, in training and scoring."""
        return {role: self.recipe.placement.mesh_of(role) for role in self.roles}

    @cached_property
    def graphs(self) -> Sequence[Graph]:
        """The dataflow of each phase, traced at the first use.

        Raises:
            GraphError: a stage reads a field that nothing provides.
        """
        from rillflow.app.graphs import graphs

        return graphs(self.phases, self.table)

    @cached_property
    def scorers(self) -> Mapping[str, str]:
        """Paths of the models that score, by the setting that names each."""
        reward, judge = self.recipe.reward, self.recipe.reward.judge
        named = {"reward.model": reward.model, "cost.model": self.recipe.cost.model}
        named |= {"reward.judge.model": None if judge is None else judge.model}
        return {setting: path for setting, path in named.items() if path is not None}

    @cached_property
    def writers(self) -> Mapping[str, RowWriter]:
        """What writes the rows besides the policy, by the key of its section; one at most may.

        Raises:
            ConfigError: see ``row_writers``.
        """
        return row_writers(self.recipe, self.base)

    @property
    def writer(self) -> str | None:
        """Section of what writes the rows together with the policy; None if the policy writes them alone."""
        return next(iter(self.writers), None)

    def is_open(self, setting: str) -> bool:
        """Return whether the recipe leaves a setting out, so that a default applies."""
        return not is_named(setting, self.given)

    @property
    def names_held_out(self) -> bool:
        """Whether a setting says which rows are held out, or how many."""
        return self.recipe.task.held_out_source is not None or not self.is_open("task.held_out")


def is_named(setting: str, given: Mapping[str, str]) -> bool:
    """Return whether the origins name a setting, a part of it, or a value for its section."""
    return any(
        each == setting or each.startswith(f"{setting}.") or setting.startswith(f"{each}.")
        for each, origin in given.items()
        if not origin.startswith(f"{AUTO}: ")
    )

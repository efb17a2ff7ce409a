"""Role table: each role's factory, its section of the recipe, and the model it starts from.

    ROLES and an algorithm's ``brings`` ─ roles_of(recipe) ─> the roles that take part, each a RoleKind
        check, consistency   sections that nothing reads, impossible placements
        drawing              the endpoints a step may call
        RoleGroups           when and on which grid a role is made; which roles are trained and checkpointed

Nothing heavy is imported: the table names a factory, and ranks look it up in ``role_factories``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rillflow.errors import ConfigError, nearest
from rillflow.workers.config import SAMPLER

if TYPE_CHECKING:
    from rillflow.app.recipe import Recipe

EVAL_REWARD = "eval_reward"
"""Role of the function that scores held-out answers if a model is the reward."""
NO_ROLE = "a role is a class with methods marked as endpoints; see assembly.role_factories.RoleSetting"
"""Reason to refuse something that an algorithm brings."""


class Start(StrEnum):
    """Source of a role's object."""

    FUNCTIONS = "functions"
    """Functions that score, or nothing."""
    SECTION = "section"
    """Model of the section ``policy``, or of the checkpoint."""
    PHASE = "phase"
    """The policy at the start of the phase; the role is made again for each phase."""
    NAMED = "named"
    """Model that the role's own section names."""
    BROUGHT = "brought"
    """Class that an algorithm brings; its object is made once, in the first phase that calls it."""


@dataclass(frozen=True, kw_only=True)
class RoleKind:
    """Row of the table.

    Example:
        RoleKind(factory="critic", section="critic", start=Start.PHASE, is_trained=True)
    """

    factory: str | type
    """Function of ``role_factories`` that makes the role's object, or a class that an algorithm brings."""
    section: str = ""
    """Section of a recipe that the role reads."""
    start: Start = Start.FUNCTIONS
    """Source of the role's object."""
    is_trained: bool = False
    """Whether the role has an optimiser and is in checkpoints."""
    joins: Callable[[Recipe], bool] = lambda _: False
    """Whether the role takes part although no step calls it."""
    of_model: RoleKind | None = None
    """Kind that replaces this one if the role's section names a model."""

    @property
    def is_model(self) -> bool:
        """Whether the role's ranks share a model."""
        return self.start in (Start.SECTION, Start.PHASE, Start.NAMED)

    @property
    def takes_device(self) -> bool:
        """Whether the role's ranks compute on accelerators; only functions that score do not."""
        return self.factory not in ("reward", "cost")


def _samples(recipe: Recipe) -> bool:
    return recipe.has_policy


def _scores_by_model(recipe: Recipe) -> bool:
    return recipe.has_policy and (recipe.reward.model is not None or recipe.reward.judge is not None)


_CRITIC = RoleKind(factory="critic", section="critic", start=Start.PHASE, is_trained=True)
_REWARD_MODEL = RoleKind(factory="frozen_reward_model", section="reward", start=Start.NAMED, joins=_samples)
JUDGE_REWARD = RoleKind(factory="frozen_judge", section="reward", start=Start.NAMED, joins=_samples)
"""Kind of the reward if a judge scores."""
PANEL = RoleKind(factory="panel", section="reward", start=Start.NAMED, joins=_samples)
"""Kind of the reward if several scorers are combined."""
_COST_MODEL = RoleKind(factory="frozen_cost_model", section="cost", start=Start.NAMED)
ROLES: Mapping[str, RoleKind] = {
    "policy": RoleKind(factory="policy", section="policy", start=Start.SECTION, is_trained=True),
    SAMPLER: RoleKind(factory="sampler", section="rollout", joins=_samples),
    "reference": RoleKind(factory="reference", start=Start.PHASE),
    "critic": _CRITIC,
    "cost_critic": _CRITIC,
    "reward": RoleKind(factory="reward", section="reward", joins=_samples, of_model=_REWARD_MODEL),
    EVAL_REWARD: RoleKind(factory="reward", section="reward", joins=_scores_by_model),
    "cost": RoleKind(factory="cost", section="cost", of_model=_COST_MODEL),
    "reward_model": RoleKind(factory="reward_model", section="policy", start=Start.SECTION, is_trained=True),
    "judge": RoleKind(factory="judge", section="policy", start=Start.SECTION, is_trained=True),
}
"""The shipped roles by name."""
SECTION_ROLES = frozenset(name for name, kind in ROLES.items() if kind.start is Start.SECTION)
"""Roles whose model the section ``policy`` describes."""


def table_of(recipe: Recipe) -> Mapping[str, RoleKind]:
    """Return every role that a recipe may have, including those that its algorithm brings.

    Raises:
        ConfigError: the algorithm brings a shipped role's name, an unknown kind, or something else.
    """
    named = {"reward": recipe.reward.model, "cost": recipe.cost.model}
    found = {
        name: kind.of_model if kind.of_model is not None and named[name] is not None else kind
        for name, kind in ROLES.items()
    }
    if recipe.reward.judge is not None:
        found["reward"] = JUDGE_REWARD
    if recipe.reward.weights is not None:
        found["reward"] = PANEL
    again = [name for name, kind in ROLES.items() if kind.start is Start.PHASE]
    for name, kind in recipe.chosen.brings.items():
        what = f"{recipe.algorithm.name} brings a role {name!r}"
        if name in ROLES:
            raise ConfigError(f"{what}, which is a shipped one's name", why="a role is found by its name")
        if isinstance(kind, str) and kind not in again:
            why = f"a kind is a class with endpoints, or one of {', '.join(again)}"
            raise ConfigError(f"{what} of the kind {kind!r}", why=why, fix=nearest(kind, again))
        if not isinstance(kind, str | type):
            raise ConfigError(f"{what}, which is no role: {kind!r:.60}", why=NO_ROLE)
        found[name] = found[kind] if isinstance(kind, str) else RoleKind(factory=kind, start=Start.BROUGHT)
    return found


def roles_of(recipe: Recipe) -> Mapping[str, RoleKind]:
    """Return the roles that take part: those that steps call, in order, and those that join them.

    Raises:
        ConfigError: a step calls a role that is neither shipped nor brought.
    """
    table = table_of(recipe)
    for role in recipe.roles:
        if role not in table:
            raise ConfigError(
                f"the step of {recipe.algorithm.name} calls flow.{role}, and there is no role {role!r}",
                why=f"there are {', '.join(table)}",
                fix=f"{nearest(role, table)}; Algorithm(brings=...) adds one",
            )
    joined = [role for role, kind in table.items() if kind.joins(recipe)]
    return {role: table[role] for role in dict.fromkeys([*recipe.roles, *joined])}


def model_roles(recipe: Recipe, roles: Iterable[str]) -> list[str]:
    """Return the roles among ``roles`` that are models."""
    table = table_of(recipe)
    return [role for role in roles if table[role].is_model]

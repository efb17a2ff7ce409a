"""Role table: each role's class, its section of the recipe, and the model it starts from.

    ROLES, SCORERS, an algorithm's ``brings`` ─ table_of ─> every role that there may be
        calls of the steps ─ roles_of ─> Resolved.roles: the roles that take part, each a RoleSpec
            check, contradictions  sections that nothing reads, impossible placements
            graphs                 the endpoints a step may call
            RoleGroups             when and on which grid a role is made; which roles are in checkpoints

A shipped role is a class of ``rillflow.roles`` whose ``make`` takes a RoleSetting, and a row of the table.
Nothing heavy is imported until a row's class is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rillflow.app.sections import Recipe
from rillflow.errors import ConfigError, nearest
from rillflow.workers.config import SAMPLER

if TYPE_CHECKING:
    from rillflow.workers.endpoint import Endpoint

EVAL_REWARD = "eval_reward"
"""Role of the function that scores held-out answers if a model is the reward."""
NO_ROLE = "a role is a class with methods marked as endpoints; see roles.setting.RoleSetting"
"""Reason to refuse something that an algorithm brings."""


class Start(StrEnum):
    """When a role is made, and from which model."""

    FUNCTIONS = "functions"
    """With the run, from functions that score."""
    SECTION = "section"
    """With the run, from the model of the section ``policy``, or of the checkpoint."""
    NAMED = "named"
    """With the run, from the models that the role's own section names."""
    POLICY = "policy"
    """With the run, from the policy; it has no model of its own."""
    PHASE = "phase"
    """With each phase again, from the policy at its start."""
    CALLED = "called"
    """In the first phase that calls it, from no model."""


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """Row of the table.

    Example:
        RoleSpec(role="scalar_roles:Critic", section="critic", start=Start.PHASE, is_trained=True)
    """

    role: str | type
    """Module and class below ``rillflow.roles``, or a class that an algorithm brings."""
    section: str = ""
    """Section of a recipe that the role reads."""
    start: Start = Start.CALLED
    """When the role is made, and from which model."""
    is_trained: bool = False
    """Whether the role has an optimiser and is in checkpoints."""
    has_replicas: bool = False
    """Whether its ranks are replicas without collectives among them; the sampler's tp groups count as one."""
    joins: Callable[[Recipe], bool] = lambda _: False
    """Whether the role takes part beside a policy although no step calls it."""

    @property
    def is_model(self) -> bool:
        """Whether the role's ranks share a model."""
        return self.start in (Start.SECTION, Start.NAMED, Start.PHASE)

    @property
    def module(self) -> str | None:
        """Module of a shipped role's class; None for a class that an algorithm brings."""
        return None if isinstance(self.role, type) else f"rillflow.roles.{self.role.partition(':')[0]}"

    def load(self) -> Any:
        """Return the role's class; this loads torch."""
        if isinstance(self.role, type):
            return self.role
        assert self.module is not None, "the role is shipped"
        return vars(import_module(self.module))[self.role.partition(":")[2]]

    @property
    def make(self) -> Callable[..., Any]:
        """Maker of the role's object from a RoleSetting: ``make`` of its class, or a brought class."""
        make: Callable[..., Any] = self.role if isinstance(self.role, type) else self.load().make
        return make

    def endpoints(self, name: str) -> Mapping[str, Endpoint]:
        """Return the endpoints of the role's class by name; errors call the role ``name``.

        Raises:
            ConfigError: the class that an algorithm brings has no endpoint.
        """
        from rillflow.workers.endpoint import endpoints_of

        found = endpoints_of(self.load())
        if not found:
            raise ConfigError(
                f"the algorithm brings {name!r}, which is not a role: {self.role!r:.60}", why=NO_ROLE
            )
        return found


def _always(_: Recipe) -> bool:
    return True


def _scores_by_model(recipe: Recipe) -> bool:
    return recipe.reward.model is not None or recipe.reward.judge is not None


_TRAINED: dict[str, Any] = {"section": "policy", "start": Start.SECTION, "is_trained": True}
_CRITIC = RoleSpec(role="scalar_roles:Critic", section="critic", start=Start.PHASE, is_trained=True)
_CALLED: dict[str, Any] = {"start": Start.FUNCTIONS, "has_replicas": True}
_FUNCTION: dict[str, Any] = {"role": "reward:Reward", "section": "reward", **_CALLED}
ROLES: Mapping[str, RoleSpec] = {
    "policy": RoleSpec(role="policy:Policy", **_TRAINED),
    SAMPLER: RoleSpec(
        role="sampler:Sampler", section="rollout", start=Start.POLICY, has_replicas=True, joins=_always
    ),
    "reference": RoleSpec(role="policy:Reference", start=Start.PHASE),
    "critic": _CRITIC,
    "cost_critic": _CRITIC,
    "reward": RoleSpec(**_FUNCTION, joins=_always),
    EVAL_REWARD: RoleSpec(**_FUNCTION, joins=_scores_by_model),
    "cost": RoleSpec(role="reward:Cost", section="cost", **_CALLED),
    "reward_model": RoleSpec(role="scalar_roles:RewardModel", **_TRAINED),
    "judge": RoleSpec(role="judge:Judge", **_TRAINED),
}
"""The shipped roles by name."""
_REWARD: dict[str, Any] = {"section": "reward", "start": Start.NAMED, "joins": _always}
SCORERS: Mapping[str, RoleSpec] = {
    "cost.model": RoleSpec(
        role="scalar_roles:SafetyCostModel", section="cost", start=Start.NAMED, has_replicas=True
    ),
    "reward.model": RoleSpec(role="scalar_roles:RewardModel", has_replicas=True, **_REWARD),
    "reward.judge": RoleSpec(role="judge:Judge", **_REWARD),
    "reward.weights": RoleSpec(role="combined_scores:Panel", **_REWARD),
}
"""Rows that replace ``cost`` and ``reward`` if these settings are given; the last one wins."""


def table_of(recipe: Recipe) -> Mapping[str, RoleSpec]:
    """Return every role that a recipe may have, including the roles that its algorithm brings.

    Raises:
        ConfigError: the algorithm brings a shipped role's name, an unknown kind, or something else.
    """
    judge = recipe.reward.judge
    given = {
        "cost.model": recipe.cost.model,
        "reward.model": recipe.reward.model,
        "reward.judge": judge.model if judge is not None else None,
        "reward.weights": recipe.reward.weights,
    }
    found = dict(ROLES)
    found |= {name.partition(".")[0]: SCORERS[name] for name, value in given.items() if value is not None}
    again = [name for name, spec in ROLES.items() if spec.start is Start.PHASE]
    for name, brought in recipe.chosen.brings.items():
        what = f"{recipe.algorithm.name} brings a role {name!r}"
        if name in ROLES:
            raise ConfigError(f"{what}, which is a shipped role", why="each role needs its own name")
        if isinstance(brought, str) and brought not in again:
            why = f"a kind is a class with endpoints, or one of {', '.join(again)}"
            raise ConfigError(f"{what} of the unknown kind {brought!r}", why=why, fix=nearest(brought, again))
        if not isinstance(brought, str | type):
            raise ConfigError(f"{what}, which is not a role: {brought!r:.60}", why=NO_ROLE)
        found[name] = found[brought] if isinstance(brought, str) else RoleSpec(role=brought)
    return found


def roles_of(recipe: Recipe, table: Mapping[str, RoleSpec], called: Sequence[str]) -> dict[str, RoleSpec]:
    """Return the roles that take part: the roles that steps call, in order, and the roles that join them.

    Args:
        recipe: the settings.
        table: every role that there may be; see ``table_of``.
        called: the roles that the steps call.

    Raises:
        ConfigError: a step calls a role that is neither shipped nor brought.
    """
    for role in called:
        if role not in table:
            raise ConfigError(
                f"the step of {recipe.algorithm.name} calls flow.{role}, but there is no role {role!r}",
                why=f"the roles are {', '.join(table)}",
                fix=f"{nearest(role, table)}; Algorithm(brings=...) adds a role",
            )
    joined = [role for role, spec in table.items() if "policy" in called and spec.joins(recipe)]
    return {role: table[role] for role in dict.fromkeys([*called, *joined])}

"""Alignment: whether two pipelines lie on the same devices, so that they can run as one fused stage.

two grids ─ unaligned ─> Misalignment, with its fix
Plan ─ fused_of ─> the two roles;  require_fusable refuses a plan with an impossible pair
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rillflow.errors import PlanError, nearest
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan
from rillflow.placement.tables import TEXT, kind_of

FUSED = "fused"
"""Key of ``Plan.settings``: two roles of one pool whose updates run as one fused stage.

The pipeline of the first ascends over the devices, that of the second descends.
"""


def fused_of(plan: Plan) -> tuple[str, ...]:
    """Return the roles whose updates a plan fuses; empty for none.

    Raises:
        PlanError: the plan's ``fused`` is not a list of texts.
    """
    fused = kind_of(list, "it must be a list of two roles")(plan.settings.get(FUSED, []), FUSED)
    return tuple(TEXT(role, FUSED) for role in fused)


def require_fusable(plan: Plan, where: str = "") -> None:
    """Raise an error for a plan whose two updates cannot be one fused stage; ``where`` names its file.

    Raises:
        PlanError: the first contradiction.
    """
    fused = fused_of(plan)
    for why in _contradictions(plan, fused) if fused else ():
        raise PlanError(f"{f'{where}: ' if where else ''}fused is {list(fused)}", why=why)


def _contradictions(plan: Plan, fused: Sequence[str]) -> Iterator[str]:
    """Yield why two updates cannot be one fused stage; each assumes that the previous do not occur."""
    trained = [name for name in plan.units if name != SAMPLER]
    if len(set(fused)) != 2 or len(fused) != 2:
        yield "a fused stage has the updates of two different roles"
    for name in fused:
        if name not in trained:
            known = f"the roles with weights to train are among {', '.join(trained)}"
            yield f"{known}; {nearest(name, trained)}"
    one, two = (plan.units[name] for name in fused)
    if one.pool != two.pool:
        why = f"{fused[0]} is on pool {one.pool} and {fused[1]} on {two.pool}; only updates on the "
        yield f"{why}same devices can use each other's idle time"
    yield from (each.why for each in unaligned(one.grid, two.grid))


class Misalignment(NamedTuple):
    """A reason why two pipelines cannot run as one fused stage."""

    why: str
    """The reason, with both grids."""
    fix: str
    """The change that removes the reason."""


def unaligned(one: Grid, two: Grid) -> Iterator[Misalignment]:
    """Yield why pipelines on two grids of the same devices cannot run as one fused stage."""
    grids, sizes = f"{one}; {two}", sorted((one.pp, two.pp))
    if one.tp * one.cp != two.tp * two.cp:
        yield Misalignment(
            why=f"a stage of both must lie on the same devices, so both need one tp, not {grids}",
            fix="set the same tp for both",
        )
    elif sizes[1] % sizes[0]:
        yield Misalignment(
            why=f"the shorter pipeline is repeated beside the longer; its pp must divide the other: {grids}",
            fix=f"set both pp to {sizes[1]}",
        )
    if sizes[0] == 1:
        yield Misalignment(
            why=f"without pipeline stages there is no idle time to fill: {grids}",
            fix="set pp above 1 for both",
        )
    if one.is_sharded or two.is_sharded or max(one.ep, two.ep) > 1:
        yield Misalignment(
            why=f"with fsdp or ep every pass waits for other replicas, which may run another pass: {grids}",
            fix="leave fsdp and ep at 1",
        )

"""Given: a cost model with given stage seconds, for example measured ones.

seconds by stage name ─┬─ scoring, training, functions, publishing ─> used unchanged
                       └─ generation ─> pace of tokens, so that a step's rows take this long
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from rillflow.graph.graph import Edge, Stage
from rillflow.placement.grid import Grid
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.generation import Decoder
from rillflow_planner.cost_model.grids import Option
from rillflow_planner.cost_model.transfers import Seat
from rillflow_planner.problem import Problem, Unit


class GivenCosts(CostModel):
    """Given seconds, and formulas for everything else.

    Args:
        problem: the step.
        stages_s: seconds of a step's stages by name, summed over equal names. Transfers take no time.
    """

    def __init__(self, problem: Problem, stages_s: Mapping[str, float]) -> None:
        super().__init__(problem)
        names = [stage.name for stage in problem.graph.stages]
        shares = {name: spent / max(names.count(name), 1) for name, spent in stages_s.items()}
        self._given = {index: shares[name] for index, name in enumerate(names) if name in shares}

    def option(self, unit: Unit, fleet: str, devices: int, grid: Grid, generate_tp: int) -> Option:
        """Return the unit on this grid, with the given seconds of its stages."""
        found = super().option(unit, fleet, devices, grid, generate_tp)
        seconds = {index: self._given.get(index, spent) for index, spent in found.seconds.items()}
        return replace(found, seconds=seconds)

    def fused(self, fleet: str, options: Mapping[str, Option], pair: Sequence[Unit]) -> Mapping[str, Option]:
        """Return the options with their given seconds; without those, of the fused stage."""
        updates = {index for unit in pair for index in self._problem.training.intersection(unit.stages)}
        return options if updates <= set(self._given) else super().fused(fleet, options, pair)

    def decoder(
        self, unit: Unit, option: Option, fleet: str, devices: int, room_bytes: float
    ) -> Decoder | None:
        """Return a replica whose pace gives the unit's stages their given seconds."""
        found = super().decoder(unit, option, fleet, devices, room_bytes)
        stages = [self._problem.graph.stages[index] for index in unit.stages if index in self._given]
        stages = [stage for stage in stages if stage.index in self._problem.generating]
        if found is None or not stages:
            return found
        found = replace(found, row_begin_s=0.0, begin_s=0.0)
        given = sum(self._given[stage.index] for stage in stages)
        pace = given / sum(self.generate_s(stage, found) for stage in stages)
        seconds = [field.name for field in fields(Decoder) if field.name.endswith("_s")]
        return replace(found, **{name: pace * vars(found)[name] for name in seconds})

    def function_s(self, stage: Stage, devices: int) -> float:
        """Return the given seconds of a function or formula."""
        return self._given.get(stage.index, super().function_s(stage, devices))

    def transfer_s(self, edge: Edge, source: Seat, destination: Seat) -> float:  # noqa: ARG002
        """Return 0: the given seconds of a stage include the transfer of its inputs."""
        return 0.0

    def crossing_s(self, source: Seat, sampler: Seat) -> float:
        """Return the seconds to send the weights to a separate sampler: those given for publishing, if
        any.
        """
        given = [self._given[index] for index in sorted(self._problem.publishing) if index in self._given]
        return sum(given) if given else super().crossing_s(source, sampler)

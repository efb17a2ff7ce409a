"""Costs: answer the questions of search and simulator from the formulas, with a cache.

unit, machine type, devices ─> options (compute, memory, colocated transfers)
option, room ─────────> decoder ─> seconds of generation
edge, seats ──────────> seconds of a transfer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import PlanError
from rillflow.graph.graph import Edge, Stage
from rillflow.placement.grid import Grid, Numbers
from rillflow.placement.plan import SAMPLER
from rillflow_parts.fusion.scheduling.problem import FusedProblem
from rillflow_planner.cost_model import fused, generation, memory, transfers
from rillflow_planner.cost_model.compute import Setting, score_s, train_s
from rillflow_planner.cost_model.generation import Decoder
from rillflow_planner.cost_model.links import Links
from rillflow_planner.cost_model.options import (
    Option,
    copy_sizes,
    copy_sizes_of,
    divisors,
    grids,
    grids_of,
    stage_layers,
    undominated,
)
from rillflow_planner.cost_model.turns import MOST_ROWS, turns_s
from rillflow_planner.problem import Problem, Unit, Work

_GROUPS = 256
"""Number of equally likely groups of a prompt's rows."""
CostsOf: TypeAlias = "Callable[[Problem], CostModel]"
"""Class of cost models, or a function that creates one for a problem."""


class CostModel:
    """Seconds and bytes of a problem's units; every result is computed once.

    The search relies on these properties. ``room_bytes`` depends on the options only through the sum of
    resident bytes, the sum of sampling bytes, the largest working bytes, and on whether an option generates;
    more bytes never give more room. A decoder depends on its option only through ``generate_tp``, and its
    seconds never rise with its room. ``function_s`` never rises with devices.
    """

    def __init__(self, problem: Problem, fused_rounds: int = fused.ROUNDS) -> None:
        self._problem, self._fused_rounds = problem, fused_rounds
        self._parts: dict[tuple[str, str, Grid], fused.UpdatePart] = {}
        self._schedules: dict[FusedProblem, tuple[float, float]] = {}
        self._options: dict[tuple[str, str, int], tuple[tuple[Option, ...], float]] = {}
        self._decoders: dict[tuple[str, int, str, int, float], Decoder | None] = {}
        self._batches_s: dict[tuple[int, int, bool, Decoder, int], float] = {}

    def options(self, unit: Unit, fleet: str, devices: int) -> tuple[Option, ...]:
        """Return the options of a unit on exactly these devices that are Pareto-optimal in seconds and bytes.

        Seconds are the sum over its stages. Options with different ``generate_tp`` do not compete. Empty if
        no option fits, even alone.
        """
        return self._lay_out(unit, fleet, devices)[0]

    def shortfall_bytes(self, unit: Unit, fleet: str, devices: int) -> float:
        """Return the missing bytes of the unit's smallest option on its fullest device.

        0 if an option fits.
        """
        return self._lay_out(unit, fleet, devices)[1]

    def option(self, unit: Unit, fleet: str, devices: int, grid: Grid, generate_tp: int) -> Option:
        """Return the unit on this grid, even if another grid is better."""
        for known in self._options.get((unit.name, fleet, devices), ((), 0.0))[0]:
            if (known.grid, known.generate_tp) == (grid, generate_tp):
                return known
        found, layouts = [(grid, generate_tp)], self._problem.layouts
        if stage_layers(unit.shape.layers, grid.pp, layouts).last < 1:
            less = max(pp for pp in divisors(unit.shape.layers) if pp < grid.pp)
            raise PlanError(
                f"the {unit.shape.layers} layers of {unit.name} are spread over pp {grid.pp}",
                why="every pipeline stage needs a layer, and all stages have the same number"
                + ("; only the first and the last may have fewer" if layouts.short_ends else ", or one less"),
                fix=f"take a smaller pp, such as {less}",
            )
        return _picked(self._laid(unit, fleet, found), found, 0)

    def every_option(self, unit: Unit, fleet: str, devices: int) -> list[Option]:
        """Return a unit on every grid of these devices, dominated ones and ones that do not fit included."""
        found = self._ways(unit, fleet, devices)
        laid = self._laid(unit, fleet, found)
        return [_picked(laid, found, place) for place in range(len(found))]

    def fused_stage(
        self, fleet: str, options: Mapping[str, Option], pair: Sequence[Unit]
    ) -> tuple[list[fused.UpdatePart], FusedProblem]:
        """Return the two updates of a fused stage, and the problem that its schedule solves."""
        for unit in pair:
            place = unit.name, fleet, options[unit.name].grid
            if place not in self._parts:
                self._parts[place] = fused.part_of(self._setting(unit, fleet), place[-1], unit.name)
        parts = [self._parts[unit.name, fleet, options[unit.name].grid] for unit in pair]
        room = self.room_bytes(fleet, {}) - sum(one.resident_bytes for one in options.values())
        return parts, fused.fused_problem(*parts, room_bytes=room)

    def fused(self, fleet: str, options: Mapping[str, Option], pair: Sequence[Unit]) -> Mapping[str, Option]:
        """Return the options of a pool, two of whose units update in one fused stage.

        Each update gets its part of the fused stage's seconds, in proportion to its seconds without fusion.

        Raises:
            PlanError: a micro-batch does not fit, a pass takes no time, or the pipelines are not aligned.
        """
        parts, problem = self.fused_stage(fleet, options, pair)
        if problem not in self._schedules:
            self._schedules[problem] = fused.scheduled(problem, self._fused_rounds)
        latency_s, peak = self._schedules[problem]
        steps = self._problem.workload.epochs * self._problem.workload.minibatches
        spent_s = steps * (latency_s + sum(part.beside_s for part in parts))
        grids = [(self._setting(unit, fleet), options[unit.name].grid) for unit in pair]
        scoring = max(float(memory.scoring_bytes(*one)) for one in grids)
        working = max(peak + max(part.beside_bytes for part in parts), scoring)
        found = dict(options)
        for unit, part in zip(pair, parts, strict=True):
            option, share = options[unit.name], part.alone_s / sum(one.alone_s for one in parts)
            (index,) = self._problem.training.intersection(unit.stages)
            seconds = option.seconds[index] - part.alone_s + share * spent_s
            found[unit.name] = replace(
                option, seconds={**option.seconds, index: seconds}, working_bytes=working
            )
        return found

    def room_bytes(self, fleet: str, options: Mapping[str, Option]) -> float:
        """Return a device's remaining bytes for a KV cache beyond these units.

        Negative if memory is missing.
        """
        factors, device = self._problem.hardware.factors, self._problem.hardware.fleet(fleet).device
        free = device.memory_bytes * factors.memory - sum(one.resident_bytes for one in options.values())
        working = max((one.working_bytes for one in options.values()), default=0.0)
        if free < working or not any(one.generate_tp for one in options.values()):
            return free - working
        copies = sum(one.sampling_bytes for one in options.values())
        apart = sum(one.resident_bytes for one in options.values() if not one.seconds)
        share = self._problem.hardware.engine.cache_separate if apart else self._problem.hardware.engine.cache
        return min(free - copies, share * device.memory_bytes - copies - apart)

    def decoder(
        self, unit: Unit, option: Option, fleet: str, devices: int, room_bytes: float
    ) -> Decoder | None:
        """Return a replica of the unit with this room for its KV cache; None if no row fits."""
        key = (unit.name, option.generate_tp, fleet, devices, room_bytes)
        if key not in self._decoders:
            setting = self._setting(unit, fleet)
            self._decoders[key] = generation.decoder_of(setting, option.generate_tp, devices, room_bytes)
        return self._decoders[key]

    def generate_s(self, stage: Stage, decoder: Decoder) -> float:
        """Return the seconds until the last of the stage's rows has ended."""
        rows = self._rows(stage)
        return self._batch_s(rows, decoder, longest_of=rows, is_busiest=True)

    def worked_s(self, stage: Stage, decoder: Decoder) -> float:
        """Return the seconds until the last row of a replica has ended, averaged over replicas."""
        rows = self._rows(stage)
        return self._batch_s(rows, decoder, longest_of=math.ceil(rows / decoder.replicas))

    def _batch_s(self, rows: int, decoder: Decoder, *, longest_of: int, is_busiest: bool = False) -> float:
        """Return the seconds until a replica's rows end; the last is the longest of ``longest_of`` rows.

        The busiest replica also has more tokens than others, unless the lengths of all rows are known. Up to
        ``MOST_ROWS`` rows are drawn as in the simulator, unless generation runs ahead.
        """
        workload, count = self._problem.workload, math.ceil(rows / decoder.replicas)
        lengths = generation.replica_lengths(workload.response, count, longest_of)
        slots = generation.at_once(workload, decoder, lengths)
        batch = (rows, longest_of, is_busiest, replace(decoder, capacity_tokens=0), slots)
        if batch not in self._batches_s:
            if rows <= MOST_ROWS and not self._problem.freshness:
                spent_s = turns_s(workload, decoder, rows, slots)
                seconds = float((spent_s.max(axis=1) if longest_of == rows else spent_s).mean())
            else:
                if is_busiest and not workload.response.in_order:
                    lengths = generation.busiest_lengths(workload.response, lengths, decoder.replicas)
                seconds = generation.drain_s(workload, decoder, lengths, slots) + self._begun_s(rows, decoder)
            self._batches_s[batch] = seconds
        return self._batches_s[batch]

    def steady_s(self, stage: Stage, decoder: Decoder) -> float:
        """Return the seconds of streamed generation for a step's rows; replicas never run out of rows.

        ``rows x mean tokens / (replicas x n / tau(n))`` with n running rows of all ages. Freshness bound k
        admits at most the rows of k + 1 steps. If new weights do not interrupt rows, a replica ends its
        part of k + 1 steps' rows, drains, and then takes the weights. If all replicas drain together, k
        steps' rows drain until the last of all has ended. Where admission counts rows, they begin when
        weights arrive, so between k + 1 and k steps' rows run.
        """
        workload, rows, engine = self._problem.workload, self._rows(stage), self._problem.hardware.engine
        if not engine.interrupts:
            steps = max(self._problem.freshness, 1) if engine.drains else self._problem.freshness + 1
            drained = round(steps * rows)
            beside = drained if engine.drains else math.ceil(drained / decoder.replicas)
            spent_s = self._batch_s(drained, decoder, longest_of=beside, is_busiest=engine.drains)
            return spent_s / steps
        ahead = self._problem.freshness + (0.5 if engine.counts else 1)
        running = self._running(ahead * rows, decoder)
        decoded_s = rows * workload.response.mean / (decoder.replicas * running)
        decoded_s *= self._token_s(running, decoder)
        held_s = 0.0
        if engine.holds_prompts:
            bound = max(self._problem.freshness, 1)
            longest = workload.response.quantile(0.5 ** (1.0 / workload.samples))
            held_s = longest * self._held_token_s(bound * rows, longest, decoder) / bound
        return max(decoded_s, held_s) + self._begun_s(rows, decoder)

    def longest_s(self, stage: Stage, decoder: Decoder) -> NDArray[np.float64]:
        """Return equally likely seconds from the start of a step's rows to the end of its longest row.

        The rows of k + 1 steps hold their slots until the longest row of their step has ended. On average, a
        share mean / longest of these rows runs, and each token takes ``tau`` of this number. Without
        interrupts, the rows of k + 1 steps drain together. If all replicas drain together, only the step's
        own rows do. Where admission counts rows, it is the longest row of a prompt.
        """
        rows, engine = self._rows(stage), self._problem.hardware.engine
        longest = self._problem.workload.response.longest(rows)
        mean = float(longest.mean())
        if engine.counts:
            longest = self._problem.workload.response.longest(rows // self._problem.workload.prompts, _GROUPS)
        if not engine.interrupts:
            steps = 1 if engine.drains else self._problem.freshness + 1
            return self._batch_s(round(steps * rows), decoder, longest_of=rows) * longest / mean
        token_s = self._held_token_s((self._problem.freshness + 1) * rows, mean, decoder)
        return longest * token_s + self._begun_s(rows, decoder)

    def _held_token_s(self, rows: float, longest: float, decoder: Decoder) -> float:
        """Return the seconds of a token while ``rows`` rows hold slots until the longest row has ended."""
        running = self._running(rows * self._problem.workload.response.mean / longest, decoder)
        return self._token_s(running, decoder)

    def _running(self, rows: float, decoder: Decoder) -> int:
        """Return the number of these rows that run at the same time on a replica."""
        most = generation.running_rows(self._problem.workload, decoder)
        return max(int(min(rows / decoder.replicas, most)), 1)

    def _token_s(self, running: int, decoder: Decoder) -> float:
        """Return the seconds of a token with running rows of all ages."""
        context = running * self._problem.workload.running_tokens
        return decoder.advance_s(running, context - running / 2, 1.0)

    def _begun_s(self, rows: int, decoder: Decoder) -> float:
        """Return the seconds in which a replica admits its part of these rows and prefills their prompts."""
        read = generation.prompt_tokens(self._problem.workload, rows, decoder.replicas)
        entry_s = decoder.begin_s + math.ceil(rows / decoder.replicas) * decoder.row_begin_s
        return entry_s + decoder.prefill_s(read)

    def function_s(self, stage: Stage, devices: int) -> float:
        """Return the seconds of a function, spread over the hosts of these devices; formulas take none."""
        workload = self._problem.workload
        is_function = self._problem.work(stage) is Work.FUNCTION
        return is_function * workload.function_s * workload.rows / max(devices, 1)

    def transfer_s(self, edge: Edge, source: transfers.Seat, destination: transfers.Seat) -> float:
        """Return the seconds to send an edge's fields between two pools."""
        if not edge.fields:
            return 0.0
        links = self._slower_links(source, destination)
        spent_s = transfers.rows_s(self._problem.workload, edge.fields, source, destination, links.between)
        return links.inside_s + spent_s

    def crossing_s(self, source: transfers.Seat, sampler: transfers.Seat) -> float:
        """Return the seconds to send the policy's weights from training to a separate sampler."""
        setting = self._setting(sampler.unit, source.pool.machine_type)
        return transfers.apart_s(setting, self._slower_links(source, sampler), source, sampler)

    def _slower_links(self, *seats: transfers.Seat) -> Links:
        """Return the links of the machine type with the slower network."""
        hardware = self._problem.hardware
        fleets = [hardware.fleet(seat.pool.machine_type) for seat in seats]
        return min((Links.of(fleet, hardware.factors) for fleet in fleets), key=lambda found: found.between)

    def _rows(self, stage: Stage) -> int:
        """Return the rows a stage generates: one per prompt for greedy decoding."""
        workload = self._problem.workload
        return workload.prompts if stage.endpoint == "greedy" else workload.rows

    def _setting(self, unit: Unit, fleet: str) -> Setting:
        return Setting(problem=self._problem, shape=unit.shape, fleet=self._problem.hardware.fleet(fleet))

    def _lay_out(self, unit: Unit, fleet: str, devices: int) -> tuple[tuple[Option, ...], float]:
        """Return the options at a place, and the missing bytes of the smallest grid."""
        place = unit.name, fleet, devices
        if place in self._options:
            return self._options[place]
        found = self._ways(unit, fleet, devices)
        if not found:
            return self._options.setdefault(place, ((), math.inf))
        setting, laid = self._setting(unit, fleet), self._laid(unit, fleet, found)
        seconds, tp = sum(laid.seconds.values()), np.array(laid.generate_tp)
        row = setting.workload.longest_tokens * generation.cached_bytes(setting, np.maximum(tp, 1))
        sampling = np.where(tp > 0, laid.sampling_bytes + row, 0.0)
        beside = np.maximum(laid.working_bytes, sampling)
        room = setting.fleet.device.memory_bytes * setting.factors.memory - laid.resident_bytes - beside
        bytes_ = (laid.resident_bytes, laid.working_bytes, laid.sampling_bytes)
        judged = np.stack(np.broadcast_arrays(seconds, *bytes_), axis=1)
        fitting = [np.flatnonzero((room >= 0) & (tp == size)) for size in np.unique(tp)]
        best = [same[undominated(judged[same])] for same in fitting]  # sizes of the copy do not compete
        kept = [_picked(laid, found, index) for index in np.sort(np.concatenate(best)).tolist()]
        options = tuple(sorted(kept, key=lambda option: option.generate_tp))
        self._options[place] = options, float(max(-np.max(room, initial=-np.inf), 0.0))
        return self._options[place]

    def _ways(self, unit: Unit, fleet: str, devices: int) -> list[tuple[Grid, int]]:
        """Return every grid of these devices with every size of a generation copy."""
        layouts, shape, workload = self._problem.layouts, unit.shape, self._problem.workload
        machine = min(self._problem.hardware.fleet(fleet).per_machine, devices)
        if unit.name == SAMPLER:
            sizes = copy_sizes(shape, devices, machine, layouts)
            return [(Grid(dp=devices // tp, tp=tp), tp) for tp in sizes]
        generates = bool(self._problem.generating.intersection(unit.stages))
        trains = bool(self._problem.training.intersection(unit.stages))
        rows = workload.rows // (workload.minibatches if trains else 1)
        return [
            (grid, tp)
            for grid in grids(shape, devices, machine, layouts)
            if not layouts.equal_rows or rows % grid.dp == 0
            for tp in (copy_sizes_of(shape, grid, machine, layouts) if generates else (0,))
        ]

    def _laid(self, unit: Unit, fleet: str, found: Sequence[tuple[Grid, int]]) -> Option:
        """Return a unit on many grids at once: seconds and bytes are arrays, [grids]."""
        problem, setting = self._problem, self._setting(unit, fleet)
        laid = grids_of(*(grid for grid, _ in found))
        tp: Numbers = np.array([tp for _, tp in found])
        works = {index: problem.work(problem.graph.stages[index]) for index in unit.stages}
        kinds, weights = set(works.values()), memory.weight_bytes(setting, laid)
        kept = weights
        working = nothing = fetched = moved = 0.0 * weights
        if Work.TRAIN in kinds:
            kept, working = kept + memory.optimizer_bytes(setting, laid), memory.training_bytes(setting, laid)
            kept = kept if problem.layouts.is_own else kept + memory.gradient_bytes(setting, laid)
        if Work.SCORE in kinds:
            working = np.maximum(working, memory.scoring_bytes(setting, laid))
        copy = setting.shape.parameters * setting.item_bytes / np.maximum(tp, 1)
        sampling: Numbers = np.where(tp > 0, np.maximum(copy - weights, 0.0), 0.0)
        if unit.name == SAMPLER:
            kept, sampling = copy, nothing
        elif problem.offloads:
            fetched, moved = weights / setting.links.host, kept / setting.links.host
            working, kept = working + kept, nothing
            sampling = np.where(tp > 0, copy, 0.0)
        called = np.where(laid.devices > 1, setting.factors.call_s, 0.0)
        seconds: dict[Work, Any] = dict.fromkeys(works.values(), nothing)
        if Work.TRAIN in kinds:
            seconds[Work.TRAIN] = called + train_s(setting, laid) + moved
        if Work.SCORE in kinds:
            seconds[Work.SCORE] = called + score_s(setting, laid) + fetched
        if Work.PUBLISH in kinds and not problem.samples_apart:
            seconds[Work.PUBLISH] = moved + transfers.in_place_s(setting, laid, np.maximum(tp, 1))
        elif Work.TRAIN in kinds:
            seconds[Work.TRAIN] += moved
        return Option(
            grid=laid,
            generate_tp=tp,
            seconds={index: seconds[work] for index, work in works.items() if work is not Work.GENERATE},
            resident_bytes=kept,
            working_bytes=working,
            sampling_bytes=sampling,
        )


def _picked(laid: Any, found: Sequence[tuple[Grid, int]], place: int) -> Option:
    """Return one option from an array of options."""
    numbers = {name: float(vars(laid)[name][place]) for name in vars(laid) if name.endswith("_bytes")}
    seconds = {index: float(spent[place]) for index, spent in laid.seconds.items()}
    return Option(grid=found[place][0], generate_tp=found[place][1], seconds=seconds, **numbers)

"""Costs: what mapping and simulator ask, answered from the formulas and remembered.

unit, fleet, devices ─> options        (compute, memory, transfers in place)
option, room ─────────> decoder ─> seconds of generation
edge, seats ──────────> seconds of a transfer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import PlanError
from rillflow.graph.graph import Edge, Stage
from rillflow.planner.cost_model import memory, transfers
from rillflow.planner.cost_model.compute import Setting, score_s, train_s
from rillflow.planner.cost_model.generation import (
    Replica,
    at_once,
    drain_s,
    prompt_tokens,
    replica_lengths,
    replica_of,
    running_rows,
)
from rillflow.planner.cost_model.numbers import Grids, Numbers, grids_of
from rillflow.planner.cost_model.options import grids, sampling_sizes, undominated
from rillflow.planner.grid import Grid
from rillflow.planner.option import Decoder, Option, Seat
from rillflow.planner.plan import SAMPLER
from rillflow.planner.problem import Problem, Unit
from rillflow.planner.work import Work

FORMULA_S = 1e-6
"""Seconds of a formula for one row, on the controller."""


class CostModel:
    """The seconds and bytes of a problem's units; the same question is computed once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._options: dict[_Place, tuple[Option, ...]] = {}
        self._single: dict[tuple[str, str, int, Grid, int], Option] = {}
        self._shortfalls: dict[_Place, float] = {}
        self._settings: dict[tuple[str, str], Setting] = {}
        self._generated: dict[tuple[int, int, Decoder, int], float] = {}
        self._spreads: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._decoders: dict[tuple[str, int, str, int, float], Replica | None] = {}

    def options(self, unit: Unit, fleet: str, devices: int) -> tuple[Option, ...]:
        """Every way the unit may lie on just so many devices that no other beats in all respects."""
        place = (unit.name, fleet, devices)
        if place not in self._options:
            self._search(unit, fleet, devices)
        return self._options[place]

    def shortfall_bytes(self, unit: Unit, fleet: str, devices: int) -> float:
        """By how much the unit's smallest option is too large for its fullest device; 0 where one fits."""
        self.options(unit, fleet, devices)
        return self._shortfalls[unit.name, fleet, devices]

    def option(self, unit: Unit, fleet: str, devices: int, grid: Grid, generate_tp: int) -> Option:
        """The unit on just this grid.

        Raises:
            PlanError: the grid has another number of devices, or copies for generation do not divide it.
        """
        if grid.devices != devices:
            raise PlanError(
                f"{unit.name} has the grid {grid} on {devices} devices",
                why=f"dp x pp x tp is {grid.devices}",
                fix="make the product the pool's size",
            )
        if generate_tp and devices % generate_tp:
            raise PlanError(
                f"{unit.name} generates with tp {generate_tp} on {devices} devices",
                why=f"{devices} / {generate_tp} leaves {devices % generate_tp}",
            )
        key = (unit.name, fleet, devices, grid, generate_tp)
        if key not in self._single:
            laid = _Laid(
                self._problem, self._setting(unit, fleet), unit, grids_of(grid), np.array([generate_tp])
            )
            self._single[key] = laid.option(0)
        return self._single[key]

    def room_bytes(self, fleet: str, options: Mapping[str, Option]) -> float:
        """What a device has left for a cache with these units on it; negative by what is missing."""
        factors, device = self._problem.hardware.factors, self._problem.hardware.fleet(fleet).device
        free = device.memory_bytes * factors.memory - sum(one.resident_bytes for one in options.values())
        working = max((one.working_bytes for one in options.values()), default=0.0)
        if free < working:
            return free - working
        if not any(one.generate_tp for one in options.values()):
            return free - working
        copies = sum(one.sampling_bytes for one in options.values())
        apart = sum(one.resident_bytes for one in options.values() if not one.seconds)
        share = self._problem.hardware.engine.cache_apart if apart else self._problem.hardware.engine.cache
        return min(free - copies, share * device.memory_bytes - copies - apart)

    def decoder(
        self, unit: Unit, option: Option, fleet: str, devices: int, room_bytes: float
    ) -> Decoder | None:
        """A replica of the unit with that room for its cache; none where not one row fits."""
        key = (unit.name, option.generate_tp, fleet, devices, room_bytes)
        if key not in self._decoders:
            setting = self._setting(unit, fleet)
            self._decoders[key] = replica_of(setting, option.generate_tp, devices, room_bytes)
        return self._decoders[key]

    def generate_s(self, stage: Stage, decoder: Decoder) -> float:
        """Seconds until the last of the stage's rows has ended."""
        return self._batch_s(self._rows(stage), decoder)

    def worked_s(self, stage: Stage, decoder: Decoder) -> float:
        """Seconds until the last of a replica's part of the rows has ended, on average over replicas."""
        rows = self._rows(stage)
        return self._batch_s(rows, decoder, longest_of=math.ceil(rows / decoder.replicas))

    def _batch_s(self, rows: int, decoder: Decoder, longest_of: int = 0) -> float:
        """Seconds until the last of so many rows has ended, or of a replica with the longest of fewer."""
        workload, place = self._problem.workload, (math.ceil(rows / decoder.replicas), longest_of or rows)
        if place not in self._spreads:
            self._spreads[place] = replica_lengths(workload, *place)
        lengths = self._spreads[place]
        slots = at_once(workload, decoder, lengths)
        alike = replace(decoder, capacity_tokens=0) if isinstance(decoder, Replica) else decoder
        key = (rows, longest_of, alike, slots)
        if key not in self._generated:
            read = prompt_tokens(workload, rows, decoder.replicas)
            drained = drain_s(workload, decoder, lengths, slots)
            self._generated[key] = decoder.entry_s(len(lengths)) + decoder.prefill_s(read) + drained
        return self._generated[key]

    def steady_s(self, stage: Stage, decoder: Decoder) -> float:
        """Seconds of replicas that never run dry for as many rows: streamed generation.

        ``rows x mean tokens / (replicas x n / tau(n))``: n running rows of all ages, at most those that the
        freshness bound k admits, (k + 1) steps' rows. Where new weights do not interrupt rows, a replica ends
        what it has before it takes them, which it does every k steps: it then runs k steps' rows dry.
        """
        workload, rows, engine = self._problem.workload, self._rows(stage), self._problem.hardware.engine
        if not engine.interrupts:
            bound = max(self._problem.freshness, 1)
            return self._batch_s(bound * rows, decoder) / bound
        running = self._running((self._problem.freshness + 1) * rows, decoder)
        decoded_s = rows * workload.response.mean / (decoder.replicas * running)
        decoded_s *= self._token_s(running, decoder)
        held_s = 0.0
        if engine.holds_prompts:
            bound = max(self._problem.freshness, 1)
            longest = workload.response.quantile(0.5 ** (1.0 / workload.samples))
            held_s = longest * self._held_token_s(bound * rows, longest, decoder) / bound
        return max(decoded_s, held_s) + self._begun_s(rows, decoder) + self._reread_s(running, decoder)

    def longest_s(self, stage: Stage, decoder: Decoder) -> NDArray[np.float64]:
        """Seconds from the beginning of a step's rows until the longest has ended, ahead, by equal chances.

        (k + 1) steps' rows hold their places until the longest of their step has ended: on average mean over
        longest of them run, and each token takes ``tau`` of so many. Where weights do not interrupt rows, as
        long as by itself.
        """
        rows = self._rows(stage)
        longest = self._problem.workload.response.longest(rows)
        mean = float(longest.mean())
        if not self._problem.hardware.engine.interrupts:
            return self.generate_s(stage, decoder) * longest / mean
        token_s = self._held_token_s((self._problem.freshness + 1) * rows, mean, decoder)
        return longest * token_s + self._begun_s(rows, decoder)

    def _held_token_s(self, rows: int, longest: float, decoder: Decoder) -> float:
        """Seconds of a token while so many rows hold places, each until the longest beside it has ended."""
        running = self._running(rows * self._problem.workload.response.mean / longest, decoder)
        return self._token_s(running, decoder)

    def _running(self, rows: float, decoder: Decoder) -> int:
        """Of so many rows, those that run at once on a replica."""
        return max(int(min(rows / decoder.replicas, running_rows(self._problem.workload, decoder))), 1)

    def _token_s(self, running: int, decoder: Decoder) -> float:
        """Seconds of a token of running rows of all ages."""
        return decoder.advance_s(running, running * self._context() - running / 2, 1.0)

    def _reread_s(self, running: int, decoder: Decoder) -> float:
        """Seconds in which running rows of all ages read their prefixes under new weights."""
        return decoder.prefill_s(running * self._context()) if self._problem.hardware.engine.rereads else 0.0

    def _context(self) -> float:
        """Tokens of a running row, met at random."""
        response = self._problem.workload.response
        return self._problem.workload.prompt.mean + response.mean_square / (2 * response.mean)

    def _begun_s(self, rows: int, decoder: Decoder) -> float:
        """Seconds in which a replica lets its part of so many rows begin, and reads their prompts."""
        read = prompt_tokens(self._problem.workload, rows, decoder.replicas)
        return decoder.entry_s(rows / decoder.replicas) + decoder.prefill_s(read)

    def function_s(self, stage: Stage, devices: int) -> float:
        """Seconds of a function, spread over the hosts of so many devices, or of a formula on one."""
        workload = self._problem.workload
        if self._problem.work(stage) is Work.FORMULA:
            return FORMULA_S * workload.rows
        return workload.function_s * workload.rows / max(devices, 1)

    def transfer_s(self, edge: Edge, source: Seat, destination: Seat) -> float:
        """Seconds of an edge's fields between pools; 0 within one."""
        if source.pool == destination.pool or not edge.fields:
            return 0.0
        rate = min(self._between(source.fleet), self._between(destination.fleet))
        latency = self._problem.hardware.factors.collective_s
        return latency + transfers.rows_s(self._problem.workload, edge.fields, source, destination, rate)

    def crossing_s(self, source: Seat, destination: Seat, generate_tp: int) -> float:
        """Seconds of the policy's weights from its training to a sampler apart."""
        unit = next(one for one in self._problem.units if one.name == SAMPLER)
        links = min(
            (self._setting(unit, fleet).links for fleet in (source.fleet, destination.fleet)),
            key=lambda found: found.between,
        )
        return transfers.apart_s(
            self._setting(unit, source.fleet), links, source, destination, max(generate_tp, 1)
        )

    def _between(self, fleet: str) -> float:
        hardware = self._problem.hardware
        return hardware.fleet(fleet).between_bandwidth * hardware.factors.between_links

    def _rows(self, stage: Stage) -> int:
        """Rows a stage generates: one a prompt where it takes the likeliest token."""
        workload = self._problem.workload
        return workload.prompts if stage.endpoint == "greedy" else workload.rows

    def _setting(self, unit: Unit, fleet: str) -> Setting:
        key = (unit.name, fleet)
        if key not in self._settings:
            self._settings[key] = Setting(
                shape=unit.shape,
                workload=self._problem.workload,
                fleet=self._problem.hardware.fleet(fleet),
                factors=self._problem.hardware.factors,
                recomputes=self._problem.recomputes,
                zero1=self._problem.hardware.engine.zero1,
            )
        return self._settings[key]

    def _search(self, unit: Unit, fleet: str, devices: int) -> None:
        """Fill in the options and the shortfalls of a place, and those of all sizes of the fleet at once."""
        known = self._problem.hardware.fleet(fleet).sizes
        sizes = (
            known if devices in known and (unit.name, fleet, known[0]) not in self._options else (devices,)
        )
        laid = _all_laid(self._problem, self._setting(unit, fleet), unit, sizes)
        taken, room, judged = laid.devices, laid.alone_room(), laid.costs()
        for size in sizes:
            place, own = (unit.name, fleet, size), np.flatnonzero(taken == size)
            fitting = own[room[own] >= 0]
            self._shortfalls[place] = float(max(-np.max(room[own], initial=-np.inf), 0.0))
            kept: list[int] = []
            for copies in sorted({*laid.generate_tp[fitting].tolist()}):
                alike = fitting[laid.generate_tp[fitting] == copies]
                kept.extend(alike[undominated(judged[alike])].tolist())
            self._options[place] = tuple(laid.option(index) for index in kept)
            for option in self._options[place]:
                self._single[*place, option.grid, option.generate_tp] = option


_Place = tuple[str, str, int]


class _Laid:
    """A unit on many grids at once: seconds of every stage and bytes, [grids]."""

    def __init__(
        self, problem: Problem, setting: Setting, unit: Unit, laid: Grids, generate_tp: Numbers
    ) -> None:
        self._setting = setting
        self._grids = laid
        self.generate_tp = np.asarray(generate_tp)
        works = {index: problem.work(problem.graph.stages[index]) for index in unit.stages}
        kinds = set(works.values())
        is_apart = unit.name == SAMPLER
        weights = np.asarray(memory.weight_bytes(setting, laid))
        state = memory.optimizer_bytes(setting, laid) if Work.TRAIN in kinds else np.zeros(len(laid))
        kept = weights + state
        working = np.zeros(len(laid))
        if Work.TRAIN in kinds:
            working = np.maximum(working, memory.training_bytes(setting, laid))
        if Work.SCORE in kinds:
            working = np.maximum(working, memory.scoring_bytes(setting, laid))
        copy = setting.shape.parameters * setting.item_bytes / np.maximum(self.generate_tp, 1)
        sampling = np.where(self.generate_tp > 0, np.maximum(copy - weights, 0.0), 0.0)
        fetched = moved = np.zeros(len(laid))
        if is_apart:
            kept, sampling = copy, np.zeros(len(laid))
        elif problem.offloads:
            fetched, moved = weights / setting.links.host, kept / setting.links.host
            working, kept = working + kept, np.zeros(len(laid))
            sampling = np.where(self.generate_tp > 0, copy, 0.0)
        self.resident, self.working, self.sampling = kept, working, sampling
        self.seconds = {
            index: np.broadcast_to(
                self._seconds(work, problem, fetched if work is Work.SCORE else moved), len(laid)
            )
            for index, work in works.items()
            if work is not Work.GENERATE
        }

    def _seconds(self, work: Work, problem: Problem, moved: Numbers) -> Numbers:
        called: Numbers = np.where(self._grids.devices > 1, self._setting.factors.call_s, 0.0)
        if work is Work.TRAIN:
            return called + train_s(self._setting, self._grids) + 2 * np.asarray(moved)
        if work is Work.SCORE:
            return called + score_s(self._setting, self._grids) + np.asarray(moved)
        if work is Work.PUBLISH and not problem.samples_apart:
            return transfers.in_place_s(self._setting, self._grids, np.maximum(self.generate_tp, 1))
        return np.zeros(len(self._grids))

    @property
    def devices(self) -> np.ndarray:
        """Devices of each, [grids]."""
        return self._grids.devices

    def costs(self) -> np.ndarray:
        """All that an option is judged by, [grids, costs]."""
        return np.stack([*self.seconds.values(), self.resident, self.working, self.sampling], axis=1)

    def alone_room(self) -> np.ndarray:
        """Bytes of a device that are left with nothing else on it but a row it generates, [grids]."""
        setting = self._setting
        device = setting.fleet.device.memory_bytes * setting.factors.memory
        shape, tp = setting.shape, np.maximum(self.generate_tp, 1)
        ways = 1 if shape.latent else np.minimum(tp, shape.kv_heads)
        row = setting.workload.longest_tokens * shape.cached_numbers * setting.item_bytes / ways
        sampling = np.where(self.generate_tp > 0, self.sampling + row, 0.0)
        return device - self.resident - np.maximum(self.working, sampling)

    def option(self, place: int) -> Option:
        """One of them."""
        return Option(
            grid=self._grids[place],
            generate_tp=int(self.generate_tp[place]),
            seconds={index: float(found[place]) for index, found in self.seconds.items()},
            resident_bytes=float(self.resident[place]),
            working_bytes=float(self.working[place]),
            sampling_bytes=float(self.sampling[place]),
        )


def _all_laid(problem: Problem, setting: Setting, unit: Unit, sizes: Sequence[int]) -> _Laid:
    """The unit on every grid of so many devices, and every size of its sampling copies; perhaps on none."""
    generates = any(problem.work(problem.graph.stages[index]) is Work.GENERATE for index in unit.stages)
    found: list[tuple[Grid, int]] = []
    for devices in sizes:
        if unit.name == SAMPLER:
            found += [(Grid(dp=devices // tp, tp=tp), tp) for tp in sampling_sizes(unit.shape, devices)]
            continue
        for grid in grids(unit.shape, devices, min(setting.fleet.per_machine, devices)):
            found += [(grid, tp) for tp in (_in_place_sizes(grid) if generates else [0])]
    laid = grids_of(*(grid for grid, _ in found))
    return _Laid(problem, setting, unit, laid, np.array([tp for _, tp in found], dtype=np.int64))


def _in_place_sizes(grid: Grid) -> list[int]:
    """Copies for generation on the training devices: what each rank trains lies in what it generates with."""
    return [size for size in range(1, grid.tp + 1) if grid.tp % size == 0]

"""NativeEngine: prompts in, rollouts out, on the trainer's own module.

    prompts ─ dealt out in turn ─┬─> Lane 0: its own thread, its share of slots and cores ─┐
                                 └─> Lane 1: ...                                          ─┴─> rollouts

On a CPU, two threads inside every small operation wait for each other hundreds of times a pass; two
lanes meet once, at the end. A row stays in its lane, and which one that is follows from its place in
the batch alone, never from which lane was free: a run that is repeated gives the same bits.

Loop of a lane (``_drain``, in a thread of its own)
    consumes      the rows that entered it
    waits for     nothing: lanes share the module's weights, which nobody writes meanwhile, and no more
    produces      its rollouts
    shuts down    healthy: its rows ended. A lane that fails, or Ctrl-C, ends the others between two
                  steps; all of them are empty afterwards
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from itertools import chain
from math import inf
from threading import Event
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from rillflow.cluster.ranks import Ranks, SingleRank
from rillflow.errors import RolloutError
from rillflow.models.routing import Routers
from rillflow.records.batch import Batch, concatenate
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Rollout, rollout_batch, starts
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Capability
from rillflow.rollout.native.lane import Lane
from rillflow.rollout.native.runner import evaluating
from rillflow.rollout.native.scheduler import check_ids
from rillflow.rollout.stops import Stops

LANE_ROWS = 32
"""Slots of a lane at least: with fewer to a pass, reading the weights in every lane costs what it saves."""

_T = TypeVar("_T")


class NativeEngine:
    """Continuous batching around an unmodified transformers module.

    Example:
        config = RolloutConfig(max_tokens=8)
        engine = NativeEngine(module, config, stop_tokens=frozenset({0}), seed=1, context=64)
        rollouts = engine.generate(prompts, samples=4)

    Args:
        module: a transformers causal language model built with Rillflow's attention; over several ranks,
            this rank's part of one (see models.sampling_shard).
        config: how tokens are drawn, and how many rows run at once, in all lanes together.
        stop_tokens: token ids that end a row.
        seed: of the run.
        context: tokens of a row at most, prompt included.
        replay_after: passes of a kind before the module is recorded (see recording); infinity for never.
        lanes: how many; None for one per thread of torch's, each with at least ``LANE_ROWS`` slots. In
            deterministic mode, whose shapes are those of all slots, over several ranks, and elsewhere than on
            a CPU: one.
        tp: the ranks that hold the other parts of the module, one replica together; None for a whole module.
            All are given the same calls with the same rows, and return the same.
        stops: texts that end a row, of which those of several tokens are looked for.

    Raises:
        RolloutError: a stop token is outside the vocabulary, or there are several lanes over several ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        config: RolloutConfig,
        *,
        stop_tokens: frozenset[int],
        seed: int,
        context: int,
        replay_after: float = 64,
        lanes: int | None = None,
        tp: Ranks | None = None,
        stops: Stops | None = None,
    ) -> None:
        tp = tp or SingleRank()
        weight: Tensor = module.get_input_embeddings().weight  # type: ignore[operator]
        if lanes is None:
            alone = config.deterministic or weight.device.type != "cpu" or tp.size > 1
            lanes = 1 if alone else max(1, min(torch.get_num_threads(), config.max_rows // LANE_ROWS))
        if tp.size > 1:
            replay_after = inf  # a recording would not wait for what other ranks send
            if lanes > 1:
                raise RolloutError(
                    f"the engine has {lanes} lanes over {tp.size} tensor-parallel ranks",
                    why="collectives have one order, and the passes of two threads would meet in them",
                    fix="leave lanes at None",
                )
        room = None if config.cache_gib is None else config.cache_gib / lanes
        share = config.model_copy(update={"max_rows": -(-config.max_rows // lanes), "cache_gib": room})
        self._module, self._records, self._routers = module, bool(config.replay_routing), Routers(module)
        self._lanes = [
            Lane(
                module,
                share,
                stop_tokens=stop_tokens,
                seed=seed,
                context=context,
                replay_after=replay_after,
                tp=tp,
                stops=stops if stops is not None and stops.longest else None,
                routers=self._routers,
            )
            for _ in range(lanes)
        ]
        self._threads = _threads(self, lanes) if lanes > 1 else None

    can: ClassVar = frozenset(Capability) - {Capability.SCORE}  # the weights are the trainer's

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """See Engine; the weights are those of the module already."""
        del weights
        for lane in self._lanes:
            lane.version = version

    def score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Engine; the trainer asks its module."""
        raise NotImplementedError

    def sleep(self) -> None:
        """See Engine; keys and values went with the last row."""

    def wake(self) -> None:
        """See Engine."""

    @property
    def has_work(self) -> bool:
        """Whether a row waits or runs."""
        return any(lane.has_work for lane in self._lanes)

    @property
    def held_bytes(self) -> int:
        """See Engine."""
        return sum(lane.held_bytes for lane in self._lanes)

    @property
    def peak_bytes(self) -> int:
        """The most that each lane held at once, with what was there twice while it was laid anew."""
        return sum(lane.peak_bytes for lane in self._lanes)

    def generate(
        self,
        prompts: Batch,
        samples: int = 1,
        sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    ) -> Batch:
        """Continue every prompt ``samples`` times.

        Args:
            prompts: ids [B, 3] (epoch, prompt, 0), ragged ``tokens``, ragged text ``columns``.
            samples: rows of each prompt.
            sampling: how tokens are drawn, for all rows or one for each prompt; None for the engine's own
                configuration.

        Returns:
            B x samples rows as ``rollout_batch`` makes them, ordered by prompt, then sample.

        Raises:
            RolloutError: a prompt cannot be continued, ids are not unique, rows of ``add`` are still in
                the engine, or the model's logits are not finite.
        """
        (rollouts,) = self.generate_parts([prompts], samples, sampling)
        return rollouts

    def generate_parts(
        self,
        parts: Sequence[Batch],
        samples: int = 1,
        sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    ) -> Iterator[Batch]:
        """As ``generate`` of all prompts at once; the rows of each part as soon as all of them have ended.

        The rows of later parts run on between two parts; a row's tokens are those of ``generate``.
        """
        if self.has_work:
            raise RolloutError(
                "the engine still has rows that were added one by one",
                why="generate runs until it is empty, and would have to drop them",
                fix="step until has_work is False, or abort them",
            )
        if samples < 1:
            raise RolloutError(f"samples is {samples}", why="a prompt is continued at least once")
        prompts = concatenate(parts)
        check_ids(prompts.row_ids())
        chosen = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(chosen) != len(prompts):
            raise RolloutError(
                f"there are {len(chosen)} sampling settings for {len(prompts)} prompts",
                why="each prompt is drawn by its own settings, or all by one",
                fix="give one SamplingConfig, or as many as prompts",
            )
        used = self._lanes[: max(1, min(len(self._lanes), len(prompts)))]
        try:
            begun = starts(prompts, samples)
            groups = [begun[first : first + samples] for first in range(0, len(begun), samples)]
            for place, group in enumerate(groups):
                for rollout in group:
                    used[place % len(used)].add(rollout, chosen[place])
            finished, begin = dict[RowId, Rollout](), 0
            for part in parts:
                stop, end, work = Event(), begin + len(part), []
                for index, lane in enumerate(used):
                    first = begin + (index - begin) % len(used)
                    wanted = {each.row for group in groups[first : end : len(used)] for each in group}
                    work.append(partial(_drain, lane, stop, wanted - finished.keys()))
                finished |= {each.row: each for each in chain.from_iterable(self._together(work, stop))}
                yield self._batch([finished.pop(each.row) for group in groups[begin:end] for each in group])
                begin = end
        finally:
            self._clear()

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """Let a row run: a prompt, or a row that was taken out, which goes on where it stopped.

        Args:
            rollout: finish is ABORTED; its tokens are kept.
            sampling: how its tokens are drawn; None for the engine's own configuration.

        Raises:
            RolloutError: the row has ended, cannot be continued, or is in the engine already.
        """
        self._lane_of(rollout.row).add(rollout, sampling)

    def abort(self, row: RowId) -> Rollout:
        """Take a waiting or running row out, its tokens kept; ``add`` lets it go on.

        Raises:
            RolloutError: the row is not in the engine.
        """
        return self._lane_of(row).abort(row)

    def look(self, row: RowId) -> Rollout:
        """See Engine."""
        return self._lane_of(row).look(row)

    def step(self) -> list[Rollout]:
        """Draw one token of every running row; return the rows that ended.

        Raises:
            ModelError: the module is not one the engine can drive (found out at the first step).
            RolloutError: the logits of a row are not finite; the engine is empty afterwards.
        """
        try:
            return list(chain.from_iterable(self._together([lane.step for lane in self._lanes], Event())))
        except BaseException:
            self._clear()
            raise

    def _batch(self, rollouts: list[Rollout]) -> Batch:
        """The rows, of which none has routes like any other."""
        made = rollout_batch(rollouts)
        if rollouts or not self._records:
            return made
        return made.with_fields(
            routes=Ragged(values=torch.zeros(0, dtype=torch.int16), lengths=made.ids[:, 0])
        )

    def _lane_of(self, row: RowId) -> Lane:
        """Samples of one prompt share a lane, and with it the prompt's keys and values."""
        return self._lanes[row.prompt % len(self._lanes)]

    def _clear(self) -> None:
        for lane in self._lanes:
            lane.clear()

    def _together(self, work: Sequence[Callable[[], _T]], stop: Event) -> list[_T]:
        """The results of all; the first failure asks the others to stop, and is raised when they have."""
        watched = self._routers.watched() if self._records else nullcontext()
        with evaluating(self._module), watched:
            if self._threads is None or len(work) == 1:
                return [each() for each in work]
            running: list[Future[_T]] = [self._threads.submit(each) for each in work]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:  # Ctrl-C arrives here too
                if not all(each.done() for each in running) or any(each.exception() for each in running):
                    stop.set()
                wait(running)
        return [each.result() for each in running]


def _drain(lane: Lane, stop: Event, wanted: set[RowId]) -> list[Rollout]:
    """Step until the wanted rows of a lane have ended; what has ended by then when asked to stop."""
    ended: list[Rollout] = []
    while wanted and not stop.is_set():
        now = lane.step()
        wanted.difference_update(each.row for each in now)
        ended += now
    return ended


def _threads(engine: NativeEngine, lanes: int) -> ThreadPoolExecutor:
    """A thread for each lane with its share of torch's threads; they end with the engine."""
    cores = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        lanes,
        thread_name_prefix="rillflow-lane",
        initializer=partial(torch.set_num_threads, max(1, cores // lanes)),
    )
    weakref.finalize(engine, pool.shutdown, wait=False)
    return pool

"""NativeEngine: prompts in, rollouts out, on the trainer's own module.

    prompts ─ dealt out in turn ─┬─> BatchWorker 0: its thread, its share of slots and cores ─┐
                                 └─> BatchWorker 1: ...                                      ─┴─> rollouts

On a CPU, two threads inside every small operation synchronise hundreds of times a pass; two workers
synchronise once, at the end. A row stays in its worker. The worker depends only on the prompt's index in the
batch, never on timing, so a repeated run gives the same bits.

Loop of a worker (``_drain``, in a thread of its own)
    consumes      the rows added to the worker
    waits for     nothing: workers share only the module's weights, which nothing writes during generation
    produces      its rollouts
    shuts down    healthy: its rows ended. If a worker fails, or on Ctrl-C, the others stop between two
                  steps; then all workers are emptied
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from itertools import chain
from math import inf
from threading import Event
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from rillflow.errors import RolloutError
from rillflow.models.routing import Routers
from rillflow.records.batch import Batch, concatenate
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Rollout, rollout_batch, starts
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Capability, Stops
from rillflow.rollout.native.batch_worker import BatchWorker
from rillflow.rollout.native.runner import evaluating
from rillflow.rollout.native.scheduler import check_ids
from rillflow.workers.collectives import Ranks, SingleRank

if TYPE_CHECKING:
    from rillflow.models.language_model import LanguageModel

WORKER_ROWS = 32
"""Minimum slots of a worker: with fewer, reading the weights in every worker costs more than workers save."""

_T = TypeVar("_T")


class NativeEngine:
    """Continuous batching around an unmodified transformers module.

    Example:
        config = RolloutConfig(max_tokens=8)
        engine = NativeEngine(module, config, stop_tokens=frozenset({0}), seed=1, context=64)
        rollouts = engine.generate(prompts, samples=4)

    Args:
        module: a transformers causal language model built with Rillflow's attention; over several ranks, this
            rank's shard of one (see models.sampling_shard).
        config: settings of sampling and of the engine; ``max_rows`` counts the rows of all workers together.
        stop_tokens: token ids that end a row.
        seed: the run's seed.
        context: maximum tokens of a row, prompt included.
        record_after: passes of the same kind before the module is recorded (see runner); infinity for
            never.
        workers: number of batch workers; None for one per torch thread, each with at least ``WORKER_ROWS``
            slots. None means one worker in deterministic mode, where shapes cover all slots, over several
            ranks, and on devices other than CPUs.
        tp: the ranks that together hold one replica of the module; None for a whole module. All of them
            receive the same calls with the same rows, and return the same.
        stops: texts that end a row; the engine searches for those that are not a single token.

    Raises:
        RolloutError: a stop token is outside the vocabulary, or there are several workers over several ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        config: RolloutConfig,
        *,
        stop_tokens: frozenset[int],
        seed: int,
        context: int,
        record_after: float = 64,
        workers: int | None = None,
        tp: Ranks | None = None,
        stops: Stops | None = None,
    ) -> None:
        tp = tp or SingleRank()
        weight: Tensor = module.get_input_embeddings().weight  # type: ignore[operator]
        if workers is None:
            alone = config.deterministic or weight.device.type != "cpu" or tp.size > 1
            workers = 1 if alone else max(1, min(torch.get_num_threads(), config.max_rows // WORKER_ROWS))
        if tp.size > 1:
            record_after = inf  # a recording would not wait for the data of other ranks
            if workers > 1:
                raise RolloutError(
                    f"the engine has {workers} workers and {tp.size} tensor-parallel ranks",
                    why="collectives need one order on all ranks, and two threads would mix theirs",
                    fix="leave workers at None",
                )
        room = None if config.cache_gib is None else config.cache_gib / workers
        share = config.model_copy(update={"max_rows": -(-config.max_rows // workers), "cache_gib": room})
        self._module, self._records, self._routers = module, config.replay_routing, Routers(module)
        self._workers = [
            BatchWorker(
                module,
                share,
                stop_tokens=stop_tokens,
                seed=seed,
                context=context,
                record_after=record_after,
                tp=tp,
                stops=stops if stops is not None and stops.longest else None,
                routers=self._routers,
            )
            for _ in range(workers)
        ]
        self._threads = _threads(self, workers) if workers > 1 else None

    can: ClassVar = frozenset(Capability) - {Capability.SCORE}  # it samples with the trainer's own weights

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """See Engine; the module already has the weights."""
        del weights
        for worker in self._workers:
            worker.version = version

    def score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Engine; the trainer uses its own module instead."""
        raise NotImplementedError

    def sleep(self) -> None:
        """See Engine; keys and values were freed with the last row."""

    def wake(self) -> None:
        """See Engine."""

    @property
    def has_work(self) -> bool:
        """Whether a row waits or runs."""
        return any(worker.has_work for worker in self._workers)

    @property
    def held_bytes(self) -> int:
        """See Engine."""
        return sum(worker.held_bytes for worker in self._workers)

    @property
    def peak_bytes(self) -> int:
        """Sum of the workers' peak bytes, including both copies of a layer during reallocation."""
        return sum(worker.peak_bytes for worker in self._workers)

    def generate(
        self,
        prompts: Batch,
        samples: int = 1,
        sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    ) -> Batch:
        """Continue every prompt ``samples`` times.

        Args:
            prompts: ids [B, 3] (epoch, prompt, 0), ragged ``tokens``, ragged text ``columns``.
            samples: rows per prompt.
            sampling: settings of sampling, for all rows or one per prompt; None for the engine's own
                configuration.

        Returns: B x samples rows in the format of ``rollout_batch``, ordered by prompt, then sample.

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
        """Generate like ``generate`` for all prompts together; yield the rows of a part once all have ended.

        Rows of later parts continue between two parts; a row's tokens are those of ``generate``.
        """
        if self.has_work:
            raise RolloutError(
                "the engine still runs rows from add",
                why="generate runs until the engine is empty, and would discard their results",
                fix="call step until has_work is False, or abort the rows",
            )
        if samples < 1:
            raise RolloutError(f"samples is {samples}", why="each prompt needs at least one sample")
        prompts = concatenate(parts)
        check_ids(prompts.row_ids())
        chosen = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(chosen) != len(prompts):
            raise RolloutError(
                f"there are {len(chosen)} sampling settings for {len(prompts)} prompts",
                why="all prompts use one setting, or each prompt has its own",
                fix="give one SamplingConfig, or one per prompt",
            )
        used = self._workers[: max(1, min(len(self._workers), len(prompts)))]
        try:
            begun = starts(prompts, samples)
            groups = [begun[first : first + samples] for first in range(0, len(begun), samples)]
            for index, group in enumerate(groups):
                for rollout in group:
                    used[index % len(used)].add(rollout, chosen[index])
            finished, begin = dict[RowId, Rollout](), 0
            for part in parts:
                stop, end, work = Event(), begin + len(part), []
                for index, worker in enumerate(used):
                    first = begin + (index - begin) % len(used)
                    wanted = {each.row for group in groups[first : end : len(used)] for each in group}
                    work.append(partial(_drain, worker, stop, wanted - finished.keys()))
                finished |= {each.row: each for each in chain.from_iterable(self._together(work, stop))}
                yield self._batch([finished.pop(each.row) for group in groups[begin:end] for each in group])
                begin = end
        finally:
            self._clear()

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """Add a row: a prompt, or an aborted row, which continues where it stopped.

        Args:
            rollout: a row with finish ABORTED; its tokens are kept.
            sampling: settings of sampling; None for the engine's own configuration.

        Raises:
            RolloutError: the row has ended, cannot be continued, or is in the engine already.
        """
        self._worker_of(rollout.row).add(rollout, sampling)

    def abort(self, row: RowId) -> Rollout:
        """Remove a waiting or running row and return it with its tokens; ``add`` continues it.

        Raises:
            RolloutError: the row is not in the engine.
        """
        return self._worker_of(row).abort(row)

    def detach(self, row: RowId) -> Rollout:
        """See Engine."""
        return self._worker_of(row).detach(row)

    def look(self, row: RowId) -> Rollout:
        """See Engine."""
        return self._worker_of(row).look(row)

    def step(self) -> list[Rollout]:
        """Draw one token for every running row; return the rows that ended.

        Raises:
            ModelError: the engine does not support the module (tested at the first step).
            RolloutError: the logits of a row are not finite; the engine is empty afterwards.
        """
        try:
            return list(
                chain.from_iterable(self._together([worker.step for worker in self._workers], Event()))
            )
        except BaseException:
            self._clear()
            raise

    def _batch(self, rollouts: list[Rollout]) -> Batch:
        """Return the rows as a batch; without rows, add the ``routes`` field that other batches have."""
        made = rollout_batch(rollouts)
        if rollouts or not self._records:
            return made
        return made.with_fields(
            routes=Ragged(values=torch.zeros(0, dtype=torch.int16), lengths=made.ids[:, 0])
        )

    def _worker_of(self, row: RowId) -> BatchWorker:
        """Return the row's worker; samples of a prompt share one, and so the prompt's keys and values."""
        return self._workers[row.prompt % len(self._workers)]

    def _clear(self) -> None:
        for worker in self._workers:
            worker.clear()

    def _together(self, work: Sequence[Callable[[], _T]], stop: Event) -> list[_T]:
        """Return all results; after a failure, stop and await the other workers, then raise the error."""
        watched = self._routers.watched() if self._records else nullcontext()
        with evaluating(self._module), watched:
            if self._threads is None or len(work) == 1:
                return [each() for each in work]
            running: list[Future[_T]] = [self._threads.submit(each) for each in work]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:  # on Ctrl-C too
                if not all(each.done() for each in running) or any(each.exception() for each in running):
                    stop.set()
                wait(running)
        return [each.result() for each in running]


def _drain(worker: BatchWorker, stop: Event, wanted: set[RowId]) -> list[Rollout]:
    """Step until the wanted rows of a worker have ended or ``stop`` is set; return the ended rows."""
    ended: list[Rollout] = []
    while wanted and not stop.is_set():
        now = worker.step()
        wanted.difference_update(each.row for each in now)
        ended += now
    return ended


def _threads(engine: NativeEngine, workers: int) -> ThreadPoolExecutor:
    """Return one thread per worker, each with its share of torch's threads; they end with the engine."""
    cores = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        workers,
        thread_name_prefix="rillflow-worker",
        initializer=partial(torch.set_num_threads, max(1, cores // workers)),
    )
    weakref.finalize(engine, pool.shutdown, wait=False)
    return pool


def native_engine(model: LanguageModel, rollout: RolloutConfig, seed: int | None = None) -> NativeEngine:
    """Return an engine that samples from a loaded model in this process; ``None`` draws a random seed."""
    stops = Stops(rollout.stop, model.tokenizer)
    return NativeEngine(
        model.module,
        rollout,
        stop_tokens=stops.tokens,
        stops=stops,
        seed=secrets.randbelow(2**31) if seed is None else seed,
        context=model.context,
    )

"""BatchWorker: continuous batching of rows over the trainer's own module, in one thread.

    add ────────────┐                      ┌──────────── step ────────────┐
                    ├─> Scheduler ─ Step ──> Runner ─ logits ─> draw ─┐   │
    abort <─────────┘        ^             │                          v   │
                             └── rows that ended ── postprocess <── Slots │
    finished rollouts <────────────────────┴──────────────────────────────┘

A token depends only on its row's tokens and on uniform(seed, row id, position), not on the order of rows. The
rounding of matrix products depends on the other rows, so equal bits are guaranteed only in deterministic
mode, where every shape is fixed.

The ranks of a tensor-parallel group step together. The schedule depends only on the added rows and the drawn
tokens, never on time, so all ranks compute the same one without communication. ``RankConsistency`` detects
ranks that diverge:

    step s     rank 0   notes of new rows and drawn tokens ─ digest ─┐
               rank 1   notes ...                          ─ digest ─┴─ all equal? ─> the pass of step s
                                                                          └ no ─> notes compared, row named

The weights are the module's own and may change between calls; everything computed from them is freed with the
last row. When ``version`` changes while rows run, their tokens are prefilled again with the new weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Rows
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor, nn

from rillflow.errors import RolloutError
from rillflow.models.architecture import vocabulary_of
from rillflow.models.routing import Routers
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Stops, check_stop, check_stop_tokens, check_tokens, limit_of, not_finite
from rillflow.rollout.native.cache import Cache, LayerShape
from rillflow.rollout.native.cache_layout import ALIGNMENT, CacheLayout
from rillflow.rollout.native.compatibility import check_compatible, check_fixed_shapes
from rillflow.rollout.native.passes import ROUTES, read_routes, route_shape
from rillflow.rollout.native.runner import BLOCK, CACHE_BLOCK, RecordedModule, Runner, evaluating
from rillflow.rollout.native.sampling import Drawn, DrawSettings, Seen, draw
from rillflow.rollout.native.scheduler import Scheduler, Sequence, Step
from rillflow.rollout.native.slots import BULK, Slots
from rillflow.runs.formatting import size
from rillflow.workers.collectives import Ranks

LEAST_KEPT = 8
"""Minimum tokens of an ended row whose cache is kept."""
FED_TOKENS = 16
"""Maximum tokens behind a row's cache that are fed one by one; more are read in one pass."""
_IDLE = SamplingConfig()
"""Sampling settings of a slot without a row."""


class BatchWorker:
    """Rows that run together; a step draws one token per row.

    Args:
        module: a transformers causal language model built with Rillflow's attention, or a rank's shard of
            one.
        config: settings of sampling and of the engine.
        tp: the ranks that together hold the module; a single rank holds all of it.
        stop_tokens: token ids that end a row.
        seed: the run's seed.
        context: maximum tokens of a row, prompt included.
        record_after: passes of the same kind before the module is recorded (see runner); infinity for
            never.
        routers: the module's routers; NativeEngine watches them during a step if routing is recorded.

    Raises:
        RolloutError: a stop token is outside the vocabulary.
    """

    def __init__(
        self,
        module: nn.Module,
        config: RolloutConfig,
        *,
        tp: Ranks,
        stop_tokens: frozenset[int],
        seed: int,
        context: int,
        record_after: float,
        stops: Stops | None,
        routers: Routers,
    ) -> None:
        self.version = self._sampled_version = 0
        """Version of the weights, recorded with every sampled token; set by the code that loads weights."""
        weight: Tensor = module.get_input_embeddings().weight  # type: ignore[operator]
        self._vocabulary = vocabulary_of(module)
        self._device, self._dtype = weight.device, weight.dtype
        self._config = config
        self._context = context
        # Idle slots fill fixed shapes up to a whole block.
        self._fixed_rows = -(-config.max_rows // BLOCK) * BLOCK if config.deterministic else None
        self._module, self._routers = module, routers
        self._shapes = dict[int, LayerShape]()
        self._record_after = record_after
        self._consistency = RankConsistency(tp, self._device)
        self._runner: Runner | None = None
        layout = CacheLayout[Sequence](self._fixed_rows, CACHE_BLOCK if config.deterministic else ALIGNMENT)
        self._scheduler = Scheduler(config.max_rows, layout=layout, shares_parts=not config.deterministic)
        self._slots = Slots(self._device, seed)
        check_stop_tokens(stop_tokens, self._vocabulary)
        self._stop, self._stops = stop_tokens, stops
        self._tails: dict[RowId, deque[int]] = {}
        self._seen = Seen(self._vocabulary, self._device)
        self._settings = DrawSettings.of((), self._device)
        self._settings_rows: tuple[SamplingConfig, ...] = ()

    @property
    def has_work(self) -> bool:
        """Whether a row waits or runs."""
        return self._scheduler.has_work

    @property
    def held_bytes(self) -> int:
        """See Engine."""
        return self._runner.cache.held_bytes if self._runner is not None else 0

    @property
    def peak_bytes(self) -> int:
        """See NativeEngine."""
        return self._runner.cache.peak_bytes if self._runner is not None else 0

    def add(self, rollout: Rollout, sampling: SamplingConfig | None) -> None:
        """See NativeEngine."""
        chosen = sampling or self._config
        check_tokens(rollout, self._context, self._vocabulary)
        limit = limit_of(rollout, chosen.max_tokens, self._context)
        check_stop(chosen, self._config)
        if self._config.cache_gib is not None:
            self._check_room(rollout, limit, self._config.cache_gib)
        cache = rollout.cache
        if cache is not None:
            rollout = replace(rollout, cache=None)
            if not self._config.keep_cache and _sampled_version(rollout) != self.version:
                cache = None  # computed with other weights
        prefix = self._prefix(rollout)
        if cache is not None and (self._fixed_rows or len(prefix) - len(cache) <= FED_TOKENS):
            prefix = rollout.tokens[: len(cache)]
        # With keep_cache, a cache may contain keys of older weights, whatever version sampled last.
        is_private = self._config.keep_cache and cache is not None
        self._scheduler.add(
            Sequence(
                rollout=rollout,
                sampling=chosen,
                prefix=prefix,
                limit=limit,
                cache=cache,
                is_private=is_private,
            )
        )

    def abort(self, row: RowId) -> Rollout:
        """See NativeEngine."""
        found = self.look(row)
        self._leave([self._scheduler.find(row)])
        return found

    def detach(self, row: RowId) -> Rollout:
        """See Engine; a row whose prompt is not read to its end has no cache."""
        found, sequence = self.look(row), self._scheduler.find(row)
        cache, read = sequence.cache, self._scheduler.clock - sequence.start_step
        if sequence.cache_row is not None and read >= len(sequence.prefix):
            cache = self._driven().cache.read(sequence.cache_row, read)
        self._leave([sequence])
        return replace(found, cache=cache)

    def look(self, row: RowId) -> Rollout:
        """See Engine."""
        sequence = self._scheduler.find(row)
        if sequence.slot >= 0:
            self._slots.collect(self._scheduler.clock, [sequence], self._sampled_version)
        return sequence.rollout

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        """See NativeEngine, which keeps the module in evaluation mode during the call."""
        if not self.has_work:
            return []
        try:
            ended = self._step()
            if not self.has_work:
                self._consistency.check(self._sampled_version)  # compares the last draws
            return ended
        except BaseException as error:
            rows = len(self._scheduler.running)
            self.clear()  # the step is half done, and the cache may hold non-finite values
            if isinstance(error, RuntimeError) and "memory" in str(error):
                raise _no_room(rows, self._config, error) from error
            raise

    def clear(self) -> None:
        """Remove every row."""
        self._tails.clear()
        self._seen = Seen(self._vocabulary, self._device)
        self._scheduler.clear()
        self._consistency.clear()
        self._release()

    def _step(self) -> list[Rollout]:
        runner = self._driven()
        self._follow_version()
        clock = self._scheduler.clock
        if self._slots.is_full(clock):
            running = self._scheduler.running
            self._slots.collect(clock, running, self._sampled_version)
            self._slots.begin(clock, running)
        self._requeue(self._scheduler.overdue())
        step = self._scheduler.schedule()
        self._agree(step)
        rows = self._fixed_rows or len(step.rows)
        self._slots.reserve(rows)
        self._slots.move(step.moves)
        self._slots.admit(clock, step.admitted, self._scheduler.waiting(BULK))
        for row in step.admitted:
            if row.sampling.is_penalised:
                self._seen.begin(row.rollout.row, row.rollout.tokens, _sampled(row.rollout))
        feed = self._slots.feed(clock, len(step.rows), rows)
        logits = runner.run(step, feed)
        settings = self._settings_of(step, rows)
        penalised = [step.rows[slot].rollout.row for slot in settings.penalised]
        seen = self._seen.of(penalised) if penalised else None
        drawn = draw(logits, settings, self._slots.uniforms(clock, rows), seen)
        return self._postprocess(step, drawn)

    def _postprocess(self, step: Step, drawn: Drawn) -> list[Rollout]:
        """Record the draws; remove and return the rows that ended."""
        clock, running = step.clock, len(step.rows)
        self._check_finite(step, drawn.logprobs[:running])
        self._slots.record(clock, drawn)
        ended: dict[Sequence, Finish] = {}
        tokens = drawn.tokens[:running].tolist()
        self._consistency.note(step.rows, tokens)
        for row, token in zip(step.rows, tokens, strict=True):
            if clock < row.first_sample_step:
                self._slots.repeat(clock, row.slot, row.rollout.tokens[clock - row.start_step + 1])
                continue
            if row.sampling.is_penalised:
                self._seen.add(row.rollout.row, token)
            if token in self._stop or (self._stops and self._completes(row.rollout, token)):
                ended[row] = Finish.STOP
            elif clock == row.last_step:
                ended[row] = Finish.LENGTH
        self._slots.collect(step.clock + 1, list(ended), self._sampled_version)
        found = [
            replace(row.rollout, finish=finish, routes=self._routes(row), cache=self._kept(row, finish))
            for row, finish in ended.items()
        ]
        self._leave(ended)
        return found

    def _routes(self, row: Sequence) -> Tensor | None:
        """Return the experts of the row's tokens; None if routing is not recorded."""
        if ROUTES not in self._shapes:
            return None
        assert row.cache_row is not None, "a row that has just ended is still there"
        keys = self._driven().cache.layers[ROUTES][row.cache_row.bucket].keys
        return read_routes(keys, row.cache_row.row, len(row.rollout.tokens))

    def _kept(self, row: Sequence, finish: Finish) -> Tensor | None:
        """Return the KV cache of a row that may continue later; else None.

        A short row is read again in the pass that feeds it, which costs less than a pass for each new token.
        On a GPU, reading any row again takes less time than moving its cache to the host.
        """
        length = self._scheduler.clock - row.start_step
        is_kept = self._config.returns_cache and self._device.type == "cpu"
        if not is_kept or finish is not Finish.STOP or length < LEAST_KEPT:
            return None
        assert row.cache_row is not None, "a row that has just ended is still there"
        return self._driven().cache.read(row.cache_row, length)

    def _completes(self, rollout: Rollout, token: int) -> bool:
        """Return whether this token completes a stop text of several tokens."""
        assert self._stops is not None
        if rollout.row not in self._tails:
            self._tails[rollout.row] = deque(_sampled(rollout), maxlen=self._stops.longest)
        self._tails[rollout.row].append(token)
        return self._stops.ends(list(self._tails[rollout.row]))

    def _agree(self, step: Step) -> None:
        """Check, before the pass, that the other ranks are about to run the same rows."""
        entered = [hash((row.rollout.tokens, row.limit)) for row in step.admitted]
        self._consistency.note(step.admitted, entered)
        self._consistency.check(self._sampled_version, len(step.rows), *step.reaches)

    def _leave(self, rows: Collection[Sequence]) -> None:
        for row in rows:
            self._tails.pop(row.rollout.row, None)
            self._seen.drop(row.rollout.row)
        self._scheduler.leave(rows)
        if not self.has_work:
            self._release()

    def _release(self) -> None:
        if self._runner is not None:
            self._runner.release()

    def _driven(self) -> Runner:
        """Return the runner, built at first use, when the module has its weights and can be tested."""
        if self._runner is None:
            shapes = self._shapes = check_compatible(self._module, self._context)
            if self._fixed_rows is not None:
                check_fixed_shapes(self._module, shapes, self._fixed_rows)
            if self._config.replay_routing:
                shapes[ROUTES] = route_shape(self._module, self._routers, self._dtype)
            recorded = RecordedModule(
                self._module, shapes, self._record_after, has_fixed_rows=self._fixed_rows is not None
            )
            cache = Cache(shapes, self._device, self._dtype)
            self._runner = Runner(recorded, cache, self._fixed_rows)
            if self._config.cache_gib is not None:
                self._scheduler.room = self._config.cache_gib * 2**30 // cache.budget_bytes
        return self._runner

    def _check_room(self, rollout: Rollout, limit: int, cache_gib: float) -> None:
        """Check that the row fits into the cache alone at its maximum length."""
        with torch.inference_mode(), evaluating(self._module):
            taken = self._driven().cache.budget_bytes
        needed = self._scheduler.layout.least_positions(limit)
        if needed > self._scheduler.room:
            raise RolloutError(
                f"row ({rollout.row}) may reach {limit:,} tokens and needs {size(needed * taken)}, but a "
                f"worker's share of rollout.cache_gib is {size(int(cache_gib * 2**30))}",
                why="a running row keeps its keys and values in memory, and one layer's twice while the "
                "cache is rearranged",
                fix="raise rollout.cache_gib, or lower rollout.max_tokens",
            )

    def _follow_version(self) -> None:
        """If the version changed, requeue the running rows to prefill them again, unless ``keep_cache``."""
        if self.version == self._sampled_version:
            return
        running = self._scheduler.running
        if self._runner is not None:
            self._runner.follow_weights()
        self._slots.collect(self._scheduler.clock, running, self._sampled_version)
        if not self._config.keep_cache:
            self._requeue(running)
            self._scheduler.forget()
            self._release()
        self._scheduler.drop_index()
        for row in self._scheduler.take_caches():
            row.prefix = self._prefix(row.rollout)
        self._sampled_version = self.version

    def _requeue(self, rows: Collection[Sequence]) -> None:
        """Move running rows back to the waiting ones with their tokens so far."""
        self._slots.collect(self._scheduler.clock, list(rows), self._sampled_version)
        self._scheduler.requeue(rows)
        for row in rows:
            row.prefix = self._prefix(row.rollout)

    def _settings_of(self, step: Step, rows: int) -> DrawSettings:
        chosen = tuple(row.sampling for row in step.rows)
        if chosen != self._settings_rows:
            idle = (_IDLE,) * (rows - len(chosen))
            self._settings, self._settings_rows = DrawSettings.of(chosen + idle, self._device), chosen
        return self._settings

    def _prefix(self, rollout: Rollout) -> tuple[int, ...]:
        """Return the tokens to prefill in one pass: all but the last.

        With fixed shapes, only the prompt, whose length belongs to the row itself: tokens that were sampled
        or inserted after it are fed one by one, as the first time.
        """
        if self._fixed_rows is None or True not in rollout.loss_mask:
            return rollout.tokens[:-1]
        return rollout.tokens[: rollout.loss_mask.index(True) - 1]

    def _check_finite(self, step: Step, logprobs: Tensor) -> None:
        if isfinite(float(logprobs.sum())):  # no term is above 0, so nothing cancels
            return
        row = step.rows[int(logprobs.isfinite().logical_not().nonzero()[0])]
        position = step.clock - row.start_step + 1
        raise not_finite(row.rollout.row, position)


def _sampled(rollout: Rollout) -> list[int]:
    """Return the sampled tokens of a row."""
    pairs = zip(rollout.tokens, rollout.loss_mask, strict=True)
    return [token for token, is_sampled in pairs if is_sampled]


def _sampled_version(rollout: Rollout) -> int:
    """Return the version of the weights that sampled the row's last token; -1 for a prompt alone."""
    return next((version for version in reversed(rollout.versions) if version >= 0), -1)


def _no_room(rows: int, config: RolloutConfig, error: RuntimeError) -> RolloutError:
    return RolloutError(
        f"there is no memory for {rows:,} rows at once (rollout.max_rows = {config.max_rows:,})",
        why=str(error).splitlines()[0],
        fix="set rollout.cache_gib, or lower rollout.max_rows or rollout.max_tokens",
    )


_Note = tuple[int, int, int, int]
"""A row's id, and a number that must be equal on all ranks."""


class RankConsistency:
    """Records of this rank's work since the last comparison.

    Args:
        ranks: the ranks that run the same rows; with a single rank nothing is recorded.
        device: the device of the exchanged tensors.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._notes: list[_Note] = []

    def note(self, rows: Rows[Sequence], numbers: Rows[int]) -> None:
        """Record a number for each of these rows, such as its drawn token."""
        if self._ranks.size > 1:
            self._notes += [(*row.rollout.row, said) for row, said in zip(rows, numbers, strict=True)]

    def check(self, *state: int) -> None:
        """Compare the notes of all ranks; a collective call.

        Args:
            state: more numbers that must be equal on all ranks: the version, the rows, the lengths.

        Raises:
            RolloutError: the ranks differ; it names the first row that differs, and all ranks raise it.
        """
        if self._ranks.size == 1:
            return
        notes, self._notes = self._notes, []
        digest = torch.tensor([hash((state, tuple(notes)))], device=self._device)
        if len(set(self._ranks.stack(digest).flatten().tolist())) > 1:
            self._fail(notes, state)

    def clear(self) -> None:
        """Discard all notes; called when all rows are removed."""
        self._notes = []

    def _fail(self, notes: list[_Note], state: tuple[int, ...]) -> None:
        own = torch.tensor([*notes, (-1, -1, -1, hash(state))], device=self._device)
        everyone = [part.tolist() for part in self._ranks.gather(own)]
        for rank, theirs in enumerate(everyone):
            for one, other in zip(everyone[0], theirs, strict=False):
                if one != other:
                    raise _apart(one, other, rank)
        raise AssertionError("digests of equal notes are equal")


def _apart(one: Rows[int], other: Rows[int], rank: int) -> RolloutError:
    first, second = (RowId(*note[:3]) for note in (one, other))
    if -1 in (first.prompt, second.prompt):
        what = (
            f"rank {rank} of a tensor-parallel group has other rows, or another weight version, than rank 0"
        )
    elif first != second:
        what = f"rank {rank} of a tensor-parallel group runs row ({second}) where rank 0 runs row ({first})"
    else:
        what = f"row ({first}) has other tokens on rank {rank} of a tensor-parallel group than on rank 0"
    return RolloutError(
        what,
        why="the ranks of a group sample the same tokens independently, without communication",
        fix="make the same calls with the same prompts on every rank of the group, and use the same weights, "
        "thread count, processor and library versions",
    )

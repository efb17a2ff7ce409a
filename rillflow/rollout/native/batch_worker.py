"""Lane: continuous batching of rows over the trainer's own module, in one thread.

    add ────────────┐                      ┌──────────── step ────────────┐
                    ├─> Scheduler ─ Step ──> Runner ─ logits ─> draw ─┐   │
    abort <─────────┘        ^             │                          v   │
                             └── rows that ended ── postprocess <── Slots │
    finished rollouts <────────────────────┴──────────────────────────────┘

A token depends only on its row's tokens and on uniform(seed, row id, position), not on the order of rows. The
rounding of matrix products depends on the other rows, so equal bits are guaranteed only in deterministic
mode, where every shape is fixed.

The ranks of a tensor-parallel group step together. The schedule depends only on the added rows and the drawn
tokens, never on time, so all ranks compute the same one (see consistency).

The weights are the module's own and may change between calls; everything computed from them is freed with the
last row. When ``version`` changes while rows run, their tokens are prefilled again with the new weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor, nn

from rillflow.errors import RolloutError, RowError
from rillflow.models.architecture import vocabulary_of
from rillflow.models.routing import Routers
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.native.cache import Cache, LayerShape
from rillflow.rollout.native.compatibility import check_compatible, check_fixed_shapes
from rillflow.rollout.native.consistency import RankConsistency
from rillflow.rollout.native.layout import PLACES, BandLayout
from rillflow.rollout.native.recording import RecordedModule
from rillflow.rollout.native.routes import ROUTES, read_routes, route_shape
from rillflow.rollout.native.runner import BLOCK, CACHE_BLOCK, Runner, evaluating
from rillflow.rollout.native.sampling import Drawn, DrawSettings, Seen, draw
from rillflow.rollout.native.scheduler import Scheduler, Sequence, Step
from rillflow.rollout.native.slots import BULK, Slots
from rillflow.rollout.stops import Stops
from rillflow.runs.formatting import size
from rillflow.workers.collectives import Ranks

_IDLE = SamplingConfig()
"""Sampling settings of a slot without a row."""


class Lane:
    """Rows that run together; each step draws one token for each.

    Args:
        module: a transformers causal language model built with Rillflow's attention, or a rank's shard of
            one.
        config: settings of sampling and of the engine.
        tp: the ranks that together hold the module; a single rank holds all of it.
        stop_tokens: token ids that end a row.
        seed: the run's seed.
        context: maximum tokens of a row, prompt included.
        replay_after: passes of the same kind before the module is recorded (see recording); infinity for
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
        replay_after: float,
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
        self._replay_after = replay_after
        self._consistency = RankConsistency(tp, self._device)
        self._runner: Runner | None = None
        layout = BandLayout[Sequence](self._fixed_rows, CACHE_BLOCK if config.deterministic else PLACES)
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
        prefix = self._prefix(rollout)
        self._scheduler.add(Sequence(rollout=rollout, sampling=chosen, prefix=prefix, limit=limit))

    def abort(self, row: RowId) -> Rollout:
        """See NativeEngine."""
        found = self.look(row)
        self._leave([self._scheduler.find(row)])
        return found

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
            replace(row.rollout, finish=finish, routes=self._routes(row)) for row, finish in ended.items()
        ]
        self._leave(ended)
        return found

    def _routes(self, row: Sequence) -> Tensor | None:
        """Return the experts of the row's tokens; None if routing is not recorded."""
        if ROUTES not in self._shapes:
            return None
        assert row.place is not None, "a row that has just ended is still there"
        keys = self._driven().cache.layers[ROUTES][row.place.band].keys
        return read_routes(keys, row.place.row, len(row.rollout.tokens))

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
            recorded = RecordedModule(self._module, shapes, self._replay_after)
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
                f"lane's share of rollout.cache_gib is {size(int(cache_gib * 2**30))}",
                why="a running row keeps its keys and values in memory, and one layer's twice while the "
                "cache is rearranged",
                fix="raise rollout.cache_gib, or lower rollout.max_tokens",
            )

    def _follow_version(self) -> None:
        """If the version changed, requeue the running rows to prefill them again, unless ``keep_cache``."""
        if self.version == self._sampled_version:
            return
        running = self._scheduler.running
        self._slots.collect(self._scheduler.clock, running, self._sampled_version)
        if not self._config.keep_cache:
            self._requeue(running)
            self._scheduler.forget()
            self._release()
        self._scheduler.drop_contents()
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


def not_finite(row: RowId, position: int) -> RowError:
    """Return the error for a row whose logits are not finite."""
    return RowError(
        f"the logits of row ({row}) at position {position} are not finite",
        why="a weight is NaN or infinite, or an activation overflowed",
        fix="check the weights of the last update for NaN and infinite values",
        row=row,
    )


def _sampled(rollout: Rollout) -> list[int]:
    """Return the sampled tokens of a row."""
    pairs = zip(rollout.tokens, rollout.loss_mask, strict=True)
    return [token for token, is_sampled in pairs if is_sampled]


def _no_room(rows: int, config: RolloutConfig, error: RuntimeError) -> RolloutError:
    return RolloutError(
        f"there is no memory for {rows:,} rows at once (rollout.max_rows = {config.max_rows:,})",
        why=str(error).splitlines()[0],
        fix="set rollout.cache_gib, or lower rollout.max_rows or rollout.max_tokens",
    )


def check_tokens(rollout: Rollout, context: int, vocabulary: int) -> None:
    """Check that a row can be continued.

    Raises:
        RolloutError: the row has ended, is empty, fills the context, or has a token outside the vocabulary.
    """
    tokens = rollout.tokens
    if rollout.finish is not Finish.ABORTED:
        raise RolloutError(
            f"row ({rollout.row}) has ended with {rollout.finish.name}",
            why="a row that has ended cannot continue",
            fix="append tokens with Rollout.inserted, or make a new row",
        )
    if not tokens:
        raise RolloutError(
            f"row ({rollout.row}) has an empty prompt",
            why="the first token is sampled from the logits of the prompt's last token",
            fix="give every prompt at least one token, such as the tokeniser's begin token",
        )
    if len(tokens) >= context:
        raise RolloutError(
            f"row ({rollout.row}) has {len(tokens)} tokens",
            why=f"the context is {context} tokens, and at least one new token must fit",
            fix="shorten the prompt, or use a model with a longer context",
        )
    odd = [token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary]
    if odd:
        raise RolloutError(
            f"row ({rollout.row}) has token {odd[0]}, at position {tokens.index(odd[0])}",
            why=f"the model's vocabulary is 0 to {vocabulary - 1}",
            fix="encode the prompt with the model's own tokeniser",
        )


def limit_of(rollout: Rollout, max_tokens: int, context: int) -> int:
    """Return the length at which a row ends: prompt, inserted tokens and ``max_tokens`` sampled ones.

    Raises:
        RolloutError: the row already has ``max_tokens`` sampled tokens.
    """
    drawn = sum(rollout.loss_mask)
    if drawn >= max_tokens:
        raise RolloutError(
            f"row ({rollout.row}) has {drawn} sampled tokens and max_tokens is {max_tokens}",
            why="a running row samples at least one more token",
            fix="raise max_tokens",
        )
    return min(len(rollout.tokens) - drawn + max_tokens, context)


def check_stop(sampling: SamplingConfig, engine: SamplingConfig) -> None:
    """Check that a row's stop texts are those the engine was built with.

    Raises:
        RolloutError: they differ.
    """
    if sampling.stop != engine.stop:
        raise RolloutError(
            f"a row has the stop strings {list(sampling.stop)}, and the engine has {list(engine.stop)}",
            why="the engine tokenises stop strings when it is built",
            fix="build the engine with these stop strings, or use the engine's",
        )


def check_stop_tokens(stop_tokens: frozenset[int], vocabulary: int) -> None:
    """Check that every stop token is in the vocabulary.

    Raises:
        RolloutError: one of them is outside it.
    """
    for token in sorted(stop_tokens):
        if not 0 <= token < vocabulary:
            raise RolloutError(
                f"stop token {token} is outside the vocabulary",
                why=f"the model's vocabulary is 0 to {vocabulary - 1}, so it is never sampled",
                fix="use the tokeniser the model was trained with",
            )

"""The sampler: the half of the policy that generates answers.

    prompts ─ generate, greedy ─> rollouts          (rollout engine, with the weights published last)

An algorithm calls its endpoints through the policy. It runs on the trainer's ranks, or on others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Self

import torch

from rillflow.models.language_model import LanguageModel
from rillflow.records.batch import Batch, batch_bytes, load_batch
from rillflow.records.metrics import Max, Mean, Metric, Sum, mean_of
from rillflow.records.rollout import Finish, Rollout, moved_batch, rollout_batch, rollouts_of, starts
from rillflow.records.row import RowId
from rillflow.rewards.logged import Sums, merged
from rillflow.rewards.outcome import LOGGED
from rillflow.roles.logprob_check import canary_texts, check_canary
from rillflow.roles.publishing import ReceivedWeights, SampledWeights
from rillflow.roles.row_columns import with_columns
from rillflow.roles.setting import RoleSetting
from rillflow.rollout.config import RolloutConfig, SamplingConfig, server_python
from rillflow.rollout.engine import Engine, EngineLost, Stops, engine_class, engine_options, losses
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs.durable import write_flushed, writing
from rillflow.workers.collectives import Stranded
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import SPLIT_ALL

ROLLOUT_FIELDS = ("tokens", "loss_mask", "sampler_logprobs", "versions", "finish", "columns", "limits")
"""Fields that ``records.rollout.rollout_batch`` makes, and the most tokens that a row could have sampled."""
RUNNING, ENDED = "running", "ended"
"""Files of a sampler's rows in a checkpoint."""
_KEY = json.dumps(LOGGED)
GREEDY_SAMPLE = -1
"""Sample number in the row ids of greedy answers, which are not samples of their prompt."""


def rollout_metrics(rollouts: Batch) -> dict[str, Metric]:
    """Return metrics of the lengths and endings of sampled rows."""
    lengths = rollouts.ragged("loss_mask").sums().double()
    ended = rollouts.dense("finish") == Finish.STOP
    longest: dict[str, Metric] = {}
    if len(rollouts):
        longest["rollout/length/max"] = Max(value=float(lengths.max()))
    return {
        "rollout/length/mean": mean_of(lengths),
        **longest,
        "rollout/stopped/share": mean_of(ended.double()),
        "rollout/tokens/sum": Sum(value=float(lengths.sum())),
        "rollout/rows/sum": Sum(value=float(len(rollouts))),
        **_logged(rollouts),
    }


def _logged(rollouts: Batch) -> dict[str, Metric]:
    """Return the means of what agents and environments logged for their rows."""
    texts = rollouts.ragged("columns").to_text() if "columns" in rollouts.fields else []
    rows = (json.loads(text) for text in texts if _KEY in text)
    return means_of((row[LOGGED] for row in rows if LOGGED in row), "rollout_metrics")


def means_of(logged: Iterable[Sums], area: str) -> dict[str, Metric]:
    """Return logged sums, one mapping per row or call, as means named ``area/NAME/mean``."""
    sums = merged(logged)
    return {f"{area}/{name}/mean": Mean(total=sums[name][0], count=sums[name][1]) for name in sorted(sums)}


GroupId = tuple[int, int]
"""Id of a sample group: the epoch and the prompt of its rows."""


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """Result of letting rows run for some passes."""

    complete: Mapping[GroupId, int]
    """Groups that became complete and can be collected, each with the number of passes that it took."""
    ended: int
    """Number of rows that ended or were taken out."""
    passes: int
    """Number of passes, each of one token per running row."""
    wasted: int
    """Tokens of rows that are never collected."""


@dataclass(frozen=True, kw_only=True)
class Released:
    """Groups that were taken out of a sampler to run on other samplers."""

    running: Sequence[Mapping[GroupId, int]]
    """Unfinished groups of each part, each with the number of its running rows."""
    nbytes: int
    """Bytes of all rows, with their caches."""


@dataclass(kw_only=True)
class _Running:
    """A group whose rows run or wait to be collected."""

    sampling: SamplingConfig | None
    """Sampling settings of its rows; None for the recipe's."""
    wanted: int
    """Number of ended rows that complete the group."""
    left: set[RowId] = field(default_factory=set)
    """Rows that still run."""
    ended: list[Rollout] = field(default_factory=list)
    """Rows that have ended."""


class Sampler:
    """A rollout engine that samples from the published weights.

    Args:
        weights: the module to sample from, and its version.
        model: the same model's tokeniser and context.
        rollout: sampling settings.
        seed: the run's seed; every random number follows from it and from row ids.
        engine: makes the engine, as the class of an Engine does.
        columns: functions of columns that are added to the rows it returns; None for none.
    """

    def __init__(
        self,
        weights: SampledWeights,
        *,
        model: LanguageModel,
        rollout: RolloutConfig,
        seed: int,
        engine: Callable[..., Engine] = NativeEngine,
        columns: Mapping[str, Callable[[Batch], Sequence[Any]]] | None = None,
    ) -> None:
        self.weights, self._columns = weights, columns or {}
        self._rollout = rollout
        stops = Stops(rollout.stop, model.tokenizer)
        with losses():
            self.engine = engine(
                weights.module,
                rollout,
                stop_tokens=stops.tokens,
                seed=seed,
                context=model.context,
                tp=weights.tp,
                stops=stops,
            )
        self._lost: EngineLost | None = None
        self._model, self._loaded = model, -1
        self._later: Iterator[Batch] = iter(())
        self._running: dict[GroupId, _Running] = {}

    @classmethod
    def make(cls, setting: RoleSetting) -> Self:
        """Make the sampler on the policy's ranks, or with a model that receives the policy's weights."""
        weights: SampledWeights
        if setting.model is None:
            policy = setting.site.objects["policy"]
            model, weights = policy.model, policy.weights
        else:
            assert setting.generate is not None, "a sampler has the grid of generation"
            model = setting.load(LanguageModel)
            site = setting.site
            weights = ReceivedWeights(
                model,
                mesh=setting.generate,
                ranks=site.ranks,
                rank=site.place.rank,
                codec=setting.codecs.weights,
            )
        rollout = setting.rollout
        engine: Callable[..., Engine] = engine_class(setting.engine)
        if rollout.server is not None:
            server = str(server_python(rollout.server, setting.base))
            rollout = rollout.model_copy(update={"server": server})
        if setting.engine_options is not None:
            engine = partial(engine, **engine_options(setting.engine_options)(setting))
        for wrap in setting.wraps:
            engine = wrap(engine, setting, model)
        columns = {name: partial(function, setting) for name, function in setting.columns.items()}
        return cls(weights, model=model, rollout=rollout, seed=setting.seed, engine=engine, columns=columns)

    @endpoint(SPLIT_ALL, reads=("tokens", "columns"), writes=ROLLOUT_FIELDS, measures=rollout_metrics)
    @losses()
    def generate(self, prompts: Batch, samples: int = 1, sampling: SamplingConfig | None = None) -> Batch:
        """Return rollouts of ``samples`` answers to every prompt, ordered by prompt and sample.

        Rows that already run are set aside meanwhile and keep their tokens.
        """
        self._turn()
        with self._aside():
            return self._limited(self.engine.generate(prompts, samples, sampling), sampling)

    @endpoint(SPLIT_ALL, reads=("tokens", "columns"), writes=ROLLOUT_FIELDS)
    def greedy(self, prompts: Batch) -> Batch:
        """Return rollouts of the greedy answer to every prompt, in the prompts' order; see GREEDY_SAMPLE."""
        sampling = SamplingConfig(temperature=0, max_tokens=self._rollout.max_tokens, stop=self._rollout.stop)
        rollouts = self.generate(prompts, 1, sampling)
        ids = rollouts.ids.clone()
        ids[:, 2] = GREEDY_SAMPLE
        return Batch(ids=ids, fields=rollouts.fields)

    @endpoint(SPLIT_ALL, reads=("tokens", "columns"), writes=ROLLOUT_FIELDS)
    @losses()
    def first_part(self, *parts: Batch, samples: int = 1, sampling: SamplingConfig | None = None) -> Batch:
        """Start ``samples`` answers to every prompt of several parts, and return the first part's rows."""
        self._turn()
        made = self.engine.generate_parts(parts, samples, sampling)
        self._later = (self._limited(rollouts, sampling) for rollouts in made)
        return next(self._later)

    @endpoint(SPLIT_ALL, writes=ROLLOUT_FIELDS)
    @losses()
    def next_part(self) -> Batch:
        """Return the rows of the next part."""
        for rollouts in self._later:
            return rollouts
        raise Stranded("no part is being generated", why="generation failed, or all parts were taken")

    @losses()
    def advance(
        self,
        prompts: Batch | None,
        given_up: Sequence[GroupId],
        passes: int,
        samples: int,
        sampling: SamplingConfig | None,
        wanted: int = 0,
        enough: float = inf,
    ) -> Advanced:
        """Let running rows continue with the present weights; a collective call of a replica's ranks.

        Args:
            prompts: prompts that start to run; None for none.
            given_up: groups whose rows are taken out and dropped.
            passes: the most tokens that a row continues by.
            samples: rows per prompt.
            sampling: sampling settings; None for the recipe's.
            wanted: rows that complete a prompt, the first to end; the others are taken out.
                0: all.
            enough: number of complete groups at which rows stop.
        """
        complete, out, ended, made = dict[GroupId, int](), list[Rollout](), 0, 0
        self._turn()
        for group in given_up:
            forgotten = self._running.pop(group)
            out += [*forgotten.ended, *map(self.engine.abort, sorted(forgotten.left))]
            ended += len(forgotten.left)
        for start in starts(prompts, samples) if prompts is not None else ():
            fresh = _Running(sampling=sampling, wanted=wanted or samples)
            self._running.setdefault(start.row.group, fresh).left.add(start.row)
            self.engine.add(start, sampling)
        while made < passes and len(complete) < enough and self.engine.has_work:
            made += 1
            rows = sorted(self.engine.step(), key=lambda each: each.row)
            for row in rows:
                running = self._running[row.row.group]
                running.left.remove(row.row)
                (running.ended if len(running.ended) < running.wanted else out).append(row)
            ended += len(rows)
            for group in dict.fromkeys(row.row.group for row in rows):
                running = self._running[group]
                if len(running.ended) == running.wanted:
                    complete[group] = made
                    out += map(self.engine.abort, sorted(running.left))
                    ended += len(running.left)
                    running.left.clear()
        wasted = sum(sum(row.loss_mask) for row in out)
        return Advanced(complete=complete, ended=ended, passes=made, wasted=wasted)

    @losses()
    def save(self, folder: Path | None, name: str) -> None:
        """Write all rows into a folder, then let them go on from their tokens, as ``restore`` does.

        Keys and values are computed again, so the rows go on with the same bits as restored ones.

        Args:
            folder: the folder; None writes nothing.
            name: beginning of the files' names.

        Raises:
            RunDirectoryError: the disk fails.
        """
        with self._aside() as running:
            ended = [row for group in self._running.values() for row in group.ended]
            if folder is not None:
                for kind, rows in ((RUNNING, running), (ENDED, ended)):
                    path = folder / f"{name}-{kind}.safetensors"
                    with writing(path):
                        write_flushed(path, [batch_bytes(rollout_batch(rows))])

    @losses()
    def release(self, parts: Sequence[Sequence[GroupId]], with_caches: bool) -> tuple[Any, ...]:
        """Take out the groups of several parts that still run.

        Args:
            parts: the groups of each part; a group that is complete stays.
            with_caches: whether running rows bring their KV caches.

        Returns:
            For each part two batches, its running rows and the rows that have ended; then a ``Released``.
        """
        made, running = list[Batch](), list[dict[GroupId, int]]()
        take = self.engine.detach if with_caches else self.engine.abort
        for part in parts:
            groups = {each: self._running.pop(each) for each in part if self._running[each].left}
            running.append({each: len(group.left) for each, group in groups.items()})
            made.append(moved_batch([take(row) for group in groups.values() for row in sorted(group.left)]))
            made.append(rollout_batch([row for group in groups.values() for row in group.ended]))
        return (*made, Released(running=running, nbytes=sum(each.nbytes for each in made)))

    @losses()
    def take_over(self, samples: int, sampling: SamplingConfig | None, *rows: Batch) -> None:
        """Continue the groups that others released; ``rows`` are batches of running and of ended rows."""
        self._turn()
        self._take_over([row for each in rows for row in rollouts_of(each)], samples, sampling)

    @losses()
    def restore(
        self, folder: Path, name: str, samples: int, sampling: SamplingConfig | None
    ) -> Mapping[GroupId, int]:
        """Take over the rows that ``save`` wrote; return the number of running rows of each group."""
        self._turn()
        running, ended = (
            rollouts_of(load_batch(folder / f"{name}-{kind}.safetensors")) for kind in (RUNNING, ENDED)
        )
        self._take_over([*running, *ended], samples, sampling)
        return {group: len(each.left) for group, each in self._running.items()}

    def _take_over(self, rows: Sequence[Rollout], samples: int, sampling: SamplingConfig | None) -> None:
        for row in rows:
            fresh = _Running(sampling=sampling, wanted=samples)
            group = self._running.setdefault(row.row.group, fresh)
            if row.finish is Finish.ABORTED:
                group.left.add(row.row)
                self.engine.add(row, sampling)
            else:
                group.ended.append(row)

    @contextmanager
    def _aside(self) -> Iterator[list[Rollout]]:
        """Take out the running rows meanwhile; they keep their tokens."""
        running = [(group, row) for group in self._running.values() for row in sorted(group.left)]
        aside = [self.engine.abort(row) for _, row in running]
        yield aside
        for (group, _), rollout in zip(running, aside, strict=True):
            self.engine.add(rollout, group.sampling)

    def collect(self, groups: Sequence[GroupId]) -> Batch:
        """Return the rows of complete groups, ordered by group as given and by sample."""
        taken = [self._running.pop(group) for group in groups]
        rollouts = [row for each in taken for row in sorted(each.ended, key=lambda ended: ended.row)]
        return self._limited(rollout_batch(rollouts), taken[0].sampling)

    def _limited(self, rollouts: Batch, sampling: SamplingConfig | None) -> Batch:
        """Add the columns of plugins, and ``limits``: the most tokens that each row could have sampled."""
        limit = (sampling or self._rollout).max_tokens
        rows = with_columns(rollouts, self._columns)
        return rows.with_fields(limits=torch.full((len(rollouts),), limit))

    def _turn(self) -> None:
        """Load the published weights into the engine.

        They stay until the last part is taken; these ranks get no other request before.
        """
        self.weights.turn_to_generation(self._sleep)
        if self._lost is not None:  # not before: the other ranks move weights with this one
            raise self._lost
        self.engine.wake()
        if self._loaded != self.weights.version:
            self._loaded, version = -1, self.weights.version
            self.engine.load(version, dict(self.weights.module.named_parameters()))
            if self.weights.canary:
                found = self.engine.score(canary_texts(self._model))
                is_exact = self._model.module.dtype.itemsize >= 4
                check_canary(self.weights.canary, found, version, is_exact=is_exact)
            self._loaded = version

    def _sleep(self) -> None:
        """Have the engine free its memory for the trainer.

        A lost engine holds no memory, so training goes on; the next call that samples reports the loss.
        """
        try:
            with losses():
                self.engine.sleep()
        except EngineLost as lost:
            self._lost = lost

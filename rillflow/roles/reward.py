"""The reward: a function of prompt, answer and columns; every row gets one of four outcomes.

    rollouts ─ decode ─> texts ─ killable children ─> score | abstain | timeout | error

Only a score counts: a row without one leaves its group's baseline and gets advantage 0, never a
silent reward of 0.

``score`` waits until a whole batch is scored. ``advance`` and ``collect`` score a stream of groups and never
wait longer than they are told to: a group that hangs holds up no other.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from rillflow.errors import RewardError
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch, concatenate
from rillflow.records.metrics import Max, Mean, Metric, Min, Sum, mean_of
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import completions
from rillflow.records.row import RowId
from rillflow.rewards.function import Text
from rillflow.rewards.outcome import FAILED, FAILURES, LOGGED, Outcome, Score
from rillflow.rewards.workers import WeightedWorkers
from rillflow.roles.sampler import GroupId, means_of
from rillflow.roles.setting import RoleSetting
from rillflow.training.minibatches import gathered, prompt_units
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import DP

OUTCOMES = tuple(Outcome)
SCORE_FIELDS = ("rewards", "valid", "outcome", "completion", "message")
"""Fields that a score adds to a row."""
COST_FIELDS = ("costs", *SCORE_FIELDS[1:])
"""Fields that a cost adds to a row."""
WINDOW_ROWS = 256
"""Number of rows of a stream over which failures are judged, if the caller does not say."""


def reward_metrics(scores: Batch) -> dict[str, Metric]:
    """Return metrics of scores, of the other outcomes, and of groups whose rewards are all equal."""
    valid = scores.dense("valid")
    rewards = scores.dense("rewards")[valid].double()
    groups = prompt_units(scores)[valid]
    metrics: dict[str, Metric] = {
        "reward/score/mean": mean_of(rewards),
        "reward/flat_groups/share": mean_of(_flat(groups, rewards)),
    }
    if len(rewards):
        metrics["reward/score/max"] = Max(value=float(rewards.max()))
        metrics["reward/score/min"] = Min(value=float(rewards.min()))
    for index, outcome in enumerate(OUTCOMES):
        metrics[f"reward/{outcome}/share"] = mean_of((scores.dense("outcome") == index).double())
    metrics |= logged_metrics(scores, "reward_metrics")
    parts = parts_of(scores)
    for name in sorted({name for each in parts for name in each}):
        said = [each[name] for each in parts if name in each]
        metrics[f"rewards/{name}/mean"] = Mean(total=sum(said), count=len(said))
    return metrics


def parts_of(scores: Batch) -> list[dict[str, float]]:
    """Return each row's scores by function; empty if only one function scores."""
    texts = scores.ragged("parts").to_text() if "parts" in scores.fields else []
    return [json.loads(text) if text else {} for text in texts]


def logged_metrics(rows: Batch, area: str) -> dict[str, Metric]:
    """Return the means of the metrics that functions logged with ``log_metric``, as ``area/NAME/mean``."""
    texts = rows.ragged("logged").to_text() if "logged" in rows.fields else []
    return means_of((json.loads(text) for text in texts if text), area)


def cost_metrics(scores: Batch) -> dict[str, Metric]:
    """Return metrics of the costs, and the share of rows with a cost."""
    valid = scores.dense("valid")
    costs = scores.dense("costs")[valid].double()
    metrics: dict[str, Metric] = {
        "cost/value/mean": mean_of(costs),
        "cost/valid/share": mean_of(valid.double()),
        "cost/none/sum": Sum(value=float(not len(costs))),
        **logged_metrics(scores, "cost_metrics"),
    }
    if len(costs):
        metrics["cost/value/max"] = Max(value=float(costs.max()))
    return metrics


def _flat(groups: Tensor, rewards: Tensor) -> Tensor:
    """Return [G] float64: 1 for a group whose rewards are all equal, else 0."""
    names, index = torch.unique(groups, return_inverse=True)
    none = rewards.new_zeros(len(names))
    low, high = (none.scatter_reduce(0, index, rewards, to, include_self=False) for to in ("amin", "amax"))
    return (low == high).double()


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Result of letting a stream of groups be scored for some time."""

    complete: Sequence[GroupId]
    """Groups that were scored since the last call and can be collected."""
    waiting: int
    """Number of groups that are not complete."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Answers:
    """Rows in the form that functions score; without rows whose agent failed."""

    ids: Tensor
    """[B, 3] ids of all rows."""
    texts: Sequence[str]
    """[B] sampled text."""
    failed: Mapping[int, Score]
    """Outcomes of rows whose agent failed, by place."""
    prompts: Sequence[Text]
    """[N] prompts of the other rows."""
    completions: Sequence[Text]
    """[N] answers to these prompts."""
    columns: Mapping[str, Sequence[object]]
    """Other columns of these prompts, each [N]."""

    def outcomes(self, found: Sequence[Score]) -> list[Score]:
        """Return a score for each of the B rows, given those of the N rows that the functions saw."""
        rest = iter(found)
        return [self.failed[place] if place in self.failed else next(rest) for place in range(len(self.ids))]


class Reward:
    """A reward function and its workers.

    Args:
        workers: the children that call the function.
        tokenizer: turns sampled tokens into the text that is scored.
        max_failures: share of rows with a timeout or an error above which the run stops.
    """

    field = "rewards"
    """Name of the scores' field."""

    def __init__(self, workers: WeightedWorkers, tokenizer: Tokenizer, *, max_failures: float) -> None:
        self._workers = workers
        self._tokenizer = tokenizer
        self._max_failures = max_failures
        self._waiting: dict[GroupId, _Answers] = {}
        self._complete: dict[GroupId, Batch] = {}
        self._failures: deque[bool] = deque()

    @classmethod
    def make(cls, setting: RoleSetting) -> Self:
        """Make the role; its functions run in child processes that end with the rank."""
        workers = setting.site.stack.enter_context(WeightedWorkers(setting.functions, setting.limits))
        return cls(workers, setting.tokenizer, max_failures=setting.limits.max_failures)

    @endpoint(
        DP,
        reads=("tokens", "loss_mask", "columns"),
        writes=SCORE_FIELDS,
        measures=reward_metrics,
        by_groups=True,
    )
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout.

        Returns:
            Fields ``rewards`` [B] float32 (0 where not valid), ``valid`` [B] bool, ``outcome`` [B] int8
            (index into OUTCOMES), and the texts ``completion`` and ``message``.

        Raises:
            RewardError: more than ``max_failures`` of the rows timed out or failed.
        """
        rows = self._answers(rollouts)
        scores = rows.outcomes(self._workers.score(rows.prompts, rows.completions, rows.columns))
        bad = [place for place, score in enumerate(scores) if score.outcome in FAILURES]
        if len(bad) > self._max_failures * len(scores):
            first = f"the first, row ({rollouts.row_id(bad[0])})"
            raise self._broken(f"{len(bad)} of {len(scores)} rows; {first}", scores[bad[0]])
        return self._fields(rows, scores)

    def advance(
        self, rows: Batch | None, given_up: Sequence[GroupId], wait_s: float, window: int = WINDOW_ROWS
    ) -> Scored:
        """Score groups until one is complete, but at most ``wait_s`` seconds.

        The function sees one group per call, not the whole batch. Nothing is sent to the function or read
        from it between two calls of ``advance``. An error of the function loses all groups that are not
        complete: the run ends.

        Args:
            rows: all rows of some groups, with the fields that ``score`` reads; None for none.
            given_up: groups to forget. A call that runs for one ends at once.
            wait_s: longest wait in seconds; 0 processes the answers that are there.
            window: number of rows over which failures are judged: at least the rows of a step that this rank
                scores. Rows that are not scored yet count as good.

        Raises:
            RewardError: a group in ``given_up`` is unknown, one of ``rows`` is known, the function cannot be
                used, or more than ``max_failures`` of the last ``window`` rows timed out or failed.
        """
        self._require(given_up, self._known, "given up")
        for group in given_up:
            if self._complete.pop(group, None) is None:
                del self._waiting[group]
                self._workers.cancel(group)
        if rows is not None:
            self._queue(rows)
        found = dict(self._workers.turn(wait_s))
        complete = [group for group in self._waiting if group in found]
        for group in complete:
            answers = self._waiting.pop(group)
            scores = answers.outcomes(found[group])
            self._stop_if_broken(answers, scores, window)
            self._complete[group] = self._fields(answers, scores)
        return Scored(complete=complete, waiting=len(self._waiting))

    def collect(self, groups: Sequence[GroupId]) -> Batch:
        """Return the fields of ``score`` for complete groups, and forget these groups.

        Rows are ordered by group as given and, within a group, as they were given to ``advance``.

        Raises:
            RewardError: a group is not complete.
        """
        self._require(groups, self._complete, "collected")
        return concatenate([self._complete.pop(group) for group in groups])

    @property
    def _known(self) -> Mapping[GroupId, object]:
        return {**self._waiting, **self._complete}

    def _queue(self, rows: Batch) -> None:
        known, ids = self._known, rows.row_ids()
        for places in gathered(range(len(rows)), prompt_units(rows)):
            group = ids[places[0]].group
            if group in known:
                raise RewardError(
                    f"epoch {group[0]} prompt {group[1]} is already being scored",
                    why="all rows of a group are scored in one call",
                    fix="pass all its rows at once, and collect it or give it up before it is sampled again",
                )
            answers = self._waiting[group] = self._answers(rows.select(places))
            self._workers.begin(group, answers.prompts, answers.completions, answers.columns)

    def _require(self, groups: Sequence[GroupId], known: Mapping[GroupId, object], verb: str) -> None:
        for epoch, prompt in groups:
            if (epoch, prompt) not in known:
                raise RewardError(
                    f"epoch {epoch} prompt {prompt} cannot be {verb}",
                    why="it is still being scored"
                    if (epoch, prompt) in self._waiting
                    else "it was not given to this rank, or it was collected or given up before",
                )

    def _answers(self, rollouts: Batch) -> _Answers:
        """Return the texts and columns of rows."""
        texts = [self._tokenizer.decode(tokens) for tokens in completions(rollouts).lists()]
        rows: list[dict[str, Any]] = [json.loads(text) for text in rollouts.ragged("columns").to_text()]
        for row in rows:
            row.pop(LOGGED, None)
        kept = [place for place, row in enumerate(rows) if FAILED not in row]
        prompts = [rows[place].pop("prompt") for place in kept]
        names = list(rows[kept[0]]) if kept else []
        return _Answers(
            ids=rollouts.ids,
            texts=texts,
            failed={
                place: Score(outcome=Outcome(row[FAILED][0]), message=row[FAILED][1])
                for place, row in enumerate(rows)
                if FAILED in row
            },
            prompts=prompts,
            completions=[
                texts[place] if isinstance(prompt, str) else [{"role": "assistant", "content": texts[place]}]
                for place, prompt in zip(kept, prompts, strict=True)
            ],
            columns={name: [rows[place][name] for place in kept] for name in names},
        )

    def _fields(self, rows: _Answers, scores: Sequence[Score]) -> Batch:
        """Return the fields of ``score``."""
        found = scored_rows(Batch(ids=rows.ids, fields={}), rows.texts, scores, self.field)
        texts = [json.dumps(score.logged) if score.logged else "" for score in scores]
        found = found.with_fields(logged=Ragged.from_text(texts))
        parts = [json.dumps(score.parts) if score.parts else "" for score in scores]
        return found.with_fields(parts=Ragged.from_text(parts)) if self.field == "rewards" else found

    def _stop_if_broken(self, rows: _Answers, scores: Sequence[Score], window: int) -> None:
        """Raise if too many of the last ``window`` rows failed, with these as the newest."""
        bad = [place for place, score in enumerate(scores) if score.outcome in FAILURES]
        self._failures.extend(place in bad for place in range(len(scores)))
        while len(self._failures) > window:
            self._failures.popleft()
        if bad and sum(self._failures) > self._max_failures * window:
            last = f"the last, row ({RowId(*rows.ids[bad[-1]].tolist())})"
            raise self._broken(f"{sum(self._failures)} of the last {window} rows; {last}", scores[bad[-1]])

    def _broken(self, where: str, score: Score) -> RewardError:
        return RewardError(
            f"the reward failed on {where}: {score.outcome}: {score.message}",
            why=f"the share is above reward.max_failures = {self._max_failures:g}",
            fix="fix the function, or raise reward.max_failures or reward.timeout_s",
        )


class Cost(Reward):
    """A reward function whose scores are called ``costs``: higher is worse."""

    field = "costs"

    @endpoint(
        DP,
        reads=("tokens", "loss_mask", "columns"),
        writes=COST_FIELDS,
        measures=cost_metrics,
        by_groups=True,
    )
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout; see Reward, with ``costs`` for ``rewards``."""
        return super().score(rollouts)


def require_readable(name: str, why: Sequence[str]) -> None:
    """Refuse rows if a model can read none; ``why`` has each row's reason, empty if it is readable.

    Raises:
        RewardError: there are rows, and the model can read none.
    """
    if why and all(why):
        raise RewardError(
            f"the {name} can read none of {len(why)} rows; the first: {why[0]}",
            why="rows without a score cannot be trained on",
            fix=f"choose a {name} whose tokeniser and context hold the policy's rows",
        )


def scored_rows(
    rollouts: Batch, texts: Sequence[str], scores: Sequence[Score], name: str = "rewards"
) -> Batch:
    """Return the fields of ``Reward.score``, the first of them called ``name``.

    Args:
        rollouts: B rows.
        texts: their answers.
        scores: their outcomes.
        name: name of the values' field.
    """
    return Batch(
        ids=rollouts.ids,
        fields={
            name: torch.tensor([score.value or 0.0 for score in scores], dtype=torch.float32),
            "valid": torch.tensor([score.outcome is Outcome.SCORE for score in scores], dtype=torch.bool),
            "outcome": torch.tensor([OUTCOMES.index(score.outcome) for score in scores], dtype=torch.int8),
            "completion": Ragged.from_text(texts),
            "message": Ragged.from_text([score.message for score in scores]),
        },
    )

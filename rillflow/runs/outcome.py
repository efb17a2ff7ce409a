"""RunOutcome: what a run's held-out scores and its training signal say together, and what to try next.

held-out scores ─ compared ─────────┐
metrics of the last phase ─ signal ─┴─ judge ─> RunOutcome: kind, sentences, what to try with a number

A person looks at the same numbers: the held-out score before and after, the signal of the first and last
steps, and the lowest steps in between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rillflow.records.metrics import Metrics
from rillflow.runs import uniform_rewards
from rillflow.runs.formatting import number
from rillflow.runs.json_lines import JSON
from rillflow.runs.reader import EvaluationRecord
from rillflow.runs.run_data import RunData
from rillflow.runs.trend import Trend, trend_of
from rillflow.runs.uniform_rewards import without_lesson

REWARD, RETURN = "reward/score/mean", "episode/return/mean"
LOSSES = (
    "preference/loss/mean",
    "judge/loss/mean",
    "pairs/loss/mean",
    "answers/loss/mean",
    "supervised/nll/mean",
)
"""Losses of the phases without a reward, in the order in which they are looked for."""
LENGTH, STOPPED, FLAT = "rollout/length/mean", "rollout/stopped/share", "reward/flat_groups/share"
MOSTLY = 0.9
"""Share of the steps, or of the groups, from which on they count as all."""
GROWTH = 1.5
"""Growth of the answers that is warned of, if many of them reach the token limit."""
CUT = 0.5
"""Share of answers at the token limit that is warned of."""
NEAR_BEST = 0.95
"""Share of the way from the least to the largest reward from which on a score is near its best."""
FACTOR = 3.0
"""Factor between a learning rate and the next one to try."""
WARMUP_STEPS = 10
"""Warm-up to try where the first steps destroy."""


MODEL_RATE = "policy.lr"
"""Learning rate of a language model's run."""
_READ = "read the worst samples and the reward's outcomes in the report, then "


class OutcomeKind(StrEnum):
    """Kinds of outcomes."""

    ROSE = "rose"
    """The held-out score or the reward rose clearly."""
    CHANCE = "chance"
    """No change is clear."""
    FELL = "fell"
    """The held-out score or the reward fell clearly."""
    COLLAPSED = "collapsed"
    """Most of a level that the run had is lost at its end."""
    NO_SIGNAL = "no signal"
    """The rewards of a step were all equal, or there were none."""
    UNKNOWN = "unknown"
    """Nothing was measured twice."""


class ScoreChange(StrEnum):
    """ScoreChange of the held-out score."""

    UP = "up"
    DOWN = "down"
    UNCLEAR = "unclear"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to try next."""

    text: str
    """What and why, in one sentence without a full stop."""
    settings: tuple[str, ...] = ()
    """Settings of the run to try, as for ``--set``; empty if no setting is named."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What a run's numbers say."""

    kind: OutcomeKind
    """The kind."""
    trend: Trend | None
    """Course of the training signal; None without one."""
    sentences: tuple[str, ...]
    """What the numbers say, beyond the verdict about the held-out score."""
    warnings: tuple[str, ...]
    """What is wrong."""
    advice: tuple[Advice, ...]
    """What to try; empty if the run learned."""
    is_destroyed: bool
    """Whether a few steps lost most of a level, whether or not it came back."""


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The numbers that a judgement reads."""

    change: ScoreChange
    before: EvaluationRecord | None
    after: EvaluationRecord | None
    trend: Trend | None
    best: float | None
    """Largest reward that was seen."""
    floor: float | None
    """Least reward that was seen."""
    uniform: str
    """Why nearly no step has a training signal; empty if most have one."""
    flat: float
    """Mean share of groups with equal rewards in the last steps; NaN if unknown."""
    cut: str
    """Warning about answers that grew into the token limit; empty without one."""
    greedy: bool
    """Whether the held-out answers are the most likely ones, unlike those of training."""
    rate: str
    """Setting of the learning rate."""
    lr: float | None
    warmup: int | None
    updates_warmed: bool
    """Whether the recipe warms up at least ``WARMUP_STEPS`` steps."""


def judge(data: RunData, scores: Sequence[EvaluationRecord]) -> RunOutcome:
    """Judge a run by its held-out scores, in order, and by the metrics of its last phase."""
    seen = _look(data, scores)
    kind = _kind(seen)
    return RunOutcome(
        kind=kind,
        trend=seen.trend,
        sentences=tuple(_sentences(seen, kind)),
        warnings=tuple(_warnings(seen, kind)),
        advice=tuple(_advice(seen, kind)),
        is_destroyed=seen.trend is not None and seen.trend.largest is not None,
    )


def compared(before: EvaluationRecord | None, after: EvaluationRecord | None) -> ScoreChange:
    """Return the change of the held-out score; clear if the two intervals do not overlap."""
    if before is None or after is None or math.isnan(before.value) or math.isnan(after.value):
        return ScoreChange.UNKNOWN
    one, other = _ends(before, after)
    if other[0] > one[1]:
        return ScoreChange.UP
    return ScoreChange.DOWN if other[1] < one[0] else ScoreChange.UNCLEAR


def _ends(
    before: EvaluationRecord, after: EvaluationRecord
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return both intervals; equal rewards have none, and are then taken as exact beside an interval."""
    one, other = before.interval, after.interval
    if one is None and other is None:
        return (-math.inf, math.inf), (-math.inf, math.inf)
    return one or (before.value, before.value), other or (after.value, after.value)


def signal(data: RunData) -> Trend | None:
    """Return the trend of the last phase's reward or return, or of its loss if it has neither."""
    if not data.phases:
        return None
    names, phase = data.curves.names, data.phases[-1].name
    found = {REWARD: "training reward", RETURN: "training return", **dict.fromkeys(LOSSES, "training loss")}
    for name, words in found.items():
        curve = data.curves.curve(name, phase=phase) if name in names else None
        if curve is not None and len(curve):
            is_reward = name == REWARD
            return trend_of(
                curve.x.astype(int).tolist(),
                curve.y.tolist(),
                name=words,
                floor=_extreme(data, uniform_rewards.LOW) if is_reward else None,
                top=_extreme(data, uniform_rewards.HIGH) if is_reward else None,
                answers=float(curve.weights[0]) if is_reward else None,
                is_loss=name in LOSSES,
            )
    return None


def _extreme(data: RunData, name: str) -> float | None:
    """Return the least or largest reward of the last phase; None without one."""
    if name not in data.curves.names:
        return None
    values = [y for y in data.curves.curve(name, phase=data.phases[-1].name).y.tolist() if math.isfinite(y)]
    return None if not values else max(values) if name == uniform_rewards.HIGH else min(values)


def rate_setting(data: RunData) -> str:
    """Return the dotted key of a run's learning rate; empty if its kind of recipe has none."""
    return MODEL_RATE if data.setting("kind") is None else _rate_in(data.setting("algorithm"), "algorithm")


def _rate_in(section: JSON, prefix: str) -> str:
    """Return the dotted key of the first setting ``lr`` in a section; empty without one."""
    if not isinstance(section, Mapping):
        return ""
    if "lr" in section:
        return f"{prefix}.lr"
    found = (_rate_in(value, f"{prefix}.{name}") for name, value in section.items())
    return next(filter(None, found), "")


def _look(data: RunData, scores: Sequence[EvaluationRecord]) -> _Seen:
    before, after = (scores[0], scores[-1]) if len(scores) > 1 else (None, None)
    has_phase, rate = bool(data.phases), rate_setting(data)
    lr, warmup = data.setting(rate) if rate else None, data.setting("policy.warmup_steps")
    return _Seen(
        change=compared(before, after),
        before=before,
        after=after,
        trend=signal(data),
        best=_extreme(data, uniform_rewards.HIGH) if has_phase else None,
        floor=_extreme(data, uniform_rewards.LOW) if has_phase else None,
        uniform=_uniform(data) if has_phase else "",
        flat=_level(data, FLAT, first=False),
        cut=_cut(data) if has_phase else "",
        greedy=data.setting("evaluate.temperature") == 0,
        rate=rate,
        lr=float(lr) if isinstance(lr, int | float) else None,
        warmup=warmup if isinstance(warmup, int) else None,
        updates_warmed=isinstance(warmup, int) and warmup >= WARMUP_STEPS,
    )


def _uniform(data: RunData) -> str:
    """Return the most frequent reason of steps without a training signal, if nearly all are; else nothing."""
    names = (uniform_rewards.SHARE, uniform_rewards.LOW, uniform_rewards.HIGH)
    steps: list[Metrics] = [metrics for _, metrics in data.curves.records(names, data.phases[-1].name)]
    why = Counter(reason for metrics in steps if (reason := without_lesson(metrics)) is not None)
    if not why or sum(why.values()) < MOSTLY * len(steps):
        return ""
    return why.most_common(1)[0][0]


def _level(data: RunData, name: str, *, first: bool) -> float:
    """Return the mean of a metric over the first or the last tenth of the last phase's steps; NaN without."""
    if not data.phases or name not in data.curves.names:
        return math.nan
    y = data.curves.curve(name, phase=data.phases[-1].name).y
    count = max(1, len(y) // 10)
    return float(y[:count].mean() if first else y[-count:].mean()) if len(y) else math.nan


def _cut(data: RunData) -> str:
    """Return a warning about answers that grew until many of them reach the token limit."""
    then, now = (_level(data, LENGTH, first=first) for first in (True, False))
    before, cut = (1 - _level(data, STOPPED, first=first) for first in (True, False))
    if not (now > GROWTH * then and cut > CUT and cut > GROWTH * before):
        return ""
    return (
        f"answers grew from {number(then)} to {number(now)} tokens, and {cut:.0%} of them end at "
        f"rollout.max_tokens (first steps {before:.0%}): read the longest samples. If they are no better, "
        "the reward pays for length: try algorithm.missing_end_penalty or algorithm.shape.length_price"
    )


def _kind(seen: _Seen) -> OutcomeKind:
    trend, change = seen.trend, seen.change
    if trend is not None and trend.has_collapsed:
        return OutcomeKind.COLLAPSED
    if change is ScoreChange.DOWN and _lost_share(seen) > 0.5:
        return OutcomeKind.COLLAPSED
    if seen.uniform:
        return OutcomeKind.NO_SIGNAL
    if trend is None or (trend.is_loss and change is not ScoreChange.UNKNOWN):
        kinds = {
            ScoreChange.UP: OutcomeKind.ROSE,
            ScoreChange.DOWN: OutcomeKind.FELL,
            ScoreChange.UNCLEAR: OutcomeKind.CHANCE,
        }
        return kinds.get(change, OutcomeKind.UNKNOWN)
    if change is ScoreChange.DOWN or (trend.is_clear_fall and change is not ScoreChange.UP):
        return OutcomeKind.FELL
    if change is ScoreChange.UP or trend.is_clear_rise:
        return OutcomeKind.ROSE
    return OutcomeKind.CHANCE


def _lost_share(seen: _Seen) -> float:
    """Return the lost share of the held-out score's first value, measured as ``trend_of`` measures it."""
    if seen.before is None or seen.after is None:
        return 0.0
    before, after = seen.before.value, seen.after.value
    if before < 0:  # a cost
        return (before - after) / -before
    floor = min(after, 0.0 if seen.floor is None else seen.floor)
    return (before - after) / (before - floor) if before > floor else 0.0


def _sentences(seen: _Seen, kind: OutcomeKind) -> list[str]:
    trend, found = seen.trend, list[str]()
    if trend is None:
        return found
    if kind is OutcomeKind.ROSE and trend.is_clear_rise and seen.change is ScoreChange.UNCLEAR:
        near = seen.before is not None and _is_near_best(seen, seen.before.value)
        why = "; it began near its best" if near else ""
        found.append(f"The {trend.name} rose clearly, the held-out score did not{why}.")
        rose = 0.0 if seen.before is None or seen.after is None else seen.after.value - seen.before.value
        if seen.after is not None and rose >= trend.gain / 2 and not trend.is_loss:
            found.append(
                f"{seen.after.rows} are too few to tell: a larger task.held_out narrows the intervals."
            )
        elif seen.greedy:
            found.append(
                "The held-out answers are greedy, those of training are sampled: evaluate.temperature = 1 "
                "measures what training raises."
            )
    if kind is OutcomeKind.ROSE and trend.is_clear_fall and not trend.is_loss:
        found.append(f"The held-out score rose, but the {trend.name} fell.")
    if kind is OutcomeKind.FELL and seen.change is ScoreChange.DOWN and trend.is_clear_rise:
        found.append(f"The {trend.name} improved while the held-out score fell.")
    if kind is OutcomeKind.FELL and seen.change is ScoreChange.UNCLEAR:
        found.append(f"The {trend.name} fell clearly, the held-out score did not.")
        if seen.greedy:
            found.append(
                "The held-out answers are greedy, those of training are sampled: evaluate.temperature = 1 "
                "measures the sampled ones."
            )
    return found


def _is_near_best(seen: _Seen, value: float) -> bool:
    """Return whether a reward is near the largest that was seen."""
    if seen.best is None or seen.floor is None or seen.best <= seen.floor:
        return False
    return value >= seen.floor + NEAR_BEST * (seen.best - seen.floor)


def _warnings(seen: _Seen, kind: OutcomeKind) -> list[str]:
    trend, found = seen.trend, list[str]()
    lower, warm = _lower(seen), _warm(seen)
    tries = f"{lower}, and {warm}" if lower and warm else lower or warm
    if trend is not None and trend.largest is not None:
        lost, verb = trend.largest, "rose" if trend.is_loss else "fell"
        then, low = number(lost.before), number(lost.lowest)
        steps = f"from {then} at step {lost.first:,} to {low} at step {lost.last:,}"
        suddenly = ", most of it in one step" if lost.is_sudden else ""
        if kind is OutcomeKind.COLLAPSED:
            ends = f", and is {number(trend.last)} at the end"
            found.append(
                f"the policy collapsed: the {trend.name} {verb} {steps}{suddenly}{ends}. Try {tries}"
            )
        else:
            ends = f"; it came back to {number(trend.last)}"
            found.append(
                f"a few steps destroyed most of the policy: the {trend.name} {verb} {steps}{suddenly}"
                f"{ends}. Try {tries}"
            )
    elif kind is OutcomeKind.COLLAPSED:
        found.append(f"the model collapsed: the held-out score lost most of its value. Try {tries}")
    return [*found, *filter(None, [seen.cut])]


def _lower(seen: _Seen) -> str:
    """Return the advice for a lower rate in words; empty if the rate is unknown."""
    return "" if seen.lr is None else f"{seen.rate} = {_near(seen.lr / FACTOR)}, a third of {_rate(seen.lr)}"


def _warm(seen: _Seen) -> str:
    """Return the advice for a warm-up in words; empty if there is one, or no such setting."""
    if seen.warmup is None or seen.updates_warmed:
        return ""
    return f"policy.warmup_steps = {WARMUP_STEPS} (now {seen.warmup})"


def _rate(lr: float, digits: int = 3) -> str:
    """Format a learning rate. Example: ``_rate(2.5e-05) == "2.5e-5"``."""
    mantissa, _, exponent = f"{lr:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def _near(lr: float) -> str:
    """Return a rate to try, rounded to one digit if that changes it by little, else to two."""
    return _rate(lr, 1) if math.isclose(float(_rate(lr, 1)), lr, rel_tol=0.12) else _rate(lr, 2)


def _setting(lr: float, name: str) -> str:
    return f"{name}={_near(lr)}"


def _advice(seen: _Seen, kind: OutcomeKind) -> list[Advice]:
    trend, is_destroyed = seen.trend, seen.trend is not None and seen.trend.largest is not None
    if kind in (OutcomeKind.ROSE, OutcomeKind.UNKNOWN) and not is_destroyed:
        return []
    if kind is OutcomeKind.NO_SIGNAL:
        return [_without_signal(seen)]
    if kind in (OutcomeKind.COLLAPSED, OutcomeKind.FELL) or is_destroyed:
        return [_softer(seen, kind)]
    if trend is not None and seen.flat >= MOSTLY:
        return [_flat(seen, trend)]
    if trend is not None and not trend.is_loss and _is_near_best(seen, trend.last):
        return [Advice(text="the reward is near its best: try harder prompts")]
    return _stronger(seen)


def _without_signal(seen: _Seen) -> Advice:
    if seen.uniform.startswith("no answer"):
        return Advice(
            text="no answer had a reward: read the reward's messages in the report, and mend the reward"
        )
    if seen.before is not None and seen.after is not None and seen.before.value > seen.after.value:
        return Advice(text=f"{seen.uniform}: read the samples, and try a lower {seen.rate}")
    return Advice(
        text=f"{seen.uniform} in nearly every step, so there is nothing to learn from: if answers are right, "
        "try harder prompts; if they are wrong, easier prompts or a warm start; else mend the reward"
    )


def _flat(seen: _Seen, trend: Trend) -> Advice:
    share = f"{seen.flat:.0%} of the prompts have equal rewards for all their answers"
    low, high = seen.floor, seen.best
    is_low = low is None or high is None or trend.last < (low + high) / 2
    hint = (
        "easier prompts, a warm start, partial credit in the reward, or a larger algorithm.samples_per_prompt"
        if is_low
        else "harder prompts"
    )
    return Advice(text=f"{share}: try {hint}")


def _softer(seen: _Seen, kind: OutcomeKind) -> Advice:
    """Return the advice for a lower learning rate, with a warm-up where a level was lost."""
    if seen.lr is None:
        return Advice(text="try a lower learning rate")
    is_lost = kind is OutcomeKind.COLLAPSED or (seen.trend is not None and seen.trend.largest is not None)
    warm = _warm(seen) if is_lost else ""
    settings = (
        _setting(seen.lr / FACTOR, seen.rate),
        *([f"policy.warmup_steps={WARMUP_STEPS}"] if warm else []),
    )
    words = f"try {_lower(seen)}" + (f", and {warm}" if warm else "")
    is_learnt_by_heart = kind is OutcomeKind.FELL and seen.trend is not None and seen.trend.is_clear_rise
    if is_learnt_by_heart:
        words = f"read the best-scored samples, then {words}"
    return Advice(text=words, settings=settings)


def _stronger(seen: _Seen) -> list[Advice]:
    """Return the advice if nothing is clear: more steps first if it leans upwards, then a higher rate."""
    if seen.lr is None:
        return [Advice(text="read the worst samples, then try a higher learning rate")]
    read = _READ if seen.rate == MODEL_RATE else ""  # another kind of recipe has no samples to read
    gain = 0.0 if seen.trend is None else seen.trend.errors
    held = 0.0 if seen.before is None or seen.after is None else seen.after.value - seen.before.value
    if (gain < -1 and held <= 0) or (held < 0 and gain < 1):
        return [
            Advice(
                text=f"{read}try {_lower(seen)}",
                settings=(_setting(seen.lr / FACTOR, seen.rate),),
            )
        ]
    longer = "train longer, or " if gain > 1 or held > 0 else ""
    higher = f"{seen.rate} = {_near(FACTOR * seen.lr)}, three times {_rate(seen.lr)}"
    text = f"{read}{longer}try {higher}"
    return [Advice(text=text, settings=(_setting(FACTOR * seen.lr, seen.rate),))]

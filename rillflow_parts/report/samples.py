"""Samples: choose the rollouts that the report shows, and draw a row token by token.

    rollouts/ ─ a few files, from the first to the last step ─> best, worst, longest
                                 first and last file only ─> the same task, then and now

A darker token had a lower probability when it was sampled, so a reader sees which tokens decided a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rillflow.runs.layout import rollout_files
from rillflow.runs.reader import read_rollouts
from rillflow.runs.rollouts import RolloutRecord
from rillflow_parts.report.html import Html, card, cut, el, table

MAX_FILES = 8
NUM_SHOWN = 5
NUM_COMPARED = 8
MAX_TOKENS = 300
MAX_CHARACTERS = 1500
BRIEF_CHARACTERS = 100
SHADES = (0.9, 0.7, 0.5, 0.25, 0.1, 0.03)
"""Probabilities below which a token is one shade darker."""
END = "■"
"""Symbol for the end-of-sequence token."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A row and the step that sampled it."""

    step: int
    """Step that sampled the row."""
    rollout: RolloutRecord
    """The row."""

    @property
    def confidence(self) -> float:
        """Mean log probability of the sampled tokens; 0 without any."""
        finite = [value for value in self.logprobs if math.isfinite(value)]
        return sum(finite) / len(finite) if finite else 0.0

    @property
    def logprobs(self) -> list[float]:
        """Log probabilities of the sampled tokens."""
        return [self.rollout.logprobs[place] for place in self.rollout.sampled]


def read_samples(run: Path) -> list[list[Sample]]:
    """Read the rows of up to MAX_FILES steps, evenly from the first to the last, one list per step."""
    steps = list(rollout_files(run))
    if len(steps) > MAX_FILES:
        steps = [steps[place * (len(steps) - 1) // (MAX_FILES - 1)] for place in range(MAX_FILES)]
    read = ([Sample(step=step, rollout=row) for row in read_rollouts(run, step)] for step in steps)
    return [samples for samples in read if samples]


def best(samples: Iterable[Sample], count: int = NUM_SHOWN) -> list[Sample]:
    """Return the highest rewards.

    Ties go to the rows of which the policy was least sure, which teach most.
    """
    return _extreme(samples, -1, count)


def worst(samples: Iterable[Sample], count: int = NUM_SHOWN) -> list[Sample]:
    """Return the lowest rewards; ties go to the rows of which the policy was surest."""
    return _extreme(samples, 1, count)


def longest(samples: Iterable[Sample], count: int = NUM_SHOWN) -> list[Sample]:
    """Return the rows with the most sampled tokens, one per prompt first.

    Repeated prompts fill up the count.
    """
    ordered = _distinct(sorted(samples, key=lambda one: -len(one.rollout.sampled)), None)
    first = {one.rollout.prompt: one for one in reversed(ordered)}
    return sorted(ordered, key=lambda one: one is not first[one.rollout.prompt])[:count]


def draw_groups(read: Sequence[Sequence[Sample]]) -> list[Html]:
    """Draw best and worst rows of the last step that was read, and the longest rows of all steps."""
    every = [sample for samples in read for sample in samples]
    last = read[-1] if read else []
    step = f" of step {last[0].step}" if last else ""
    groups = (
        (f"Best{step}", "Highest reward; ties go to the answers with the lowest confidence.", best(last)),
        (f"Worst{step}", "Lowest reward; ties go to the answers with the highest confidence.", worst(last)),
        ("Longest", "Most sampled tokens, from all steps read; one row per prompt first.", longest(every)),
    )
    return [
        card(title, map(draw_sample, chosen), hint=hint, kind="card samples")
        for title, hint, chosen in groups
        if chosen
    ]


def draw_comparison(read: Sequence[Sequence[Sample]]) -> list[Html]:
    """Draw a few rows of the first and the last step side by side; return nothing for a single step."""
    if len(read) < 2:
        return []
    return [el("div", (_column(samples) for samples in (read[0], read[-1])), class_="pair")]


def draw_pairs(read: Sequence[Sequence[Sample]]) -> list[Html]:
    """Draw the best and the worst answer to a few prompts of the last step, side by side with their
    scores.
    """
    groups: dict[str, list[Sample]] = {}
    for one in _scored(read[-1] if read else []):
        groups.setdefault(one.rollout.prompt, []).append(one)
    pairs = [(max(group, key=_reward), min(group, key=_reward)) for group in groups.values()]
    told = [pair for pair in pairs if _reward(pair[0]) > _reward(pair[1])]
    told.sort(key=lambda pair: _reward(pair[1]) - _reward(pair[0]))
    rows = [
        (
            _brief(high.rollout.prompt),
            *((_badges(one.rollout)[:1], " ", _told(one.rollout)) for one in (high, low)),
        )
        for high, low in told[:NUM_COMPARED]
    ]
    return [card("", table(rows, ("Prompt", "Best answer", "Worst answer"), kind="brief"))] if rows else []


def draw_sample(sample: Sample) -> Html:
    """Draw one row: its score, its prompt, and its answer with every token shaded.

    A conversation is drawn whole: its own text up to the first answer stands in place of the prompt.
    """
    row = sample.rollout
    facts = [
        *_badges(row),
        el("span", f"step {sample.step}"),
        el("span", f"{len(row.sampled):,} token{'' if len(row.sampled) == 1 else 's'}"),
        *([el("span", "cut off at the limit", class_="warn")] if row.finish == "length" else []),
        el("span", str(row.row)),
    ]
    return el(
        "article",
        el("p", facts, class_="facts"),
        el("div", cut(_opening(row), MAX_CHARACTERS), class_="prompt"),
        el("div", _answer(sample), class_="answer"),
        [el("p", cut(row.message, 300), class_="bad")] if row.message else [],
    )


def shade_key() -> Html:
    """Draw the legend of the shades."""
    words = ["over 90%", *(f"under {probability:.0%}" for probability in SHADES)]
    keys = (el("i", f" {word} ", class_=f"s{level}") for level, word in enumerate(words))
    told = "Probability of each token when it was sampled: "
    return el("p", told, el("span", keys, class_="tokens"), class_="legend")


def _column(samples: Sequence[Sample]) -> Html:
    stride = max(1, len(samples) // NUM_COMPARED)
    rows = [
        (_badges(one.rollout)[:1], (_brief(one.rollout.prompt), " ", _told(one.rollout)))
        for one in samples[::stride][:NUM_COMPARED]
    ]
    return card(f"Step {samples[0].step}", table(rows, kind="brief"))


def _told(row: RolloutRecord) -> list[Html | str]:
    """Return a shortened answer; text that a tool or an environment inserted stays grey."""
    pieces = _pieces(row)
    if all(is_sampled for is_sampled, _ in pieces):
        return [el("span", _brief(row.completion))]
    found, left = list[Html | str](), BRIEF_CHARACTERS
    for is_sampled, text in pieces:
        short = cut(text.replace("\n", " "), left) if left > 0 else ""
        found.append(el("span", short) if is_sampled else short)
        left -= len(text)
    return found


def _pieces(row: RolloutRecord) -> list[tuple[bool, str]]:
    """Return the text from the first sampled token on, split into sampled and inserted stretches."""
    if len(row.token_texts) != len(row.tokens) or not row.sampled:
        return []
    own = set(row.sampled)
    places = range(row.sampled[0], len(row.tokens))
    return [
        (is_sampled, "".join(row.token_texts[place] for place in stretch))
        for is_sampled, stretch in groupby(places, own.__contains__)
    ]


def _opening(row: RolloutRecord) -> str:
    """Return the text before the first answer: of a row with inserted text, its own; else the prompt."""
    if all(is_sampled for is_sampled, _ in _pieces(row)):
        return row.prompt
    return "".join(row.token_texts[: row.sampled[0]]) or row.prompt


def _brief(text: str) -> str:
    return cut(" ".join(text.split()), BRIEF_CHARACTERS)


def _answer(sample: Sample) -> Html | list[Html]:
    texts, logprobs = _token_texts(sample.rollout), sample.logprobs
    if not texts:  # draw only the shades
        heat = el("div", map(_shaded, logprobs[:MAX_TOKENS]), class_="heat")
        return [el("div", cut(sample.rollout.completion, MAX_CHARACTERS)), heat]
    row, shown = sample.rollout, []
    has_texts = len(row.token_texts) == len(row.tokens)
    for number, (text, logprob) in enumerate(zip(texts[:MAX_TOKENS], logprobs[:MAX_TOKENS], strict=True)):
        shown.append(_shaded(logprob, text.replace("\n", "↵\n").replace("\t", "⇥\t") or "·"))
        end = row.sampled[number + 1] if number + 1 < len(row.sampled) else len(row.tokens)
        inserted = "".join(row.token_texts[row.sampled[number] + 1 : end]) if has_texts else ""
        if inserted:
            shown.append(
                el("q", cut(inserted, MAX_CHARACTERS), title="not sampled: from a tool or environment")
            )
    left = max(0, len(texts) - MAX_TOKENS)
    return el("span", shown, f" … {left:,} more token{'s' * (left > 1)}" if left else "", class_="tokens")


def _token_texts(row: RolloutRecord) -> Sequence[str]:
    """Return the text of each sampled token, as recorded or, for a character tokenizer, from the
    completion.
    """
    count = len(row.sampled)
    if len(row.token_texts) == len(row.tokens):
        return [row.token_texts[place] for place in row.sampled]
    ended = [END] if row.finish == "stop" and len(row.completion) == count - 1 else []
    characters = [*row.completion, *ended]
    return characters if len(characters) == count else ()


def _shaded(logprob: float, text: str = "") -> Html:
    """Draw a token, the darker the lower its probability was."""
    if not math.isfinite(logprob):
        return el("i", text, class_=f"s{len(SHADES)}", title="not finite")
    probability = math.exp(min(0.0, logprob))
    shade = sum(probability < limit for limit in SHADES)
    return el("i", text, class_=f"s{shade}", title=f"{probability:.0%} ({logprob:.2f})")


_ADVANTAGE = (
    "how much better the reward is than that of the prompt's other answers; the update is weighted by it"
)


def _badges(row: RolloutRecord) -> list[Html]:
    if row.reward is None:
        return [el("span", row.outcome or "not scored", class_="badge low")]
    kind = "low" if row.reward <= 0 else "high"
    badges = [el("span", f"reward {row.reward:.3g}", class_=f"badge {kind}")]
    if row.advantage is not None:
        badges.append(el("span", f"advantage {row.advantage:+.3g}", title=_ADVANTAGE))
    return badges


def _scored(samples: Iterable[Sample]) -> list[Sample]:
    return [one for one in samples if math.isfinite(_reward(one))]


def _extreme(samples: Iterable[Sample], sign: int, count: int) -> list[Sample]:
    """Return the lowest rewards for sign 1, the highest for -1, without the rewards at the other end."""
    scored = _scored(samples)
    other_end = max((sign * _reward(one) for one in scored), default=0.0)
    found = [one for one in scored if sign * _reward(one) != other_end]
    return _distinct(sorted(found, key=lambda one: (sign * _reward(one), -sign * one.confidence)), count)


def _reward(sample: Sample) -> float:
    return sample.rollout.reward if sample.rollout.reward is not None else math.nan


def _distinct(samples: Iterable[Sample], count: int | None) -> list[Sample]:
    """Return the first ``count`` samples that differ in prompt and completion; None returns all."""
    chosen: dict[tuple[str, str], Sample] = {}
    for one in samples:
        if len(chosen) == count:
            break
        chosen.setdefault((one.rollout.prompt, one.rollout.completion), one)
    return list(chosen.values())

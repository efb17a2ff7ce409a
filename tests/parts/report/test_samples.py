"""The choice of shown rows, and the display of a row's tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rillflow.records.row import RowId
from rillflow.runs.rollouts import RolloutRecord
from rillflow.runs.run_directory import RunDirectory
from rillflow_parts.report.html import el, markup
from rillflow_parts.report.samples import (
    Sample,
    best,
    draw_comparison,
    draw_pairs,
    draw_sample,
    longest,
    read_samples,
    worst,
)
from tests.unit.written_rollouts import write_rollouts

ROW = RolloutRecord(
    row=RowId(0, 0, 0),
    prompt="1+1=",
    completion="2",
    tokens=(2,),
    token_texts=(),
    logprobs=(-0.1,),
    versions=(0,),
    finish="length",
    reward=1.0,
    outcome="score",
    message="",
    advantage=None,
    columns={},
)


def tokens(*logprobs: float, **fields: Any) -> RolloutRecord:
    """Return a row of these tokens, all of them sampled unless ``versions`` says otherwise."""
    count = len(logprobs)
    return replace(ROW, **{"tokens": (1,) * count, "logprobs": logprobs, "versions": (0,) * count, **fields})


def sample(completion: str, reward: float | None, logprob: float = -0.1, count: int = 1) -> Sample:
    return Sample(step=1, rollout=tokens(*[logprob] * count, completion=completion, reward=reward))


def texts(samples: list[Sample]) -> list[str]:
    return [one.rollout.completion for one in samples]


SAMPLES = [
    sample("sure and right", 1.0, -0.01),
    sample("unsure and right", 1.0, -2.0),
    sample("unsure and right", 1.0, -2.0),
    sample("sure and wrong", 0.0, -0.01),
    sample("unsure and wrong", 0.0, -2.0),
    sample("half", 0.5, -1.0, count=9),
    sample("not scored", None, count=99),
    sample("nan", math.nan),
]


def test_best_are_the_least_sure_of_the_highest_without_doubles() -> None:
    assert texts(best(SAMPLES, 3)) == ["unsure and right", "sure and right", "half"]


def test_worst_are_the_surest_of_the_lowest_and_never_among_the_best() -> None:
    assert texts(worst(SAMPLES, 9)) == ["sure and wrong", "unsure and wrong", "half"]
    assert texts(worst([one for one in SAMPLES if one.rollout.reward == 1.0])) == []


def test_longest_counts_rows_without_a_score_too() -> None:
    assert texts(longest(SAMPLES, 2)) == ["not scored", "half"]


def test_longest_shows_other_prompts_before_further_rows_of_one() -> None:
    rows = [
        Sample(step=1, rollout=tokens(*[-0.1] * count, prompt=prompt, completion=str(count)))
        for count, prompt in ((6, "a"), (9, "a"), (8, "a"), (7, "b"))
    ]
    found = [(row.rollout.prompt, len(row.rollout.sampled)) for row in longest(rows, 3)]
    assert found == [("a", 9), ("b", 7), ("a", 8)]


def test_a_long_run_is_read_at_a_few_steps_first_and_last_among_them(tmp_path: Path) -> None:
    row = {"epoch": 0, "prompt_id": 0, "sample": 0, "finish": "stop"}
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for step in range(1, 101):
            write_rollouts(run.path, step, [row] if step != 100 else [row, row])
    read = read_samples(tmp_path / "run")
    assert len(read) == 8
    assert (read[0][0].step, read[-1][0].step, len(read[-1])) == (1, 100, 2)


def test_a_token_is_shaded_by_its_probability() -> None:
    row = tokens(
        0.0, -0.01, -0.6, -9.0, token_texts=("prompt", "sure", "even", "odd"), versions=(-1, 2, 2, 2)
    )
    html = draw_sample(Sample(step=1, rollout=row))
    assert '<i class="s0" title="99% (-0.01)">sure</i>' in html
    assert '<i class="s2" title="55% (-0.60)">even</i>' in html
    assert '<i class="s6" title="0% (-9.00)">odd</i>' in html
    assert "3 tokens" in html and ">prompt</i>" not in html


def test_characters_stand_for_tokens_where_each_token_is_one() -> None:
    row = tokens(-0.01, -0.6, -9.0, completion="42", finish="stop")
    html = draw_sample(Sample(step=1, rollout=row))
    assert html.count("<i ") == 3
    assert ">4</i>" in html and ">■</i>" in html


def test_without_the_tokens_texts_the_completion_and_its_shades_are_shown() -> None:
    row = tokens(-0.01, -math.inf, completion="forty-two")
    html = draw_sample(Sample(step=1, rollout=row))
    assert ">forty-two</div>" in html
    assert '<i class="s6" title="not finite"></i>' in html


GAME = tokens(
    *[0.0] * 2,
    *(-0.1, 0.0, -0.2),
    prompt="?",
    completion="25",
    token_texts=("<user>", "?", "2", " <too> low ", "5"),
    versions=(-1, -1, 0, -1, 0),
)
"""A guess, the game's answer, and another guess."""


def test_text_that_was_not_sampled_is_drawn_in_grey() -> None:
    html = draw_sample(Sample(step=1, rollout=GAME))
    shown = '>2</i><q title="not sampled: from a tool or environment"> &lt;too&gt; low </q><i '
    assert shown in html and ">5</i>" in html and "2 tokens" in html
    other = replace(GAME, row=RowId(0, 0, 1), reward=0.0)
    read = [[Sample(step=step, rollout=row) for row in (GAME, other)] for step in (1, 2)]
    for drawn in (draw_comparison(read), draw_pairs(read)):
        assert "<span>2</span> &lt;too&gt; low <span>5</span>" in "".join(map(str, drawn))
    assert "1 token<" in draw_sample(Sample(step=1, rollout=tokens(-0.1, completion="2")))


def test_a_conversation_is_drawn_whole() -> None:
    """The system message and the tool are the agent's own, and not in the prompt of the data."""
    row = tokens(
        *(0.0, -0.1, 0.0, -0.1),
        prompt="17+25",
        completion="calladded",
        token_texts=("<s>Use the tool. 17+25<a>", "call", "<tool>42<a>", "added"),
        versions=(-1, 0, -1, 0),
    )
    drawn = markup([draw_sample(Sample(step=1, rollout=row))])
    opening, answer = drawn.split('class="answer"')
    assert "&lt;s&gt;Use the tool. 17+25&lt;a&gt;" in opening
    assert answer.index(">call<") < answer.index("&lt;tool&gt;42&lt;a&gt;</q>") < answer.index(">added<")
    alone = replace(
        row, tokens=(1, 1), token_texts=("<s>17+25<a>", "42"), versions=(-1, 0), logprobs=(0.0, -0.1)
    )
    assert "&lt;s&gt;" not in markup([draw_sample(Sample(step=1, rollout=alone))]), "nothing was inserted"


def test_a_row_that_was_not_scored_says_why() -> None:
    row = replace(ROW, reward=None, outcome="timeout", message="longer than 10 s")
    html = draw_sample(Sample(step=7, rollout=row))
    assert ">timeout</span>" in html and "longer than 10 s" in html and "reward 0" not in html


def test_an_empty_completion_is_drawn() -> None:
    row = tokens(completion="")
    assert "0 tokens" in draw_sample(Sample(step=1, rollout=row))


def test_text_is_escaped_and_control_characters_are_pictures() -> None:
    assert el("p", "<b>", class_='"x"') == '<p class="&quot;x&quot;">&lt;b&gt;</p>'
    assert markup("a\x00b\x1b[31m\n") == "a␀b␛[31m\n"
    assert el("p", el("b", "x"), ["y", [el("i", "<")]], hidden=True, title=None) == (
        "<p hidden><b>x</b>y<i>&lt;</i></p>"
    )

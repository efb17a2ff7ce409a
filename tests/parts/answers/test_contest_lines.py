"""An evaluation of one model, or of two compared with each other, as lines of text."""

from __future__ import annotations

from typing import Any

from rillflow_parts.answers.contest_lines import contest_lines

ONE: dict[str, Any] = {"source": "one", "mean_length": 4.25, "mean_reward": 0.5, "pass@1": 0.5}
OTHER: dict[str, Any] = {"source": "other", "mean_length": 3.0, "mean_reward": None}
HEAD = "1,200 held-out prompts x 2 answers"
FIRST = "  one: 4.2 tokens, mean reward 0.500, pass@1 0.500"


def test_one_model_has_its_own_line_and_no_contest() -> None:
    assert contest_lines({"prompts": 1200, "samples": 2, "models": [ONE]}) == [HEAD, FIRST]


def test_two_models_have_their_wins_and_how_far_the_judge_can_be_trusted() -> None:
    found = {"prompts": 1200, "samples": 2, "models": [ONE, OTHER], "by": "a judge"}
    found |= {"wins": 3, "ties": 2, "losses": 1, "undecided": 4, "win_rate": 2 / 3, "interval": (0.5, 0.8)}
    found |= {"length_controlled": 0.6, "contradiction": 0.125, "position_bias": 0.05}
    assert contest_lines(found) == [
        HEAD,
        FIRST,
        "  other: 3.0 tokens",
        "one against other, by a judge: 3 won, 2 tied, 1 lost, 4 without a verdict",
        "  win rate 0.667 [0.500, 0.800], length-controlled 0.600",
        "  the two orders contradict each other on 12.5%; position bias to the first +0.050",
    ]

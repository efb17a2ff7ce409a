"""Contests: format the result of `rillflow evaluate` as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def contest_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the aggregate numbers as lines; single pairs are only in the result file."""
    answers = f" x {found['samples']} answers" if found["samples"] > 1 else ""
    lines = [f"{found['prompts']:,} held-out prompts{answers}", *map(_model_line, found["models"])]
    if len(found["models"]) == 1:
        return lines
    one, other = (model["source"] for model in found["models"])
    counts = f"{found['wins']} won, {found['ties']} tied, {found['losses']} lost"
    undecided = f", {found['undecided']} without a verdict" if found["undecided"] else ""
    lines.append(f"{one} against {other}, by {found['by']}: {counts}{undecided}")
    if "win_rate" in found:
        low, high = found["interval"]
        equal = f"length-controlled {found['length_controlled']:.3f}"
        lines.append(f"  win rate {found['win_rate']:.3f} [{low:.3f}, {high:.3f}], {equal}")
    if "contradiction" in found:
        bias = f"position bias to the first {found['position_bias']:+.3f}"
        lines.append(f"  the two orders contradict each other on {found['contradiction']:.1%}; {bias}")
    return lines


def _model_line(model: Mapping[str, Any]) -> str:
    said = [f"{model['mean_length']:.1f} tokens"]
    if model.get("mean_reward") is not None:
        said.append(f"mean reward {model['mean_reward']:.3f}")
    said += [f"{name} {value:.3f}" for name, value in model.items() if name.startswith("pass@")]
    return f"  {model['source']}: {', '.join(said)}"

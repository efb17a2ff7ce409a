"""Makes pairs.jsonl: every sum of two digits with its answer and some wrong ones.

Run it again after a change of it: python recipes/preference/make_pairs.py
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

WRONG = 8
"""Wrong answers to each sum."""


def wrong_answers(right: int, random: Random) -> list[str]:
    """What a model that learns to add writes: other sums, digits too many, digits missing."""
    text = str(right)
    other = [str(number) for number in range(19) if number != right]
    slips = [text + random.choice("0123456789"), random.choice("0123456789") + text, text[:-1], ""]
    slips = [slip for slip in dict.fromkeys(slips) if slip != text]
    return [*random.sample(other, WRONG - len(slips)), *slips]


def pairs() -> list[dict[str, str]]:
    """The rows of the file."""
    random = Random(0)
    return [
        {"prompt": f"{one}+{two}=", "chosen": str(one + two), "rejected": wrong}
        for one in range(10)
        for two in range(10)
        for wrong in wrong_answers(one + two, random)
    ]


if __name__ == "__main__":
    lines = "".join(f"{json.dumps(row)}\n" for row in pairs())
    Path(__file__).with_name("pairs.jsonl").write_text(lines, encoding="utf-8")

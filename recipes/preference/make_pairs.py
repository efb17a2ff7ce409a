"""Write pairs.jsonl: every sum of two digits with its right answer and with wrong ones.

After a change of this file, run: python recipes/preference/make_pairs.py
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

DIGITS = "0123456789"
LARGEST = 18
"""The largest sum."""


def wrong_answers(right: int, random: Random) -> list[str]:
    """Return every other sum, then typos: a digit too many, a digit too few, the empty text."""
    text = str(right)
    slips = [text + random.choice(DIGITS), random.choice(DIGITS) + text, text[1:], ""]
    found = dict.fromkeys([*map(str, range(LARGEST + 1)), *slips])
    return [answer for answer in found if answer != text]


def pairs() -> list[dict[str, str]]:
    """Return the rows of the file."""
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

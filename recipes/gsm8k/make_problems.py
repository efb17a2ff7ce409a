"""Write word problems in the form of GSM8K to ``problems/``: small sums, worked out, the answer after ####.

The files have the columns of GSM8K. Run it from the root of the repository:

    python recipes/gsm8k/make_problems.py
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

HERE = Path(__file__).parent
NAMES = ("ann", "ben", "eva", "tom", "kim", "leo")
THINGS = ("apples", "coins", "books", "eggs", "cards")
MORE = ("gets", "finds", "buys")
LESS = ("eats", "loses", "sells")


def problem(random: Random) -> dict[str, str]:
    """Return one problem with one or two steps."""
    name, thing = random.choice(NAMES), random.choice(THINGS)
    have = random.randint(1, 9)
    texts, steps = [f"{name} has {have} {thing}."], []
    for _ in range(random.randint(1, 2)):
        is_more = have < 2 or random.random() < 0.5
        change = random.randint(1, 9 if is_more else have - 1)
        after = have + change if is_more else have - change
        texts.append(f"{name} {random.choice(MORE if is_more else LESS)} {change}.")
        steps.append(f"{have}{'+' if is_more else '-'}{change}={after}")
        have = after
    texts.append("how many now?")
    return {"question": " ".join(texts), "answer": "\n".join([*steps, f"#### {have}"])}


def main() -> None:
    """Write the splits train and test, which share no question."""
    random, found = Random(0), dict[str, dict[str, str]]()
    while len(found) < 2200:
        made = problem(random)
        found[made["question"]] = made
    rows = list(found.values())
    (HERE / "problems").mkdir(exist_ok=True)
    for split, part in {"train": rows[:2000], "test": rows[2000:]}.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in part)
        (HERE / "problems" / f"{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()

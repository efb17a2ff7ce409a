"""Rewards that compare their rows are found in their source, and those that score each row alone are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rillflow.rewards.function import FunctionPath
from rillflow_parts.scorers.plugin import CODE_TESTS
from rillflow_parts.scorers.row_comparison import row_comparisons

HEAD = "def reward(prompts, completions, answer=None, log_metric=None, **columns):\n"
COMPARES = {
    "best": "scores = [len(c) for c in completions]\nreturn [s - max(scores) for s in scores]",
    "rank": "order = sorted(completions, key=len)\nreturn [order.index(c) for c in completions]",
    "mean in a loop": "scores = []\nfor c in completions:\n    scores.append(len(c))\n"
    "mean = sum(scores) / len(scores)\nreturn [s - mean for s in scores]",
    "novelty": "seen = set()\nfound = []\nfor c in completions:\n    found.append(float(c not in seen))\n"
    "    seen.add(c)\nreturn found",
    "count": "return [1 / completions.count(c) for c in completions]",
    "vote": "from collections import Counter\nmost = Counter(c[-1:] for c in completions)\n"
    "return [float(most[c[-1:]]) for c in completions]",
    "groups": "from collections import defaultdict\ngroups = defaultdict(list)\n"
    "for p, c in zip(prompts, completions):\n    groups[p].append(len(c))\n"
    "return [len(c) - min(groups[p]) for p, c in zip(prompts, completions)]",
    "each pair": "return [sum(c > other for other in completions) for c in completions]",
    "the one before": "return [float(completions[i] != completions[i - 1]) for i in range(len(completions))]",
    "numpy": "import numpy as np\nscores = np.array([len(c) for c in completions])\n"
    "return (scores - scores.mean()) / scores.std()",
    "numpy function": "import numpy as np\nscores = np.asarray(list(map(len, completions)))\n"
    "return scores / np.max(scores)",
    "helper": "return ranked(completions)\n\ndef ranked(texts):\n"
    "    return [len(t) / max(map(len, texts)) for t in texts]",
    "a column": "return [c == max(columns['level']) for c in completions]",
    "filled by number": "scores = [0.0] * len(completions)\nfor i, c in enumerate(completions):\n"
    "    scores[i] = len(c)\nreturn [s / max(scores) for s in scores]",
    "async": "import asyncio\nscores = asyncio.run(all_of(completions))\nlow = min(scores)\n"
    "return [s - low for s in scores]\n\nasync def all_of(texts):\n    return [len(t) for t in texts]",
    "a sum in a loop": "total = 0\nfor c in completions:\n    total += len(c)\n"
    "return [len(c) / total for c in completions]",
    "best in a loop": "best = 0\nfor c in completions:\n    best = max(best, len(c))\n"
    "return [float(len(c) == best) for c in completions]",
    "best of each prompt": "top = {}\nfor p, c in zip(prompts, completions):\n"
    "    top[p] = max(len(c), top.get(p, -1))\n"
    "return [float(len(c) == top[p]) for p, c in zip(prompts, completions)]",
    "counted in a table": "seen = {}\nfor c in completions:\n    seen[c] = seen.get(c, 0) + len(c)\n"
    "return [1 / seen[c] for c in completions]",
    "membership": "return [float(c in answer) for c in completions]",
}
ALONE = {
    "exact": "return [float(c.strip() == a) for c, a in zip(completions, answer)]",
    "letters": "return [sum(letter < '5' for letter in c) / max(len(c), 1) for c in completions]",
    "messages": "if isinstance(completions[0], list):\n"
    "    completions = [c[0]['content'] for c in completions]\nreturn [float(len(c)) for c in completions]",
    "logged": "scores = [float(len(c)) for c in completions]\nlog_metric('mean', sum(scores) / len(scores))\n"
    "return scores",
    "a loop": "found = []\nfor c, a in zip(completions, answer):\n    parts = []\n"
    "    for word in c.split():\n        parts.append(word == a)\n"
    "    found.append(sum(parts) / max(len(parts), 1))\nreturn found",
    "zeros": "return [0.0] * len(completions)",
    "a helper": "return [score(c) for c in completions]\n\ndef score(text):\n"
    "    return max(map(len, text.split()), default=0)",
    "several answers": "return [float(any(c == right for right in a)) for c, a in zip(completions, answer)]",
    "a table of a row": "return [max(w.count('x') for w in c.split()) for c in completions]",
    "words": "return [len(set(c.split()) & set(a.split())) for c, a in zip(completions, answer)]",
    "by number": "return [float(completions[i] == answer[i]) for i in range(len(completions))]",
    "numpy": "import numpy as np\nreturn np.array([len(c) for c in completions]) * 0.5 + 1",
    "a sum of a row": "found = []\nfor c in completions:\n    total = 0\n    for word in c.split():\n"
    "        total += len(word)\n    found.append(total / 9)\nreturn found",
    "added as a list": "found = []\nfor c in completions:\n    found += [float(len(c))]\nreturn found",
    "added to a list": "found = []\nfor c in completions:\n    found = found + [len(c)]\nreturn found",
    "counted": "found, place = [], 0\nfor c in completions:\n    found.append(float(c == answer[place]))\n"
    "    place += 1\nreturn found",
    "a logged sum": "total = 0\nfor c in completions:\n    total += len(c)\nlog_metric('sum', total)\n"
    "return [float(len(c)) for c in completions]",
    "in chunks": "found = []\nfor start in range(0, 9, 4):\n    found += ask(completions[start:start + 4])\n"
    "return found\n\ndef ask(texts):\n    return [len(t) for t in texts]",
}


def made(folder: Path, body: str) -> FunctionPath:
    """Write a reward; lines after an empty one are further functions."""
    inside, _, outside = body.partition("\n\n")
    file = folder / "rewards.py"
    file.write_text(HEAD + "".join(f"    {line}\n" for line in inside.splitlines()) + f"\n{outside}\n")
    compile(file.read_text(), str(file), "exec")
    return FunctionPath(file=file, name="reward")


@pytest.mark.parametrize("name", COMPARES)
def test_a_comparison_is_found(tmp_path: Path, name: str) -> None:
    assert row_comparisons(made(tmp_path, COMPARES[name]))


@pytest.mark.parametrize("name", ALONE)
def test_a_function_of_single_rows_compares_nothing(tmp_path: Path, name: str) -> None:
    assert row_comparisons(made(tmp_path, ALONE[name])) == []


def test_the_place_is_named(tmp_path: Path) -> None:
    assert [str(each) for each in row_comparisons(made(tmp_path, COMPARES["best"]))] == [
        "max(scores), rewards.py:3"
    ]


def test_a_module_next_to_it_and_a_class_are_read(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        "def ranked(texts):\n    return [texts.index(t) for t in sorted(texts)]\n"
    )
    text = "from ranks import ranked\n\nclass Best:\n    def __call__(self, completions, **_):\n"
    text += "        return ranked(completions)\n\nbest = Best()\n"
    (tmp_path / "best.py").write_text(text)
    assert row_comparisons(FunctionPath(file=tmp_path / "best.py", name="best"))


def test_a_file_that_cannot_be_parsed_compares_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def reward(:\n")
    assert row_comparisons(FunctionPath(file=tmp_path / "broken.py", name="reward")) == []


def test_no_reward_of_the_recipes_the_examples_and_the_part_compares_rows() -> None:
    """Each file there scores rows alone."""
    root = Path(__file__).parents[3]
    files = [file for folder in ("recipes", "examples") for file in (root / folder).rglob("*.py")]
    named = [
        FunctionPath(file=file, name=name)
        for file in files
        for name in re.findall(r"^def (\w+)\([^)]*\bcompletions\b", file.read_text(), re.MULTILINE)
    ]
    assert len(named) > 3
    shipped = FunctionPath(file=CODE_TESTS.file.with_name("math_answers.py"), name="math_verify")
    for function in (*named, CODE_TESTS, shipped):
        assert row_comparisons(function) == [], function

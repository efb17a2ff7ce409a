"""A Python function as source text: its dependencies, and functions that cannot be sent."""

from __future__ import annotations

import functools
import linecache
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rillflow.errors import RewardError
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.source import shipped
from rillflow.rewards.workers import RewardWorkers

WORDS = ["1", "b", "222"]


def scores(function: Callable[..., Any], **columns: list[Any]) -> list[Score]:
    with RewardWorkers(shipped(function), RewardConfig()) as workers:
        return workers.score(["p"] * len(WORDS), WORDS, columns)


def values(found: list[Score]) -> list[float | None]:
    return [score.value for score in found]


def cell(text: str, **known: Any) -> dict[str, Any]:
    """Return the names that a notebook's cell defines; its text exists only in the traceback cache."""
    name = f"<cell {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "__main__", **known}
    exec(compile(text, name, "exec"), namespace)  # noqa: S102  as a notebook does it
    return namespace


def test_a_closure_goes_with_the_functions_patterns_and_values_it_reads() -> None:
    bonus, digits, limits = 0.25, re.compile(r"\d+"), {"long": 2}

    def is_number(text: str) -> bool:
        return digits.fullmatch(text) is not None

    def reward(completions: list[str], weight: list[float]) -> list[float | None]:
        longest = limits["long"]
        pairs = zip(completions, weight, strict=True)
        return [None if len(text) > longest else is_number(text) * times + bonus for text, times in pairs]

    found = scores(reward, weight=[1.0, 2.0, 3.0])
    assert values(found) == [1.25, 0.25, None]
    assert [score.outcome for score in found] == [Outcome.SCORE, Outcome.SCORE, Outcome.ABSTAIN]


def test_a_partial_goes_with_its_arguments() -> None:
    def reward(base: float, completions: list[str], *, times: float = 1.0) -> list[float]:
        return [base + times * len(text) for text in completions]

    assert values(scores(functools.partial(reward, 0.5, times=2.0))) == [2.5, 2.5, 6.5]
    assert shipped(functools.partial(functools.partial(reward, 0.5), times=2.0)).name == "reward"


def test_an_object_that_can_be_called_goes_with_its_class_and_attributes() -> None:
    named = cell(
        """
        import re
        from dataclasses import dataclass

        DIGITS = re.compile(r"[0-9]+")

        class Base:
            def bonus(self, text):
                return self.extra if DIGITS.fullmatch(text) else 0.0

        @dataclass(frozen=True)
        class Counted(Base):
            extra: float = 0.5

            def __call__(self, completions):
                return [len(text) + self.bonus(text) for text in completions]
        """.replace("\n        ", "\n")
    )
    function = shipped(named["Counted"](extra=0.25))
    assert function.name == "counted"
    with RewardWorkers(function, RewardConfig()) as workers:
        assert values(workers.score(["p"] * 3, WORDS, {})) == [1.25, 1.0, 3.25]


def test_an_object_with_an_attribute_without_text_is_refused_by_name() -> None:
    named = cell(
        "class Held:\n    def __call__(self, completions):\n        return [0.0] * len(completions)\n"
    )
    held = named["Held"]()
    held.file = open(sys.executable, "rb")  # noqa: SIM115, PTH123  it must stay open
    with held.file, pytest.raises(RewardError, match="reads 'held_file', a BufferedReader"):
        shipped(held)


def test_the_text_is_what_a_person_would_have_written() -> None:
    found = cell(
        "import math\nfrom collections import Counter\nBONUS = 0.5\n\n"
        "def helper(text):\n    return math.sqrt(len(text)) + BONUS\n\n"
        "def best(prompts, completions: 'list[str]', **columns):\n"
        "    return [helper(text) + Counter(text)['a'] for text in completions]\n"
    )
    function = shipped(found["best"], weight=2)
    assert (str(function), function.weight) == ("best", 2.0)
    assert function.text.splitlines() == [
        "# weight 2",
        "from __future__ import annotations",
        "",
        "import math as math",
        "BONUS = 0.5",
        "def helper(text):",
        "    return math.sqrt(len(text)) + BONUS",
        "from collections import Counter as Counter",
        "def best(prompts, completions: 'list[str]', **columns):",
        "    return [helper(text) + Counter(text)['a'] for text in completions]",
    ]


def test_lambdas_decorators_recursion_and_coroutines() -> None:
    assert values(scores(lambda completions: [len(text) for text in completions])) == [1.0, 1.0, 3.0]
    found = cell(
        "import functools\nimport asyncio\n\n"
        "def twice(function):\n"
        "    @functools.wraps(function)\n"
        "    def both(completions):\n        return [2 * value for value in function(completions)]\n"
        "    return both\n\n"
        "@functools.lru_cache\ndef depth(text):\n    return 1 + depth(text[1:]) if text else 0\n\n"
        "@twice\ndef reward(completions):\n    return [depth(text) for text in completions]\n\n"
        "async def slow(completions):\n    await asyncio.sleep(0)\n    return [3.0] * len(completions)\n"
    )
    assert values(scores(found["reward"])) == [2.0, 2.0, 6.0]
    assert values(scores(found["slow"])) == [3.0, 3.0, 3.0]


def test_an_error_in_it_names_its_line() -> None:
    def reward(completions: list[str]) -> list[float]:
        return [1 / (len(text) - 1) for text in completions]

    found = scores(reward)
    assert [score.outcome for score in found] == [Outcome.ERROR, Outcome.ERROR, Outcome.SCORE]
    assert "ZeroDivisionError" in found[0].message
    assert "(<reward>, line 4, in " in found[0].message
    assert "return [1 / (len(text) - 1) for text in completions]" in found[0].message


SCRIPT = """
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.source import shipped
from rillflow.rewards.workers import RewardWorkers
from mine import imported
BASE = 10

def reward(completions):
    return [BASE + len(text) for text in completions]

for function in (reward, imported):
    print(shipped(function).text)
    with RewardWorkers(shipped(function), RewardConfig()) as workers:
        print([score.value for score in workers.score(["p"] * 2, ["a", "bb"], {})])
"""


def test_a_script_without_a_guard_is_not_run_again_and_a_module_s_function_is_imported(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    module = tmp_path / "mine.py"
    printed = []
    for more in ("", "\n# another version\n"):
        module.write_text("def imported(completions):\n    return [7.0] * len(completions)\n" + more)
        done = subprocess.run(
            [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    assert [line for line in printed[0] if line.startswith("[")] == ["[11.0, 12.0]", "[7.0, 7.0]"]
    imports = [next(line for line in lines if "import imported" in line) for lines in printed]
    assert imports[0].startswith("from mine import imported as imported  # ")
    assert imports[0] != imports[1]


class Held:
    """A class without source text."""


def test_what_has_no_text_is_refused_and_named() -> None:
    held = Held()

    def reads(completions: list[str]) -> list[float]:
        return [float(held is None)] * len(completions)

    with pytest.raises(RewardError) as caught:
        shipped(reads)
    assert "the reward reads reads 'held', a Held, which has no source text" in caught.value.what
    assert "create it inside the function, or move both to a file" in caught.value.fix


def test_one_name_for_two_things_is_refused() -> None:
    found = cell("bonus = 1\ndef other():\n    return bonus\n")

    def make(bonus: float) -> Callable[..., list[float]]:
        other = found["other"]
        return lambda completions: [bonus + other()] * len(completions)

    with pytest.raises(RewardError, match="'bonus', a int, and another object by the same name"):
        shipped(make(0.5))


@pytest.mark.parametrize(
    ("function", "weight", "said"),
    [
        (functools.partial(len), 1.0, "is a partial"),
        (Held(), 1.0, "is a Held"),
        (len, 1.0, "is a builtin_function_or_method"),
        (3, 1.0, "the reward 3 is a int"),
        ((lambda a: a, lambda a: a)[1], 1.0, "2 matching functions"),
        (eval("lambda completions: [1.0]"), 1.0, "is not available"),  # noqa: S307  made without a text
        (cell, math.nan, "the weight of cell is nan"),
        (cell, "2", "the weight of cell is '2'"),
    ],
)
def test_what_is_no_function_with_a_text_is_refused(function: Any, weight: Any, said: str) -> None:
    with pytest.raises(RewardError) as caught:
        shipped(function, weight)
    assert said in str(caught.value)

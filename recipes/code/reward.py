"""A reward that runs the model's program and returns the share of hidden tests that it passes."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.rewards.programs import run_python


def share_passed(
    completions: Sequence[str], inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]]
) -> list[float]:
    """Return one score for each program, from 0 to 1.

    The program gets only the inputs. The outputs stay in this process, so a program cannot print them unread.

    Args:
        completions: [B], each the expression after ``print(``.
        inputs: [B], the standard input of each test.
        outputs: [B], the expected standard output of each test.
    """
    return [
        passed(f"a, b = map(int, input().split())\nprint({completion}", tests, expected)
        for completion, tests, expected in zip(completions, inputs, outputs, strict=True)
    ]


def passed(program: str, inputs: Sequence[str], outputs: Sequence[str]) -> float:
    """Return the share of tests whose output is the expected one."""
    right = 0
    for text, expected in zip(inputs, outputs, strict=True):
        finished = run_python(program, stdin=text, timeout_s=2.0)
        right += finished.exit_code == 0 and finished.stdout.strip() == expected
    return right / len(inputs)

"""A game as an environment: the policy guesses a number from 1 to 7 in four turns.

After each guess the environment writes ">" if the number is larger, "<" if it is smaller. The policy learns
to guess in the middle of what is left. ``reset`` gets the row's columns; ``step`` gets the policy's turn.

    rillflow run examples/guess.toml --dir runs/guess
"""

from __future__ import annotations

from typing import Any

GUESSES = 4


class Guess:
    """One game: one row."""

    def reset(self, secret: int) -> str:
        """Begin a game; what it returns follows the row's prompt."""
        self.secret, self.guesses = secret, 0
        return ""

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a guess: observation, reward, terminated, truncated, info."""
        self.guesses += 1
        guess = int(text) if text.isdecimal() else 0
        if guess == self.secret:
            return "", 1.0, True, False, {"metrics": {"guesses": self.guesses}}
        if not guess or self.guesses == GUESSES:
            return "", 0.0, True, False, {}
        return (">" if self.secret > guess else "<"), 0.0, False, False, {}

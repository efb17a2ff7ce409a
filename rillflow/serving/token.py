"""Token: the bearer token of a loopback server, new or kept in a file."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from rillflow.errors import RunDirectoryError, StreamError

SHORTEST = 16
"""Least number of characters of a token."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """A bearer token."""

    text: str
    """The token."""
    is_new: bool
    """Whether it was made by this process."""

    def matches(self, given: str) -> bool:
        """Return whether a request carries this token; takes the same time for every text."""
        return secrets.compare_digest(given.encode("utf-8", "replace"), self.text.encode())


def token_of(file: Path | None) -> Token:
    """Return the token of a file, or a new one.

    Args:
        file: file of the token; made with a new token if it is missing. None makes a new token.

    Raises:
        RunDirectoryError: the file cannot be read or made.
        StreamError: its token is short enough to be guessed.
    """
    is_new = file is None or not file.exists()
    try:
        if file is None or is_new:
            text = secrets.token_urlsafe(32)
            if file is not None:
                file.touch(mode=0o600, exist_ok=False)
                file.write_text(text)
        else:
            text = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"--token-file {file} cannot be used", why=str(error)) from None
    if len(text) < SHORTEST:
        raise StreamError(
            f"the token has {len(text)} characters",
            why=f"a token of fewer than {SHORTEST} characters can be guessed",
        )
    return Token(text=text, is_new=is_new)

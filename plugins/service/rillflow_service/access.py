"""Access: the token of a service, which every request carries, and the files that hold it.

An address that other machines reach requires the user's own token file, so that nobody exposes a machine by
accident.
"""

from __future__ import annotations

import ipaddress
import secrets
from pathlib import Path

from rillflow.errors import StreamError


def token_for(host: str, token_file: Path | None) -> str:
    """Return the token of a service that listens on an address: the file's, else a new one.

    Raises:
        StreamError: the address is not loopback and there is no token file, or the token is too short.
    """
    if host and token_file is None and not _is_loopback(host):
        why = "such an address needs a token of your own"
        fix = "add --token-file FILE (in a recipe: rollout.service.token_file)"
        raise StreamError(f"{host} can be reached from other machines", why=why, fix=fix)
    try:
        token = token_file.read_text().strip() if token_file else secrets.token_urlsafe(32)
    except (OSError, UnicodeDecodeError) as error:
        raise StreamError(
            f"the token file {token_file} cannot be read", why=str(error), fix="name a text file"
        ) from None
    if len(token) < 16:
        raise StreamError(f"the token has {len(token)} characters", why="a safe token has at least 16")
    return token


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read; a reader finds the whole text or none."""
    written = path.with_name(f".{path.name}")
    written.unlink(missing_ok=True)
    written.touch(mode=0o600, exist_ok=False)
    written.write_text(text)
    written.replace(path)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

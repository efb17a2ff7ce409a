"""Private: keep other users of this machine and of the network away from a cluster's processes.

folder 0700 ─ r ─> Ray's own folder, which Ray opens to everybody
~/.ray/auth_token  0600, made before Ray would make it 0644
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)


def private_folder() -> Path:
    """Create and return a folder of mode 0700, below RAY_TMPDIR if set, with a folder ``r`` for Ray."""
    made = Path(tempfile.mkdtemp(prefix="rf-", dir=os.environ.get("RAY_TMPDIR")))
    (made / "r").mkdir()
    return made


def private_token() -> None:
    """Create Ray's token file, or restrict it to this user; do nothing if the environment has a token."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    file = Path.home() / ".ray" / "auth_token"
    with suppress(OSError):  # another driver has just made it, or Ray reports the folder's problem
        if file.exists():
            file.chmod(0o600)
            return
        file.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = file.with_name(f"auth_token.{os.getpid()}")
        fresh.touch(mode=0o600, exist_ok=False)
        fresh.write_text(secrets.token_hex(32))
        try:
            os.link(fresh, file)
        finally:
            fresh.unlink()


def warn_without_token(address: str) -> None:
    """Log a warning that the joined cluster requires no token."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        logger.warning(
            "the cluster at %s needs no token: anyone who reaches its ports can run code on it; start it "
            "with RAY_AUTH_MODE=token, and give the driver the same token",
            address,
        )

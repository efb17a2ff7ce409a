"""Weights & Biases: one wandb run for a run directory; offline it writes files that ``wandb sync`` sends.

Only this module imports ``wandb``.
"""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rillflow.config.user_paths import home
from rillflow.errors import install_package
from rillflow.runs import layout
from rillflow.runs.json_lines import JSON
from rillflow.runs.observers import End
from rillflow_parts.trackers.tracker import TrackedRun, TrackerError

NO_KEY = "Weights & Biases has no API key"
FIX_KEY = (
    'run `wandb login`, or set WANDB_API_KEY; or set run.trackers.wandb.mode = "offline" and run `wandb '
    "sync` later. The run needs no key: `rillflow track RUN` sends it when there is one"
)


class WandbTracker:
    """A wandb run.

    Args:
        settings: see WandbConfig.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._run: Any = None

    def start(self, run: TrackedRun) -> Mapping[str, JSON]:
        """See Tracker."""
        try:
            import wandb
        except ModuleNotFoundError:
            raise TrackerError("wandb is not installed", fix=install_package("wandb")) from None
        is_offline = self._settings["mode"] == "offline" or os.environ.get("WANDB_MODE") in _SILENT
        if not is_offline and not has_key():
            raise TrackerError(NO_KEY, fix=FIX_KEY)
        identity = str(run.kept.get("id") or secrets.token_hex(4))
        self._run = wandb.init(
            project=self._settings["project"],
            entity=self._settings["entity"],
            name=_cut(self._settings["name"] or run.name, _NAME),
            group=_cut(self._settings["group"], _NAME),
            id=identity,
            resume="allow",
            dir=str(run.path / layout.TRACKERS),
            mode="offline" if is_offline else "online",
            tags=[_cut(tag, _TAG) for tag in run.tags] or None,
            config=dict(run.config),
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True),
        )
        return {"id": identity, "url": self._run.url}

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """See Tracker."""
        self._run.log({**values, "run/seconds": time_s}, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, JSON]]) -> None:
        """See Tracker."""
        import wandb

        names = list(rows[0]) if rows else []
        table = wandb.Table(columns=["step", *names], data=[[step, *row.values()] for row in rows])
        self._run.log({"rollouts": table}, step=max(step, self._run.step))

    def finish(self, state: End) -> None:
        """See Tracker."""
        self._run.finish(exit_code=int(state == "failed"))


_SILENT = ("offline", "dryrun")
_TAG, _NAME = 64, 128
"""Most characters of a tag, and of a name or group; wandb refuses a run with longer ones."""


def _cut(text: str | None, most: int) -> str | None:
    """Return a text within a limit of wandb; a longer one keeps its begin and its end."""
    if text is None or len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[: most - half - 1]}…{text[-half:]}"


def has_key() -> bool:
    """Return whether this user has a key: in the environment, or in the netrc file by ``wandb login``."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    named = os.environ.get("NETRC")
    folder = home()
    own = [folder / ".netrc", folder / "_netrc"] if folder else []
    for file in [Path(named)] if named else own:
        try:
            if netrc.netrc(file).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False

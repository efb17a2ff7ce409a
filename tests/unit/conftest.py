"""Property tests have no deadline an example: on a busy machine it measures the machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

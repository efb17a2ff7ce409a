"""Seeds: how one seed becomes those of steps, members, environments and policies.

This module imports no torch, because the processes of environments import it.
"""

from __future__ import annotations

import numpy as np


def seed_of(*parts: int) -> int:
    """Return a seed below 2^31 made of several numbers, such as the run's seed and a step."""
    return int(np.random.SeedSequence([part % 2**63 for part in parts]).generate_state(1)[0] >> 1)

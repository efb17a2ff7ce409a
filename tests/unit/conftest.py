"""Property tests: the everyday ones use the same examples each time, ``make test-all`` draws new ones.

No example has a deadline, because on a busy machine it would measure the machine.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("everyday", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "everyday"))

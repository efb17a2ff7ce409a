"""The order of the files, those that take longest first, and the examples of property tests.

``make test`` gives its workers file by file in this order (``--dist loadfile``). A long file at the end would
keep one worker at work and the others idle. The order of the tests in a file stays.

The everyday property tests use the same examples each time, ``make test-all`` draws new ones. No example has
a deadline, because on a busy machine it would measure the machine.
"""

from __future__ import annotations

import gc
import os
import signal

import pytest
from hypothesis import settings

settings.register_profile("everyday", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "everyday"))

LONGEST_FIRST = (
    "tests/flows/test_ready_first.py",
    "plugins/classic/tests/test_environment_spaces.py",
    "plugins/classic/tests/test_endless_episodes.py",
    "plugins/classic/tests/test_environment_copies.py",
    "plugins/classic/tests/test_pictures.py",
    "tests/flows/test_dead_sampler.py",
    "tests/architecture/test_documented_commands.py",
    "tests/flows/test_dead_engine.py",
    "tests/distributed/test_left_collectives.py",
    "tests/distributed/test_failing_ranks.py",
    "tests/distributed/test_replaced_ranks.py",
    "tests/distributed/test_placement_blind.py",
    "tests/parts/replay/test_replay.py",
    "tests/flows/test_ahead.py",
    "tests/flows/test_signals.py",
    "tests/flows/test_meshes.py",
    "tests/distributed/test_backends.py",
    "tests/distributed/test_two_nodes_meet.py",
    "tests/architecture/test_benchmarks.py",
    "tests/flows/test_algorithms.py",
    "tests/flows/test_own_algorithm.py",
    "tests/flows/test_disk_faults.py",
    "tests/flows/test_nothing_lost.py",
    "tests/flows/test_resume.py",
    "tests/flows/test_resumed_weights.py",
    "tests/flows/test_chaos.py",
    "tests/distributed/test_sharded_generation.py",
    "tests/distributed/test_local_processes.py",
    "tests/flows/test_lost_scorers.py",
    "tests/flows/test_gathered_steps.py",
    "tests/parts/fusion/test_fused.py",
    "tests/simulation/test_seeds.py",
    "tests/parts/memory/test_peaks.py",
    "tests/architecture/test_mutation_study.py",
    "tests/unit/rollout/test_reused_rows.py",
)
"""Files of about ten seconds of processor time and more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files; the sort is stable."""
    places = {file: place for place, file in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_configure() -> None:
    """Take signals that a shell ignores for its background jobs, or nohup, because commands respect that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Keep garbage collections off the objects of imports and collection: they take half a second."""
    gc.freeze()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

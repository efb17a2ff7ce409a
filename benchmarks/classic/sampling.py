"""Sampling: environment steps per second with random actions, without a policy and without a trainer.

    serial       one gymnasium environment, a plain loop ──────────┐
    inline       gymnasium slots one after the other, this process │
    processes    gymnasium slots in child processes                ├─ the same number of slots, rounds in turn
    envpool-raw  envpool.make(...).step                            │
    envpool      the same pool behind Rillflow's interface         │
    actor        the same pool, recorded in fragments of 32 steps ─┘

    python benchmarks/classic/sampling.py --write benchmarks/results/classic_sampling.md
    python benchmarks/classic/sampling.py --ids CartPole-v1 --slots 8 64 --rounds 5

A round measures every form for 2 s (--seconds), in slices of 10 ms that take turns. A cell is the rate in the
fastest tenth of a form's slices, which other work on the machine hardly slows down: the mean over rounds with
its 95% interval. The last two columns are ratios. EnvPool has one thread (--threads). Its three forms
take turns on one pool: where the system puts a pool's thread changes its rate more than anything else.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import gymnasium
import measured_at
import numpy as np

from rillflow.formulas.interval import half_width
from rillflow_classic.environments.catalog import find
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.copies import Copies
from rillflow_classic.environments.envpool_adapter import EnvPoolEnvironment
from rillflow_classic.environments.make import make_environment
from rillflow_classic.policy import Acted
from rillflow_classic.workers.actor import Actor

NEEDS = ["envpool", "rillflow_classic"]
SMALLEST = ["--ids CartPole-v1 --slots 2 --rounds 1 --seconds 0.02"]

FORMS = ("serial", "inline", "processes", "envpool-raw", "envpool", "actor")
STEPS = 32
"""Steps of an actor's fragment."""
SLICE_S = 0.01
IMAGES = ("Pong-v5",)
"""Ids that Gymnasium preprocesses with OpenCV, which is not needed elsewhere."""


def main() -> None:
    """Measure all forms, and print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", nargs="+", default=["CartPole-v1", "Pong-v5", "HalfCheetah-v4"])
    parser.add_argument("--slots", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each form in a round")
    parser.add_argument("--threads", type=int, default=1, help="threads of EnvPool")
    parser.add_argument("--write", type=Path, help="page to write")
    given = parser.parse_args()
    lines = [
        f"| id | slots | {' | '.join(FORMS)} | envpool / raw | actor / raw |",
        f"|---|---|{'---|' * (len(FORMS) + 2)}",
    ]
    for id in given.ids:
        for slots in given.slots:
            lines.append(_row(id, slots, given))
            print(lines[-1], flush=True)
    page = _page(lines)
    if given.write:
        given.write.write_text(page)
    else:
        print(page)


def _row(id: str, slots: int, given: argparse.Namespace) -> str:
    forms = _forms(id, slots, given.threads)
    rates: dict[str, list[float]] = {name: [] for name in FORMS if name in forms}
    for _ in range(given.rounds):
        slices: dict[str, list[float]] = {name: [] for name in rates}
        for _ in range(max(1, round(given.seconds / SLICE_S))):
            for name, (step, num) in forms.items():
                slices[name].append(_rate(step) * num)
        for name, values in rates.items():
            values.append(float(np.quantile(slices[name], 0.9)))
    cells = [_cell(rates[name]) if name in rates else "needs OpenCV" for name in FORMS]
    raw = np.mean(rates["envpool-raw"])
    ratios = [f"{np.mean(rates[name]) / raw:.3f}" for name in ("envpool", "actor")]
    return f"| {id} | {slots} | {' | '.join([*cells, *ratios])} |"


def _rate(step: Callable[[], Any]) -> float:
    """Step for one slice; return the calls per second."""
    start, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < SLICE_S or not steps:
        step()
        steps += 1
    return steps / elapsed


def _forms(id: str, slots: int, threads: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return the step of every form by name, with its number of slots."""
    arguments = {"num_threads": threads}
    settings = EnvironmentSettings(id=id, provider="envpool", arguments=arguments)
    entry = find(settings)
    ours = EnvPoolEnvironment(entry.name, settings, Copies(slots))
    actions = _actions(ours.action_space, slots)
    found: dict[str, tuple[Callable[[], Any], int]] = {}
    if id not in IMAGES:
        plain = EnvironmentSettings(id=id, provider="gymnasium")
        found["serial"] = _serial(id), 1
        for run in ("inline", "processes"):
            made = make_environment(plain.model_copy(update={"run": run}), slots)
            found[run] = _cycled(made.step, actions), slots
    policy: Any = RandomPolicy(actions)
    actor = Actor([ours], {"policy": policy}, STEPS)
    actor.reset(0)
    found["envpool-raw"] = _cycled(ours.pool.step, actions), slots
    found["envpool"] = _cycled(ours.step, actions), slots
    found["actor"] = actor.sample, slots * STEPS
    return found


class RandomPolicy:
    """A policy that takes given actions in turn."""

    version = 0

    def __init__(self, actions: Sequence[Any]) -> None:
        self._act = _cycled(lambda each: Acted(actions=each), actions)

    def act(self, observations: Any, state: Any = None, *, greedy: bool = False) -> Acted:  # noqa: ARG002
        """Return the next actions."""
        acted: Acted = self._act()
        return acted

    def initial_state(self, num_slots: int) -> None:  # noqa: ARG002
        """Return None."""
        return

    def seed(self, seed: int) -> None:
        """Leave the actions as they are."""


def _actions(space: Any, slots: int) -> list[Any]:
    space.seed(0)
    return [np.stack([space.sample() for _ in range(slots)]) for _ in range(64)]


def _cycled(step: Callable[[Any], Any], actions: Sequence[Any]) -> Callable[[], Any]:
    at = 0

    def run() -> Any:
        nonlocal at
        at += 1
        return step(actions[at % len(actions)])

    return run


def _serial(id: str) -> Callable[[], None]:
    """Return the step of a plain loop: one environment, reset when its episode has ended."""
    environment = gymnasium.make(id, disable_env_checker=True)
    environment.reset(seed=0)
    actions = [each[0] for each in _actions(environment.action_space, 1)]
    at, is_over = 0, False

    def run() -> None:
        nonlocal at, is_over
        if is_over:
            environment.reset()
            is_over = False
            return
        at += 1
        *_, terminated, truncated, _ = environment.step(actions[at % len(actions)])
        is_over = terminated or truncated

    return run


def _cell(values: Sequence[float]) -> str:
    mean = float(np.mean(values))
    return f"{mean:,.0f} ± {half_width(values):,.0f}" if len(values) > 1 else f"{mean:,.0f}"


def _page(lines: Sequence[str]) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("envpool", "gymnasium", "numpy"))
    command = f"python benchmarks/classic/sampling.py {' '.join(sys.argv[1:])}"
    text = [
        "# Sampling of classic environments",
        "",
        "Environment steps per second with random actions; no policy acts. "
        + " ".join((__doc__ or "").strip().split("\n\n")[-1].split()),
        "",
        *lines,
        "",
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {packages}.",
        "",
        "```console",
        f"$ {command.strip()}",
        "```",
        "",
    ]
    return measured_at.below_title("\n".join(text), measured_at.line())


if __name__ == "__main__":
    main()

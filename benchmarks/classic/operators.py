"""Operators: code lines of plans beside hand-written forms on bare Ray actors, and the cost of the operators.

    python benchmarks/classic/operators.py all --write benchmarks/results/classic_operators.md
    python benchmarks/classic/operators.py lines
    python benchmarks/classic/operators.py overhead --rounds 25
    python benchmarks/classic/operators.py depth --rounds 5

*lines*: the functions that run the algorithm over workers, in both forms; by hand, with the helpers that they
call. Losses, networks and settings are the same code and do not count. Both forms do the same: they leave a
lost actor out, raise the error of a load that nobody reads, and report lag and losses. "With shared" adds,
for a plan, every function of ``operators/``, ``system.py`` and ``worker_set.py`` that runs while the plan
makes a few items, in this process or at a worker; for a hand-written form, the actor class.

*overhead*: both forms have the same actors on one Ray cluster. They take turns, and the form that begins
changes with every round; two neighbours are a pair. *call*: an environment and a policy that do nothing,
fragments of one step. *CartPole*: fragments of 16 x 128 steps, a policy that does nothing. *learning*: whole
algorithms. ``--cases apex`` runs Ape-X; its forms take different numbers of fragments for an update, so their
rates do not compare. Items come in *rounds* of all actors, or *as they come*. The CPU time of the
controller's thread for an item hardly depends on other programs. Its extra in a plan is measured where
nothing is learned; "of a step" is that extra, with CartPole's fragments and the same order of items, over the
CPU time of the algorithm's hand-written item: in the controller and in one actor, as the actors work side by
side. The wall time needs an idle machine.

*depth*: items per second and lag of ``gather_async(num_async)`` if the controller does nothing with an item,
and if it is as busy as the actors.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

import torch
from benchmark_actors import StillLearner, learner_of, learning_actor, settings_of, still_actor
from intervals import interval
from measured_at import below_title, line
from operator_lines import lines_table

from rillflow.workers.backend import Pool
from rillflow_classic.algorithms import ppo
from rillflow_classic.algorithms.registry import algorithm_of
from rillflow_classic.off_policy import make_replay
from rillflow_classic.operators.iterators import from_workers
from rillflow_classic.policy import Learner
from rillflow_classic.system import CallSystem
from rillflow_classic.worker_set import WorkerSet
from rillflow_classic.workers.actor import Actor

SMALLEST = ["lines"]
SLOW = ["overhead --rounds 1 --seconds 0.2", "depth --rounds 1 --seconds 0.2"]  # start Ray
NEEDS = ["ray", "rillflow_classic"]
ACTORS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    name: str
    """Row of the table."""
    steps: int
    """Environment steps of an item."""
    order: str
    """Order of its items: rounds, or as they come."""
    learns: bool = False
    """Whether the row includes updates; without them, its policy computes nothing."""
    hand: Callable[[], Iterator[Any]]
    """Begins the hand-written form."""
    plan: Callable[[], Iterator[Any]]
    """Begins the plan."""
    actors: WorkerSet[Actor]
    """Actors of the plan."""
    bare: Sequence[Any]
    """Actors of the hand-written form."""

    def spent_s(self) -> dict[str, Callable[[], float]]:
        """Return functions that ask for the CPU time of the actors of either form."""
        import ray

        places = range(ACTORS)
        return {
            "hand": lambda: sum(ray.get([each.spent_s.remote() for each in self.bare])),
            "plan": lambda: sum(self.actors.call(index, process_s).read() for index in places),
        }


def process_s(actor: Actor) -> float:
    """Return the CPU time of an actor's process."""
    del actor
    return time.process_time()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Microseconds of an item of one form, over some items."""

    wall_us: float
    """Wall time."""
    own_us: float
    """CPU time of this thread."""
    actor_us: float
    """CPU time of an actor's process; its share if the items come from one actor each."""


def measure(items: Iterator[Any], seconds: float, spent_s: Callable[[], float] = float) -> Measured:
    """Take items for some seconds; ``spent_s`` returns the CPU time of all actors."""
    next(items)
    theirs = spent_s()
    began, own, count = time.perf_counter(), time.thread_time(), 0
    while (passed := time.perf_counter() - began) < seconds:
        next(items)
        count += 1
    own = time.thread_time() - own
    parts = passed, own, (spent_s() - theirs) / ACTORS
    wall_us, own_us, actor_us = (1e6 * each / count for each in parts)
    return Measured(wall_us=wall_us, own_us=own_us, actor_us=actor_us)


class Cluster:
    """Ray with both kinds of actors."""

    def __init__(self, stack: ExitStack) -> None:
        from rillflow.workers.start import ray_backend  # which sets Ray up before it is imported

        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the processes of bare actors
        self._backend = ray_backend(heartbeat_s=0)
        pools = {"actors": ACTORS, **algorithm_of("apex").pools(settings_of("apex"))}  # type: ignore[misc]
        self._backend.open([Pool(name=name, size=size, world=1) for name, size in pools.items()])
        stack.callback(self._backend.close)

    def workers(self, make: Callable[[int], Actor]) -> WorkerSet[Actor]:
        """Return actors on the backend; they take the place of those before."""
        return WorkerSet(self._backend, "actors", make)

    def bare(
        self, make: Callable[[int], Actor], make_learner: Callable[[], Learner] | None = None
    ) -> list[Any]:
        """Return bare Ray actors."""
        import ray
        from hand_written.actors import RemoteActor

        made = [RemoteActor.remote(make, index, make_learner) for index in range(ACTORS)]
        ray.get([each.reset.remote(1) for each in made])
        return made

    def shards(self) -> list[Any]:
        """Return bare Ray actors that hold the replay of Ape-X."""
        from hand_written.replay import RemoteReplay

        learner: Any = learner_of("apex")
        make = partial(make_replay, learner.inputs, divided_by=settings_of("apex").shards)
        return [RemoteReplay.remote(make, index) for index in range(settings_of("apex").shards)]


def cases(cluster: Cluster, names: Sequence[str]) -> Iterator[Case]:
    """Make the actors of one comparison after the other."""
    from hand_written import a3c as a3c_by_hand
    from hand_written import apex as apex_by_hand
    from hand_written import dqn as dqn_by_hand
    from hand_written import ppo as ppo_by_hand

    for name, slots, steps in (("call", 0, 1), ("CartPole", 16, 128)):
        if name in names:
            make = partial(still_actor, slots, steps)
            actors, bare = cluster.workers(make), cluster.bare(make)
            yield Case(
                name=f"{name}, rounds",
                order="rounds",
                steps=ACTORS * max(slots, 1) * steps,
                actors=actors,
                bare=bare,
                hand=lambda bare=bare: ppo_by_hand.train(bare, StillLearner()),
                plan=lambda actors=actors: iter(
                    ppo.plan(CallSystem(actors, {"policy": StillLearner()}), None)
                ),
            )
            yield Case(
                name=f"{name}, as they come",
                order="as they come",
                steps=max(slots, 1) * steps,
                actors=actors,
                bare=bare,
                hand=lambda bare=bare: as_they_come(bare),
                plan=lambda actors=actors: iter(from_workers(actors, "sample").gather_async()),
            )
    for name, slots, steps in (("ppo", 16, 128), ("a2c", 16, 16), ("a3c", 16, 16), ("dqn", 8, 8)):
        if name in names:
            make = partial(learning_actor, name, slots, steps)
            actors = cluster.workers(make)
            bare = cluster.bare(make, partial(learner_of, name) if name == "a3c" else None)
            by_hand = {"a3c": a3c_by_hand, "dqn": dqn_by_hand}.get(name, ppo_by_hand)
            yield Case(
                name=f"{name}, learning CartPole",
                order="as they come" if name == "a3c" else "rounds",
                learns=True,
                steps=slots * steps * (1 if name == "a3c" else ACTORS),
                actors=actors,
                bare=bare,
                hand=lambda name=name, bare=bare, by_hand=by_hand: by_hand.train(bare, learner_of(name)),
                plan=lambda name=name, actors=actors: plan_of(name, actors),
            )
    if "apex" in names:
        make = partial(learning_actor, "apex", 8, 16)
        actors, bare, settings = cluster.workers(make), cluster.bare(make), settings_of("apex")
        yield Case(
            name="apex, learning CartPole (updates, not steps)",
            order="as they come",
            learns=True,
            steps=settings.updates,
            actors=actors,
            bare=bare,
            hand=lambda: apex_by_hand.train(bare, cluster.shards(), learner_of("apex"), settings),
            plan=lambda: plan_of("apex", actors),
        )


def plan_of(name: str, actors: WorkerSet[Actor]) -> Iterator[Any]:
    """Begin the plan of an algorithm with a new learner."""
    system = CallSystem(actors, {"policy": learner_of(name)})
    return iter(algorithm_of(name).plan(system, settings_of(name)))


def as_they_come(actors: Sequence[Any]) -> Iterator[Any]:
    """Yield fragments of bare actors as they come."""
    import ray

    calls = {actor.sample.remote(): actor for actor in actors}
    while True:
        done, _ = ray.wait(list(calls), num_returns=1)
        actor = calls.pop(done[0])
        yield ray.get(done[0])
        calls[actor.sample.remote()] = actor


def overhead_table(arguments: argparse.Namespace) -> str:
    """Return the table of both forms."""
    rows = [
        "| work | by hand, steps/s | plan, steps/s | by hand, µs an item (CPU: controller, actor) | plan "
        "| controller's extra CPU, µs an item | of a step | wall time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    extra: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for case in cases(Cluster(stack), arguments.cases.split(",")):
            forms = {"hand": case.hand(), "plan": case.plan()}
            found: dict[str, list[Measured]] = {"hand": [], "plan": []}
            spent_s = case.spent_s()
            for turn in range(arguments.rounds):
                for form in sorted(forms, reverse=bool(turn % 2)):
                    found[form].append(measure(forms[form], arguments.seconds, spent_s[form]))
            if not case.learns:
                extra[case.order] = _extra_us(found)
            rows.append(_row(case, found, extra.get(case.order) or _extra_us(found)))
            print(rows[-1], flush=True)
            for items in forms.values():
                items.close()  # type: ignore[attr-defined]
    return "\n".join(rows)


def median_with_interval(values: Sequence[float], unit: str) -> str:
    """Return the median and its 95% interval, from order statistics: it needs no distribution."""
    ordered, n = sorted(values), len(values)
    outside = 0.0
    first = 0
    while (outside := outside + comb(n, first) / 2**n) <= 0.025:
        first += 1
    low, high = ordered[max(first - 1, 0)], ordered[min(n - first, n - 1)]
    digits = 1 if unit else 0
    return f"{median(values):+.{digits}f}{unit} ({low:+.{digits}f} .. {high:+.{digits}f})"


def _extra_us(found: dict[str, list[Measured]]) -> list[float]:
    """Return the controller's extra CPU time for an item of the plan, of every pair."""
    return [plan.own_us - hand.own_us for hand, plan in zip(found["hand"], found["plan"], strict=True)]


def _row(case: Case, found: dict[str, list[Measured]], operators_us: list[float]) -> str:
    wall = {form: median(each.wall_us for each in rounds) for form, rounds in found.items()}
    own = {form: median(each.own_us for each in rounds) for form, rounds in found.items()}
    actor = {form: median(each.actor_us for each in rounds) for form, rounds in found.items()}
    slower = [
        100 * (plan.wall_us / hand.wall_us - 1)
        for hand, plan in zip(found["hand"], found["plan"], strict=True)
    ]
    step = own["hand"] + actor["hand"]
    cells = [
        case.name,
        *(f"{1e6 * case.steps / wall[form]:,.0f}" for form in found),
        *(f"{wall[form]:,.0f} ({own[form]:,.0f}, {actor[form]:,.0f})" for form in found),
        "" if case.learns else median_with_interval(operators_us, ""),
        median_with_interval([100 * each / step for each in operators_us], "%"),
        median_with_interval(slower, "%"),
    ]
    return f"| {' | '.join(cells)} |"


WORK_S = 0.005


class WaitingWorker:
    """Waits as long as an actor would play."""

    def __init__(self, index: int) -> None:
        self.index, self.version = index, 0

    def sample(self) -> int:
        time.sleep(WORK_S)
        return self.version

    def load(self, version: int) -> None:
        self.version = version


def depth_table(arguments: argparse.Namespace) -> str:
    """Return the table of calls in flight."""
    rows = [
        "| calls in flight at an actor | items/s, idle controller | items/s, busy controller | largest lag |",
        "|---|---|---|---|",
    ]
    with ExitStack() as stack:
        workers: Any = Cluster(stack).workers(WaitingWorker)  # type: ignore[arg-type]
        for num_async in (1, 2, 4):
            found: dict[float, list[float]] = {0.0: [], WORK_S / ACTORS: []}
            lags: list[int] = []
            for _ in range(arguments.rounds):
                for pause_s, rates in found.items():
                    flow = from_workers(workers, "sample").gather_async(num_async).zip_with_source()
                    rates.append(1e6 / measure(handled(flow, pause_s, lags), arguments.seconds).wall_us)
            cells = " | ".join(interval(rates) for rates in found.values())
            rows.append(f"| {num_async} | {cells} | {max(lags)} |")
            print(rows[-1], flush=True)
    return "\n".join(rows)


def handled(flow: Any, pause_s: float, lags: list[int]) -> Iterator[Any]:
    """Work on every item, and send its source a new version; note the lag in items of the source."""
    counts = [0] * ACTORS
    for source, loaded in flow:
        if counts[source.index] == 0 and loaded:  # of the run before
            source.call("load", 0)
            continue
        lags.append(counts[source.index] - loaded)
        if pause_s:
            time.sleep(pause_s)
        counts[source.index] += 1
        source.call("load", counts[source.index])
        yield loaded


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["all", "lines", "overhead", "depth"])
    parser.add_argument("--rounds", type=int, default=25, help="rounds of each comparison")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of each form in a round")
    parser.add_argument(
        "--cases", default="call,CartPole,ppo,a2c,a3c,dqn", help="comparisons of the overhead"
    )
    parser.add_argument("--write", metavar="FILE", help="where the page goes, besides the screen")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = {"lines": lines_table, "overhead": overhead_table, "depth": depth_table}
    titles = {
        "lines": "Code lines of the function that runs the algorithm over workers",
        "overhead": f"{ACTORS} actors on Ray, medians of {arguments.rounds} rounds; the last three columns "
        "are differences of pairs, with the 95% interval of their median",
        "depth": f"{ACTORS} actors whose items take {WORK_S * 1e3:g} ms, mean and 95% interval",
    }
    load = os.getloadavg()[0]
    command = " ".join(["python benchmarks/classic/operators.py", *sys.argv[1:]])
    text = f"# Operators against hand-written Ray actors\n\n`{command}`, {os.cpu_count()} cores, "
    text += f"Python {platform.python_version()}, ray {version('ray')}, load {load:.0f}.\n"
    for name in parts if arguments.part == "all" else [arguments.part]:
        table = parts[name]() if name == "lines" else parts[name](arguments)  # type: ignore[operator]
        text += f"\n{titles[name]}:\n\n{table}\n"
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(below_title(text, line()))


if __name__ == "__main__":
    main()

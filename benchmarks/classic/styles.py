"""Styles: where the policy acts, in one code base, by size of the network; frames per second of training.

    decoupled      actor ─ requests ─> policy worker, weights ─> policy worker          (SRL)
    in the actor   weights ─> actor                                                     (IMPALA)
    at the trainer actor ─ requests ─> trainer's process, no weights travel             (SEED RL)

    python benchmarks/classic/styles.py --write benchmarks/results/classic_styles.md
    python benchmarks/classic/styles.py --networks mlp_64 cnn --rounds 3

One actor process with a ring of 2 lanes, streams in shared memory, and a trainer that takes fragments as they
come: one pass of the clipped loss in one minibatch. MLPs act in CartPole (EnvPool, 16 slots in a lane,
fragments of 64 steps), the CNN in frames of 4 x 84 x 84 (Pong of EnvPool, 8 slots, 16 steps). *calls*: the
same training by calls, with the policy in the actor and all of it in turn: the plain serial loop. Prefetch:
a thread of the trainer assembles the next batch.

A cell is the mean over rounds with its 95% interval; each round measures all styles in turn. Frames are those
that were trained; each process has one thread of torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

from intervals import whole
from measured_at import below_title, line
from ring import machine
from stream_parts import StreamWorkload, make_actor, make_policy_worker, on_core

from rillflow.workers.backend import Backend, Pool
from rillflow.workers.inline import InlineBackend
from rillflow.workers.processes import ProcessBackend
from rillflow_classic.algorithm import LearnerInputs
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.on_policy import OnPolicyConfig, OnPolicyLearner
from rillflow_classic.streams.sockets import open_streams
from rillflow_classic.system import CallSystem, StreamSystem
from rillflow_classic.worker_set import WorkerSet
from rillflow_classic.workers.actor import Actor
from rillflow_classic.workers.policy_worker import PolicyWorker

SMALLEST = ["--networks mlp_64 --styles calls trainer --rounds 1 --seconds 0.3"]
NEEDS = ["envpool", "rillflow_classic"]
CARTPOLE = StreamWorkload(name="", environment="CartPole-v1", slots=16, steps=64)
PONG = StreamWorkload(name="", environment="Pong-v5", slots=8, steps=16)
NETWORKS = {
    "mlp_64": replace(CARTPOLE, network=NetworkConfig(kind="mlp", hidden=(64, 64))),
    "mlp_512": replace(CARTPOLE, network=NetworkConfig(kind="mlp", hidden=(512, 512))),
    "mlp_2048": replace(CARTPOLE, network=NetworkConfig(kind="mlp", hidden=(2048, 2048))),
    "cnn": replace(PONG, network=NetworkConfig(kind="cnn")),
}
STYLES = {
    "calls": "serial",
    "actor": "in the actor",
    "actor_without_prefetch": "in the actor, no prefetch",
    "policy": "decoupled",
    "trainer": "at the trainer",
}
RING = 2


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=list(STYLES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    on_core(-1)
    before = machine()
    rows = [
        f"| network | {' | '.join(STYLES[style] for style in asked.styles)} | lag in versions |",
        "|---|" + "---:|" * (len(asked.styles) + 1),
    ]
    for name in asked.networks:
        found: dict[str, list[tuple[float, float]]] = {style: [] for style in asked.styles}
        for _ in range(asked.rounds):
            for style in asked.styles:
                found[style].append(measured(style, NETWORKS[name], asked.seconds))
        cells = [whole([speed for speed, _ in values]) for values in found.values()]
        lags = ", ".join(f"{fmean(lag for _, lag in values):.1f}" for values in found.values())
        rows.append(f"| {name} | {' | '.join(cells)} | {lags} |")
    title = f"# Where the policy acts\n\n{before}\n"
    command = f"Command: `python benchmarks/classic/styles.py {' '.join(sys.argv[1:])}`"
    text = below_title("\n".join([title, "Trained frames per second.\n", *rows, "", command, ""]), line())
    if asked.write:
        asked.write.write_text(text, "utf-8")
    print(text)


def measured(style: str, workload: StreamWorkload, seconds: float) -> tuple[float, float]:
    """Return trained frames per second, and the mean lag of the trained frames."""
    with ExitStack() as stack:
        learner = learner_of(workload)
        system: Any = serial(workload, learner, stack)
        if style != "calls":
            where, _, rest = style.partition("_")
            system = streamed(where, workload, learner, stack, prefetch=not rest)
        system.publish()
        frames, lags, began = 0, list[float](), 0.0
        warm_until = time.perf_counter() + seconds / 4
        for fragment in system.rollouts("bulk_sync" if style == "calls" else "async"):
            lags.append(learner.version - float(fragment.versions.mean()))
            learner.update(fragment)
            system.publish()
            now = time.perf_counter()
            frames += fragment.num_steps
            if not began and now > warm_until:
                frames, lags, began = 0, [], now
            elif began and now - began > seconds:
                return frames / (now - began), fmean(lags)
    raise AssertionError("rollouts do not end")


def learner_of(workload: StreamWorkload) -> OnPolicyLearner:
    """Return a learner of one pass in one minibatch."""
    environment = workload.make_environment()
    inputs = LearnerInputs(
        observation_space=environment.observation_space,
        action_space=environment.action_space,
        network=workload.network,
        settings=OnPolicyConfig(epochs=1, minibatches=1),
        seed=0,
    )
    environment.close()
    return OnPolicyLearner(inputs)


def serial(workload: StreamWorkload, learner: OnPolicyLearner, stack: ExitStack) -> CallSystem:
    """Return actors that are called in this process, one after the other."""
    backend = InlineBackend()
    backend.open([Pool(name="actors", size=1)])
    stack.callback(backend.close)
    return CallSystem(WorkerSet(backend, "actors", partial(make_called, workload)), {"policy": learner})


def make_called(workload: StreamWorkload, index: int) -> Actor:
    """Return an actor without streams, with the same environments."""
    ring = [workload.make_environment() for _ in range(RING)]
    return Actor(ring, {"policy": workload.make_policy(ring[0])}, workload.steps, index=index)


def streamed(
    style: str, workload: StreamWorkload, learner: OnPolicyLearner, stack: ExitStack, *, prefetch: bool
) -> StreamSystem:
    """Return an actor process, and a policy worker process if the style has one."""
    weights = learner.weights()
    spec = workload.spec(ring=RING, workers=int(style != "actor"), weights=weights)
    transport = open_streams("shared_memory", spec)
    backend: Backend = ProcessBackend()
    stack.callback(transport.close)
    pools = [Pool(name="actors", size=1)]
    pools += [Pool(name="policies", size=1)] if style == "policy" else []
    backend.open(pools)
    stack.callback(backend.close)
    actors = WorkerSet(backend, "actors", partial(make_actor, workload, transport, style == "actor", -1))
    policies = server = None
    if style == "policy":
        policies = WorkerSet(backend, "policies", partial(make_policy_worker, workload, transport, -1))
    if style == "trainer":
        server = PolicyWorker({"policy": learner.policy}, transport.end("worker", 0), refreshes=False)
    system = StreamSystem(
        transport,
        actors,
        {"policy": learner},
        others=[policies] if policies is not None else [],
        server=server,
        prefetch=prefetch,
    )
    stack.callback(system.close)
    return system


if __name__ == "__main__":
    main()

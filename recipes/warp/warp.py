"""WARP: rounds of policies that train separately from one start, are merged, and are moved back to the start.

    start 1 ─┬─ RL, seed 1 ─┐
             ├─ RL, seed 2 ─┼─ slerp of task vectors ─ (1 - eta) start + eta merged ─> start 2 ─> ...
             └─ RL, seed M ─┘

    python recipes/warp/warp.py --rounds 2 --policies 2 --eta 0.5 --dir runs/warp

Source: arXiv 2406.16768. ``algorithm.loss.kl`` keeps a policy close to a reference that follows it
(``reference = "moving"``). Each start is a model directory, DIR/start-N. The same command resumes an
interrupted run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rillflow
from rillflow_merging.command import merge_models
from rillflow_merging.merge import MergeSettings

HERE = Path(__file__).parent


def warp(
    folder: Path,
    *,
    rounds: int,
    policies: int,
    eta: float,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> list[Path]:
    """Run every missing round; return the starts of all rounds, of which the last one is the result.

    Args:
        folder: folder of runs and starts.
        rounds: number of rounds.
        policies: number of policies that train separately in each round.
        eta: step of the next start from the present one towards the merged policies; 0 to 1.
        seed: seed of the first start; every policy's seed follows from it.
        settings: settings of every policy's run that override run.toml.
        quiet: show no output of the runs.
    """
    first = folder / "start-1"
    if not first.exists():
        begun = rillflow.train(
            HERE / "start.toml", settings={"run.seed": seed}, dir=folder / "begin", quiet=quiet
        )
        first.parent.mkdir(parents=True, exist_ok=True)
        first.symlink_to(begun.checkpoint().resolve())
    starts = [first]
    for number in range(1, rounds + 1):
        start, after = starts[-1], folder / f"start-{number + 1}"
        if not after.exists():
            trained = [
                rillflow.train(
                    HERE / "run.toml",
                    settings={
                        **(settings or {}),
                        "policy.model.path": str(start.absolute()),
                        "run.seed": 100_000 * seed + 1_000 * number + policy,
                    },
                    dir=folder / f"round-{number}" / f"policy-{policy}",
                    quiet=quiet,
                )
                for policy in range(1, policies + 1)
            ]
            _next_start(start, [run.checkpoint() for run in trained], after, eta)
        starts.append(after)
    return starts


def _next_start(start: Path, trained: Sequence[Path], after: Path, eta: float) -> None:
    """Write the start of the next round."""
    merged = after.with_name(f"{after.name}-merged")
    if not merged.exists():
        merge_models(trained, merged, MergeSettings(method="slerp"), base=start)
    merge_models([start, merged], after, MergeSettings(weights=(1 - eta, eta)))


def main() -> None:
    """Parse the command line and run all rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="how many (2)")
    parser.add_argument("--policies", type=int, default=2, help="trained apart in each round (2)")
    parser.add_argument("--eta", type=float, default=0.5, help="from the start towards the merged ones (0.5)")
    parser.add_argument("--dir", type=Path, default=Path("runs/warp"), help="where everything is kept")
    told = "algorithm.steps of each policy's run"
    parser.add_argument("--steps", type=int, help=told)
    arguments = parser.parse_args()
    steps = {} if arguments.steps is None else {"algorithm.steps": arguments.steps}
    how = {"rounds": arguments.rounds, "policies": arguments.policies, "eta": arguments.eta}
    for _start in warp(arguments.dir, **how, settings=steps):
        pass


if __name__ == "__main__":
    main()

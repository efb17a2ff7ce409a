"""WARP: rounds of policies trained apart from one start, turned into one, and drawn back towards the start.

    start 1 ─┬─ RL, seed 1 ─┐
             ├─ RL, seed 2 ─┼─ slerp of what they changed ─ (1 - eta) start + eta merged ─> start 2 ─> ...
             └─ RL, seed M ─┘

    python recipes/warp/warp.py --rounds 2 --policies 2 --eta 0.5 --dir runs/warp

Source: arXiv 2406.16768. A policy's run is held by ``algorithm.loss.kl`` to a mean that follows it
(``reference = "moving"``). Each start is a model's directory, DIR/start-N; the same command goes on where it
was interrupted.
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
    """Make every round that is not there yet; the starts of all rounds, the last one the result.

    Args:
        folder: where runs and starts are kept.
        rounds: how many.
        policies: trained apart in each round.
        eta: how far the next start goes from this one towards the merged policies; 0 to 1.
        seed: of the first start; every policy's own follows from it.
        settings: over those of run.toml, for every policy's run.
        quiet: show nothing of the runs.
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
    """Write where the next round begins."""
    merged = after.with_name(f"{after.name}-merged")
    if not merged.exists():
        merge_models(trained, merged, MergeSettings(method="slerp"), base=start)
    merge_models([start, merged], after, MergeSettings(weights=(1 - eta, eta)))


def main() -> None:
    """Run it with what the command says."""
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

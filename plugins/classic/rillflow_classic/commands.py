"""Commands of classic runs: ``rillflow play`` and ``rillflow export``. Imports nothing heavy.

RUN ─ load ─> TrainedPolicy ─┬─ play ─> returns, a video
                             └─ export ─> policy.pt2, policy.onnx
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rillflow_classic.trained_policy import TrainedPolicy


def play(arguments: argparse.Namespace) -> int:
    """``rillflow play``: play whole episodes with a run's policy, and print their returns."""
    from rillflow_classic.evaluation import cut_note, judged_episodes
    from rillflow_classic.trained_policy import FilmError

    policy = _loaded(arguments)
    how = {"seed": arguments.seed, "sample": arguments.sample}
    if arguments.video is not None:
        try:
            filmed = policy.film(arguments.video, **how)
            print(f"wrote {filmed}" if filmed else "the environment draws no pictures, so there is no video")
        except FilmError as error:
            print(f"note: {error.what}", file=sys.stderr)
    episodes = policy.play(arguments.episodes, **how)
    for number, each in enumerate(episodes, 1):
        print(f"episode {number}: return {each.total_reward:.6g} in {each.length:,} steps")
    if note := cut_note(episodes, policy.episode_limit):
        print(f"note: {note}", file=sys.stderr)
    actions = "sampled actions" if arguments.sample else "the likeliest actions"
    print(f"step {policy.step}, {actions}: {judged_episodes(episodes, policy.success).text}")
    return 0


def export(arguments: argparse.Namespace) -> int:
    """``rillflow export``: write a run's policy as a file that acts without Rillflow."""
    from rillflow_classic.export import export as write

    policy = _loaded(arguments)
    write(policy, arguments.out, arguments.policy)
    print(f"wrote {arguments.out}, the policy of step {policy.step}")
    return 0


def play_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``play``."""
    _source_arguments(parser)
    add = parser.add_argument
    told = "episodes to play, of each agent (evaluate.episodes of the run)"
    add("--episodes", type=int, metavar="N", help=told)
    add("--sample", action="store_true", help="draw actions as in training, not the likeliest ones")
    told = "seed of the episodes (that of the run's own evaluation of the step)"
    add("--seed", type=int, metavar="N", help=told)
    add("--video", type=Path, metavar="FILE.webp", help="film an episode into a new file")


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    _source_arguments(parser)
    told = "new file: .pt2 for torch.export.load, .onnx for ONNX Runtime"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=told)
    parser.add_argument("--policy", metavar="NAME", help="policy, if the recipe has [policies]")


def _source_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="RUN", help="directory of a classic run, or of a checkpoint in it")
    chosen = parser.add_mutually_exclusive_group()
    told = "step of the checkpoint (the newest)"
    chosen.add_argument("--checkpoint", type=int, metavar="STEP", help=told)
    told = "the kept checkpoint with the highest mean return of its evaluation"
    chosen.add_argument("--best", action="store_true", help=told)
    told = "the recipe's folder, if it has moved since the run"
    add("--base", type=Path, metavar="FOLDER", help=told)


def _loaded(arguments: argparse.Namespace) -> TrainedPolicy:
    from rillflow_classic.loading import load

    policy = load(arguments.source, step=arguments.checkpoint, best=arguments.best, base=arguments.base)
    if policy.remark:
        print(f"note: {policy.remark}", file=sys.stderr)
    return policy

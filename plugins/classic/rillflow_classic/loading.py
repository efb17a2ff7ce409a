"""Loading: the policy of a run's checkpoint, to act with.

run directory ─ config.json ─> recipe ─> learners ─┐
checkpoint ─ verified ─> weights, statistics ──────┴─> TrainedPolicy
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from rillflow.app.plugins import KIND
from rillflow.controller.checkpoint import Checkpoint, latest_checkpoint
from rillflow.errors import ConfigError, RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.reader import best_step, read_config, read_starts, require_run
from rillflow_classic.build import ENVIRONMENTS, Parts
from rillflow_classic.checkpointed import State, joined
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.policy import ActorPolicy
from rillflow_classic.recipe import LoadedClassicRecipe
from rillflow_classic.trained_policy import TrainedPolicy

FAMILY = "classic"
"""Kind of the recipes whose runs are loaded."""


def load(
    source: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    seed: int = 0,
    base: str | Path | None = None,
) -> TrainedPolicy:
    """Return the trained policy of a run, ready to act.

    An environment of the run is made once, to learn its spaces.

    Args:
        source: a run directory, also of a run that still trains; or the folder of one of its checkpoints.
        step: step of the checkpoint; None for the newest one that is intact.
        best: take the kept checkpoint with the highest mean return of its evaluation.
        seed: seed of sampled actions; greedy ones need none.
        base: the recipe's folder, if it has moved since the run.

    Raises:
        RunDirectoryError: there is no such run or checkpoint, or its files do not fit the recipe.
        ConfigError: the run trains a language model, or the environment cannot be made.

    Example:
        policy = rillflow_classic.load("runs/first")
        action = policy.act(observation)
    """
    run, step = _located(Path(source), step, best=best)
    loaded = recipe_of_run(run, None if base is None else Path(base))
    checkpoint = checkpoint_of(run, best_step(run) if best else step)
    parts = Parts.of(loaded, is_beside=True)
    policies = _policies(parts, checkpoint)
    for place, policy in enumerate(policies.values()):
        policy.seed(seed + place)
    return TrainedPolicy(
        parts,
        policies,
        _statistics(checkpoint, parts.environment),
        run=run,
        step=checkpoint.step,
        run_seed=loaded.recipe.run.seed,
        remark=loaded.algorithm.remark,
    )


def _policies(parts: Parts, checkpoint: Checkpoint) -> dict[str, ActorPolicy]:
    """Return the policies by name, with the weights of a checkpoint."""
    policies = {}
    for name, learner in parts.learners().items():
        try:
            learner.restore(_state(checkpoint, name))
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            raise RunDirectoryError(
                f"{checkpoint.path} does not fit the learner {name!r}: {error}",
                why=f"the algorithm {parts.algorithm} makes other weights than those that were saved",
                fix="use the code and the versions that trained the run",
            ) from error
        policies[name] = learner.policy
    return policies


def recipe_of_run(run: Path, base: Path | None = None) -> LoadedClassicRecipe:
    """Return the recipe that a run directory keeps, with the folder of its file.

    Raises:
        ConfigError: the run is of another kind, or a setting of it is not known any more.
        RunDirectoryError: it is no run directory, or a file of it is damaged.
    """
    config, starts = read_config(run), read_starts(run)
    if KIND not in config or config[KIND] != FAMILY:
        raise ConfigError(
            f"{run} has no policy of classic RL",
            why=f"its recipe has the kind {config[KIND]!r}"
            if KIND in config
            else "it trains a language model",
            fix="for a language model: rillflow ask RUN, or rillflow.open_run(RUN).ask(...)",
        )
    folder = base or Path(str(starts[-1].get("base") or "") if starts else "")
    data: Mapping[str, Any] = dict(config)
    return LoadedClassicRecipe.of(folder / f"{run.name}.toml", data, ())


def checkpoint_of(run: Path, step: int | None) -> Checkpoint:
    """Return the newest intact checkpoint, or that of a step.

    Raises:
        RunDirectoryError: there is none, or its files have changed since they were written.
    """
    folder = run / layout.CHECKPOINTS
    steps = layout.kept_steps(folder) if folder.is_dir() else []
    if not steps:
        raise RunDirectoryError(
            f"{run} has no checkpoint",
            why="the first one is written after run.checkpoint_every steps, or when the run ends",
            fix="wait for it, or run the recipe again with a smaller run.checkpoint_every",
        )
    if step is not None and step not in steps:
        raise RunDirectoryError(
            f"{run} has no checkpoint of step {step}",
            why=f"it has checkpoints of the steps {', '.join(map(str, steps))} (run.keep_checkpoints)",
            fix=f"choose one of these, such as {steps[-1]}",
        )
    found = latest_checkpoint(folder, before=math.inf if step is None else step + 1)
    if found is None or (step is not None and found.step != step):
        raise RunDirectoryError(
            f"the checkpoint of step {step} in {run} is damaged",
            why="a file differs from the one that was written; rillflow verify names it",
            fix="restore the file, or choose another step",
        )
    return found


def _located(source: Path, step: int | None, *, best: bool) -> tuple[Path, int | None]:
    """Return the run directory, and the step that its caller, or the folder of a checkpoint, names."""
    run = source
    if run.parent.name == layout.CHECKPOINTS and layout.is_run_directory(run.parent.parent):
        if step is not None or best:
            raise ConfigError(
                f"a step is chosen, and {run} is already a checkpoint",
                why="it has one step",
                fix="choose one",
            )
        step, run = _step_of(run), run.parent.parent
    if (run / "manifest.json").is_file():
        raise RunDirectoryError(
            f"{run} is a checkpoint outside of a run directory",
            why="the settings of its network are in the config.json of its run",
            fix="give the run directory, or RUN/checkpoints/step-N in it; rillflow export writes a file "
            "that stands alone",
        )
    require_run(run)
    if step is not None and best:
        raise ConfigError(
            f"step is {step} and best is set", why="each chooses a checkpoint", fix="choose one"
        )
    return run, step


def _step_of(checkpoint: Path) -> int:
    try:
        return layout.checkpoint_step(checkpoint)
    except ValueError:
        raise RunDirectoryError(
            f"{checkpoint} is no checkpoint", why="a checkpoint is a folder such as step-000100"
        ) from None


def _state(checkpoint: Checkpoint, name: str) -> State:
    """Return the saved state of an object.

    Raises:
        RunDirectoryError: the checkpoint does not hold it.
    """
    states: Mapping[str, Any] = checkpoint.state["objects"]
    if name not in states:
        raise RunDirectoryError(
            f"{checkpoint.path} has no state of {name!r}",
            why=f"it holds {', '.join(states)}",
            fix="load a checkpoint that a run of this recipe wrote",
        )
    try:
        return joined(load_file(checkpoint.path / f"{name}.safetensors"), states[name])
    except SafetensorError as error:
        raise RunDirectoryError(
            f"{checkpoint.path / name}.safetensors cannot be read: {error}",
            why="another program wrote it",
            fix="restore the file, or choose another step",
        ) from error


def _statistics(checkpoint: Checkpoint, settings: EnvironmentSettings) -> Mapping[str, Any]:
    """Return the running statistics of the first environment, which evaluations use too.

    Raises:
        RunDirectoryError: the policy needs statistics, and the checkpoint has none.
    """
    if not (settings.normalise_observations or settings.normalise_rewards):
        return {}
    return {name: value.numpy() for name, value in _state(checkpoint, ENVIRONMENTS)["0"]["0"].items()}


__all__ = ["TrainedPolicy", "load"]

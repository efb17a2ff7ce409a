"""Held out: score a model's directory by a recipe's own evaluation, before any step.

recipe, model ─ the recipe with this model, in a temporary folder ─ roles ─ evaluator ─> mean reward
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rillflow.errors import ConfigError
from rillflow.runs.reader import Evaluation


def held_out_score(recipe: Path) -> Callable[[Path], float]:
    """Return a function that scores a model by the mean reward of its answers to the held-out prompts.

    If the recipe trains a reward model, the score is the share of held-out pairs that it ranks correctly.

    Args:
        recipe: a recipe's TOML file; the scored model replaces its model, and its other settings apply.
    """

    def score(model: Path) -> float:
        return evaluated(recipe, model).mean_reward

    return score


def evaluated(recipe: Path, model: Path) -> Evaluation:
    """Evaluate a model's directory on a recipe's held-out rows.

    Raises:
        RillflowError: the recipe cannot run with this model.
        ConfigError: the recipe has no held-out rows, or no role scores them.
    """
    from rillflow.app.build import Build
    from rillflow.app.facts import RecipeFacts
    from rillflow.app.preflight_checks import require_sound
    from rillflow.app.recipe import load_recipe
    from rillflow.app.resume import run_config
    from rillflow.runs.run_directory import RunDirectory

    path = json.dumps(str(model.absolute()))
    words = [f"policy.model={{ path = {path} }}", "warm_start=none"]
    loaded = load_recipe(recipe, words)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rillflow-held-out-"))) / "run"
        facts = RecipeFacts(resolved=loaded, say=lambda _: None)
        require_sound(facts)
        settings = run_config(facts.resolved, facts.task)
        run = stack.enter_context(RunDirectory.open(folder, settings))
        build = Build(facts, run, None, stack)
        found = [each for each in build.evaluate() if not each.set]
    if not found:
        raise ConfigError(
            f"{recipe} has no held-out rows to evaluate a model on",
            why="a greedy soup selects models by their held-out scores",
            fix="set task.held_out, evaluate.problems and a reward",
        )
    return found[0]

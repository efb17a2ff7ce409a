"""Static system: a recipe on a static plan has the weights of the same recipe by calls, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import rillflow
from rillflow.cli.main import main
from rillflow.errors import ConfigError
from rillflow.runs import layout

RECIPE: dict[str, Any] = {
    "kind": "classic",
    "environment": {"id": "CartPole-v1", "provider": "gymnasium", "run": "inline"},
    "network": {"hidden": [8]},
    "algorithm": {"name": "ppo", "steps": 4},
    "workers": {"actors": 3, "slots": 2, "steps": 16},
    "evaluate": {"episodes": 0, "video": False},
    "run": {"checkpoint_every": 2, "threads": 1},
}


def trained(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    """Run the recipe, and return everything in its last checkpoint as lists."""
    run = folder / name
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    rillflow.train(RECIPE, settings=changes, dir=run, quiet=True)
    step = layout.kept_steps(run / layout.CHECKPOINTS)[-1]
    found: dict[str, Any] = {}
    for file in sorted((run / layout.CHECKPOINTS / f"step-{step:06d}").glob("*.safetensors")):
        found |= {f"{file.name}:{key}": value.tolist() for key, value in load_file(file).items()}
    return found


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "dqn"])
def test_the_weights_are_those_of_calls_for_every_number_of_threads(tmp_path: Path, algorithm: str) -> None:
    called = trained(tmp_path, "pull", algorithm__name=algorithm)
    assert called
    for threads in (1, 2, 4):
        static = trained(
            tmp_path,
            f"static {threads}",
            algorithm__name=algorithm,
            workers__executor="static",
            workers__threads=threads,
        )
        assert static == called, f"{threads} threads"


def test_the_plan_is_drawn_and_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        'kind = "classic"\n[environment]\nid = "CartPole-v1"\n[algorithm]\nname = "ppo"\nsteps = 1\n'
        '[workers]\nactors = 2\nexecutor = "static"\n'
    )
    assert main(["graph", str(recipe)]) == 0
    assert "static plan of 2 actors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers.place": "process"}, "a static plan runs the actors on threads of this process"),
        ({"workers.transport": "shared_memory"}, "a static plan runs the actors on threads"),
        ({"algorithm.name": "a3c"}, "a static plan has a fixed pattern"),
        ({"algorithm.name": "apex"}, "a static plan has a fixed pattern"),
        ({"algorithm.name": "impala"}, "a static plan has a fixed pattern"),
    ],
)
def test_a_recipe_without_a_fixed_pattern_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    changes = {"workers.executor": "static", "run.dir": str(tmp_path / "run"), **settings}
    with pytest.raises(ConfigError, match=message):
        rillflow.train(RECIPE, settings=changes, quiet=True)

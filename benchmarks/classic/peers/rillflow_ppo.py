"""PPO of Rillflow, with the plan and the workers of a run; the form may set the precision of the CNN."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from task import Clock, Task, read_task


def main(task: Task) -> None:
    """Train with the plan's parts, and time both phases."""
    from rillflow_classic.build import Parts, open_system
    from rillflow_classic.recipe import LoadedClassicRecipe

    recipe = {
        "kind": "classic",
        "environment": {"id": "Pong-v5" if task.is_frames else task.environment},
        "network": {"precision": task.form or "float32"},
        "workers": {"slots": task.slots, "steps": task.steps},
        "algorithm": {"name": "ppo", "steps": 1, "epochs": task.epochs, "minibatches": task.minibatches},
        "run": {"seed": task.seed},
    }
    parts = Parts.of(LoadedClassicRecipe.of(Path("run.toml"), recipe, ()))
    with ExitStack() as stack:
        system = open_system(parts, stack)
        system.reset(task.seed)
        rollouts = iter(system.rollouts("bulk_sync"))
        clock = Clock()
        for update in range(task.warm + task.updates):
            if update == task.warm:
                clock.restart()
            with clock.phase("sampling"):
                fragment = next(rollouts)
            with clock.phase("learning"):
                system.learner.update(fragment)
                system.publish()
            clock.frames += fragment.num_steps
        clock.report()


if __name__ == "__main__":
    main(read_task())

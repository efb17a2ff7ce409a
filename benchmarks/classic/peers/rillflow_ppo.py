"""PPO of Rillflow, with the plan and the workers of a run.

The form is the precision of the CNN, or the number of actors, each in a process with its part of the slots.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from task import Clock, Task, read_task


def main(task: Task) -> None:
    """Train with the plan's parts, and time both phases."""
    from rillflow_classic.build import Parts, open_system
    from rillflow_classic.recipe import LoadedClassicRecipe

    actors = int(task.form) if task.form.isdigit() else 0
    recipe = {
        "kind": "classic",
        "environment": {
            "id": "Pong-v5" if task.is_frames else task.environment,
            "arguments": {"num_threads": 1} if actors else {},
        },
        "network": {"precision": "bfloat16" if task.form == "bfloat16" else "float32"},
        "workers": {
            "actors": actors or 1,
            "place": "process" if actors else "inline",
            "slots": task.slots // (actors or 1),
            "steps": task.steps,
        },
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

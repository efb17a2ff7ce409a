"""PPO of Rillflow, with the plan and the workers of a run; the form may set the precision of the CNN."""

from __future__ import annotations

from contextlib import ExitStack

from task import Clock, Task, read_task


def main(task: Task) -> None:
    """Train with the plan's parts, and time both phases."""
    from rillflow_classic.algorithms.ppo import PPOConfig
    from rillflow_classic.build import Parts, open_system
    from rillflow_classic.config import ActorsConfig
    from rillflow_classic.environments.config import EnvironmentSettings
    from rillflow_classic.networks.config import NetworkConfig

    parts = Parts(
        environment=EnvironmentSettings(id="Pong-v5" if task.is_frames else task.environment),
        network=NetworkConfig(precision="bfloat16" if task.form == "bfloat16" else "float32"),
        algorithm="ppo",
        settings=PPOConfig(epochs=task.epochs, minibatches=task.minibatches),
        workers=ActorsConfig(slots=task.slots, steps=task.steps),
        policies=("policy",),
        routes=None,
        seed=task.seed,
    )
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

"""PPO of Stable-Baselines3, with its own environments: dummy (one after the other) or subproc (processes)."""

from __future__ import annotations

from task import Clock, Task, read_task


def main(task: Task) -> None:
    """Train, and time both phases of its loop."""
    import ale_py
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.atari_wrappers import AtariWrapper
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

    gymnasium.register_envs(ale_py)
    vectors = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[task.form or "dummy"]
    if task.is_frames:
        environments = make_vec_env(
            "ALE/Pong-v5",
            task.slots,
            seed=task.seed,
            env_kwargs={"frameskip": 1, "repeat_action_probability": 0.0},
            wrapper_class=AtariWrapper,
            wrapper_kwargs={"terminal_on_life_loss": False},
            vec_env_cls=vectors,
        )
        environments = VecFrameStack(environments, 4)
    else:
        environments = make_vec_env(task.environment, task.slots, seed=task.seed, vec_env_cls=vectors)
    model = PPO(
        "CnnPolicy" if task.is_frames else "MlpPolicy",
        environments,
        n_steps=task.steps,
        batch_size=task.batch // task.minibatches,
        n_epochs=task.epochs,
        learning_rate=2.5e-4,
        ent_coef=0.01,
        seed=task.seed,
        device="cpu",
    )
    clock, seen = Clock(), [0]
    collect, train = model.collect_rollouts, model.train

    def timed_collect(*arguments: object, **named: object) -> bool:
        if seen[0] == task.warm:
            clock.restart()
        with clock.phase("sampling"):
            result = collect(*arguments, **named)
        seen[0] += 1
        clock.frames += task.batch
        return result

    def timed_train() -> None:
        with clock.phase("learning"):
            train()

    model.collect_rollouts, model.train = timed_collect, timed_train
    model.learn((task.warm + task.updates) * task.batch)
    clock.report()
    environments.close()


if __name__ == "__main__":
    main(read_task())

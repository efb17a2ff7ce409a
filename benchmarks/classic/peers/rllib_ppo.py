"""PPO of RLlib's new stack; the form is the number of environment runners, 0 for the driver's own."""

from __future__ import annotations

from typing import Any

from task import Clock, Task, read_task


def config(task: Task, runners: int) -> Any:
    """Return RLlib's settings for a task."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    model = DefaultModelConfig(
        fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=task.is_frames, head_fcnet_hiddens=[]
    )
    if task.is_frames:
        model.conv_filters = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]
        model.fcnet_hiddens, model.head_fcnet_hiddens = [512], [512]
    return (
        PPOConfig()
        .environment("pong" if task.is_frames else task.environment)
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=task.slots // max(runners, 1),
            rollout_fragment_length=task.steps,
        )
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=task.batch,
            minibatch_size=task.batch // task.minibatches,
            num_epochs=task.epochs,
            lr=2.5e-4,
            lambda_=0.95,
            clip_param=0.2,
            entropy_coeff=0.01,
            vf_loss_coeff=0.5,
            grad_clip=0.5,
        )
        .rl_module(model_config=model)
        .debugging(seed=task.seed, log_level="ERROR")
    )


def main(task: Task) -> None:
    """Train, and read both phases from its timers."""
    import ale_py
    import gymnasium
    import ray
    from ray.rllib.algorithms.ppo import ppo
    from ray.tune.registry import register_env

    runners = int(task.form or 0)
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=max(2, runners + 1))

    def pong(_: object) -> gymnasium.Env:
        from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack

        gymnasium.register_envs(ale_py)
        raw = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
        return wrap_atari_for_new_api_stack(raw, dim=84, frameskip=4, framestack=4)

    register_env("pong", pong)
    algorithm = config(task, runners).build_algo()
    clock = Clock()
    sample, update_ = ppo.synchronous_parallel_sample, algorithm.learner_group.update

    def timed_sample(*arguments: object, **named: object) -> object:
        with clock.phase("sampling"):
            return sample(*arguments, **named)

    def timed_update(*arguments: object, **named: object) -> object:
        with clock.phase("learning"):
            return update_(*arguments, **named)

    ppo.synchronous_parallel_sample, algorithm.learner_group.update = timed_sample, timed_update
    for update in range(task.warm + task.updates):
        if update == task.warm:
            clock.restart()
        result = algorithm.train()
        clock.frames += int(result["env_runners"]["num_env_steps_sampled"])
    clock.report()
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(read_task())

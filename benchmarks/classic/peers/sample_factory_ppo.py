"""APPO of Sample Factory, in its serial or asynchronous mode; phases overlap, so only the total is known."""

from __future__ import annotations

import sys
import tempfile

from task import Clock, Task, read_task


def main(task: Task) -> None:
    """Train for the frames of the task; the warm-up is a fragment count too."""
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    register_env(task.environment, make)
    workers = int(task.form or 1)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "algo": "APPO",
            "env": task.environment,
            "experiment": "e",
            "train_dir": folder,
            "device": "cpu",
            "restart_behavior": "overwrite",
            "serial_mode": workers == 1,
            "async_rl": workers > 1,
            "num_workers": workers,
            "num_envs_per_worker": task.slots // workers,
            "worker_num_splits": 1 if workers == 1 else 2,
            "rollout": task.steps,
            "batch_size": task.batch // task.minibatches,
            "num_batches_per_epoch": task.minibatches,
            "num_epochs": task.epochs,
            "use_rnn": False,
            "encoder_mlp_layers": "64 64",
            "nonlinearity": "tanh",
            "actor_critic_share_weights": False,
            "normalize_input": False,
            "normalize_returns": False,
            "learning_rate": 2.5e-4,
            "train_for_env_steps": (task.warm + task.updates) * task.batch,
            "save_every_sec": 10**6,
            "seed": task.seed,
        }
        arguments = [part for name, value in options.items() for part in _option(name, value)]
        parser, _ = parse_sf_args(arguments)
        runner = make_runner(parse_full_cfg(parser, arguments))[1]
        runner.init()
        clock = Clock()
        clock.restart()
        runner.run()
        clock.frames = (task.warm + task.updates) * task.batch
        clock.report()
        sys.stdout.flush()


def make(name: str, *_: object, **__: object) -> object:
    """Return an environment; a worker process calls it."""
    import gymnasium

    return gymnasium.make(name)


def _option(name: str, value: object) -> list[str]:
    return [f"--{name}", *str(value).split()] if " " in str(value) else [f"--{name}={value}"]


if __name__ == "__main__":
    main(read_task())

"""GRPO without a flow, roles, groups or a recipe: the engines and thirty lines of loop.

    python examples/grpo_by_hand.py                 # prints the loss and the mean reward of every step

An assembled run with the same settings gives the same numbers, bit for bit; a test checks it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rillflow.formulas import group_advantages
from rillflow.formulas.config import PolicyLossConfig
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model
from rillflow.records.metrics import Mean, merge_metrics
from rillflow.records.rollout import completions
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.tasks import kinds
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.prompts import PromptStream, prompt_batch
from rillflow.tasks.task import open_task
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss
from rillflow.training.minibatches import minibatches
from rillflow.training.trainer import Trainer

SEED, STEPS, PROMPTS, SAMPLES, MINIBATCHES, MAX_TOKENS = 0, 6, 16, 8, 2, 4
TASK = TaskConfig(source="arithmetic", digits=1, operators="+", size=90, held_out=10)
MODEL = ModelConfig(new=NewModel(hidden=32, layers=2, context=16, alphabet="0123456789+="))
SPLIT_DP_REDUCE = TrainConfig(lr=3e-3)


def low(answer: str) -> float:
    """Return the reward: the share of four characters that are digits below 5."""
    return sum(letter < "5" and letter.isdigit() for letter in answer) / 4


def main() -> list[dict[str, float]]:
    """Train; return the loss and the mean reward of every step."""
    model = load_model(MODEL, seed=SEED, device=torch.device("cpu"), base=Path())
    engine = NativeEngine(
        model.module,
        RolloutConfig(max_tokens=MAX_TOKENS),
        stop_tokens=model.tokenizer.stop_tokens,
        seed=SEED,
        context=model.context,
    )
    trainer = Trainer(model.module, SPLIT_DP_REDUCE, total_steps=STEPS * MINIBATCHES)
    loss = PolicyLoss(PolicyLossConfig(), max_tokens=MAX_TOKENS)
    task = open_task(TASK, kinds.PROMPTS, base=Path(), seed=SEED)
    stream = PromptStream(Encoder(tokenizer=model.tokenizer).rows(task.train), seed=SEED)
    found = []
    for step in range(STEPS):
        drawn = stream.take(PROMPTS)
        prompts = prompt_batch([draw.row for draw in drawn], epoch=[draw.epoch for draw in drawn])
        rollouts = engine.generate(prompts, SAMPLES)
        answers = [model.tokenizer.decode(tokens) for tokens in completions(rollouts).lists()]
        rewards = torch.tensor([low(answer) for answer in answers])
        _, groups = torch.unique(rollouts.ids[:, :2], dim=0, return_inverse=True)
        advantages = group_advantages(
            rewards, groups, torch.ones(len(rewards), dtype=torch.bool), scale="std"
        )
        rows = rollouts.with_fields(advantages=advantages, old_logprobs=trainer.scorer.logprobs(rollouts))
        report = merge_metrics(
            trainer.update(part, loss) for part in minibatches(rows, 1, MINIBATCHES, SEED, step)
        )
        engine.load(step + 1, dict(model.module.named_parameters()))
        measured = report["policy/loss/mean"]
        assert isinstance(measured, Mean)
        found.append({"loss": measured.value, "reward": float(rewards.double().mean())})
        print(f"step {step + 1}: loss {measured.value:+.6f}, mean reward {found[-1]['reward']:.4f}")
    return found


if __name__ == "__main__":
    main()

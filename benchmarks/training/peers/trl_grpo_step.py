"""The child of ``benchmarks/training/grpo_step.py``: TRL's GRPOTrainer, in an interpreter that has TRL.

standard input ── a line a step ──> GRPOTrainer ── a line with the step's timing ──> standard output
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import grpo_step


def run_trl(folder: Path, arguments: argparse.Namespace) -> None:
    """Make one step of TRL's trainer for every line on standard input."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shape, steps, lengths = grpo_step.shape_of(arguments), arguments.steps + 1, list[float]()
    device, generating = torch.device(arguments.device), [0.0]

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sys.stdin.readline()
            self.began, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            grpo_step.wait(device)
            found = {
                "seconds": time.perf_counter() - self.began,
                "cpu_s": time.process_time() - self.cpu,
                "generate_s": generating[0],
                "tokens": lengths[-1],
                "peak": grpo_step.peak_of(device),
            }
            print(grpo_step.MARK + json.dumps(found), flush=True)

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate(self, *given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            found = super()._generate(*given, **named)
            grpo_step.wait(device)
            generating[0] = time.perf_counter() - began
            return found

    def share_of_wanted(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(statistics.mean(map(len, completion_ids)))
        return [sum(token % 2 == 0 for token in ids) / shape.answer for ids in completion_ids]

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # a Qwen2's own would not know these words
    texts = grpo_step.texts_of(
        [prompt for step in range(steps) for prompt in grpo_step.prompts_of(step, shape)], tokenizer
    )
    trainer = Timed(
        peft_config=their_adapter(arguments.adapter),
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.dtypes[0])),
        processing_class=tokenizer,
        reward_funcs=share_of_wanted,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        callbacks=[Turns()],
        args=settings_of(folder, steps, arguments),
    )
    trainer.train()


def settings_of(folder: Path, steps: int, arguments: argparse.Namespace) -> Any:
    """Return TRL's settings for the same steps."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=grpo_step.GROUPS * grpo_step.SAMPLES,
        num_generations=grpo_step.SAMPLES,
        max_completion_length=grpo_step.shape_of(arguments).answer,
        max_steps=steps,
        learning_rate=grpo_step.RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,  # on by default; off, it is faster here
        bf16=False,
        use_cpu=arguments.device == "cpu",
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def their_adapter(rank: int) -> Any:
    """PEFT's settings of an adapter beside each linear layer of the body; None for no rank."""
    if not rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=grpo_step.ALPHA, target_modules="all-linear")


if __name__ == "__main__":
    given = grpo_step.parsed()
    run_trl(Path(given.peer), given)

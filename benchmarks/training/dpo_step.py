"""One DPO step against TRL's DPOTrainer: same weights, pairs, precision and rate; and gradients compared.

    parent (this interpreter, Rillflow)          child (the interpreter of --trl)
      step ── reference log probs, update          waits
      "go" ────────────────────────────────────>   DPOTrainer: one optimiser step
      waits                     <───────────────   its seconds

Steps alternate, so that both see the same machine; only one of them computes at a time.

    python benchmarks/training/dpo_step.py                                     # Rillflow alone
    python -m venv .trl && .trl/bin/pip install trl                   # TRL in an environment of its own
    python benchmarks/training/dpo_step.py --trl .trl/bin/python --write benchmarks/results/dpo_step.md
    python benchmarks/training/dpo_step.py --trl .trl/bin/python --only gradients

Setting: Qwen2 with 3.3 million parameters (hidden 256, 4 layers, 4 heads, 2 key/value heads, vocabulary 256),
8 new pairs in every step, float32, AdamW. A long prompt has 512 tokens and completions of at most 32. A short
prompt has 16 tokens and completions of at most 64. The reference is a separate model. In one case the step
computes its log probabilities, as in TRL's default and in Rillflow's first epoch. In the other case they are
known before the step: TRL's ``precompute_ref_log_probs``, and Rillflow in every later epoch.

Gradients are compared in float64 before clipping, over pairs whose answers differ in length. The figure is
the norm of the difference divided by the norm of TRL's gradient. The decoder's norms and TRL's log
probabilities compute in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_step import MARK, SHAPES, STOP, _versions, make_model

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SMALLEST = []
SLOW = ["--steps 1 --threads 1 --only steps"]  # its model and pairs have full size

SHAPE, PAIRS, RATE, BETA = SHAPES["3.3m"], 8, 1e-5, 0.1


@dataclass(frozen=True, kw_only=True)
class Case:
    """Lengths of a step's rows, and the state of the reference's log probabilities."""

    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Largest number of tokens of an answer, with its end token."""
    is_known: bool
    """True if the reference's log probabilities are known before the step."""


CASES = {
    "long prompt": Case(prompt=512, answer=32, is_known=False),
    "long prompt, reference known": Case(prompt=512, answer=32, is_known=True),
    "short prompt": Case(prompt=16, answer=64, is_known=False),
    "short prompt, reference known": Case(prompt=16, answer=64, is_known=True),
}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dpo": ({"kind": "dpo"}, {"loss_type": ["sigmoid"]}),
    "dpo, by length": ({"kind": "dpo", "by_length": True}, {"loss_type": ["sigmoid_norm"]}),
    "dpo + 0.5 nll": (
        {"kind": "dpo", "nll": 0.5},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "ipo": ({"kind": "ipo"}, {"loss_type": ["ipo"]}),
    "hinge": ({"kind": "hinge"}, {"loss_type": ["hinge"]}),
    "simpo": ({"kind": "simpo", "gamma": 0.5}, {"simpo_gamma": 0.5}),
    "kto": ({}, {"loss_type": "kto"}),
}
"""Rillflow's and TRL's settings of each compared loss; beta is 0.1, but 2 in simpo."""
SMALL = Case(prompt=12, answer=9, is_known=False)


def main() -> None:
    arguments = _arguments()
    if arguments.peer:
        run_trl(Path(arguments.peer), arguments)
        return
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before this process or the child imports torch
    lines = _head(arguments)
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        if arguments.only != "gradients":
            for name in CASES:
                lines += timed(name, Path(folder), arguments)
        if arguments.trl and arguments.only != "steps":
            lines += gradients(Path(folder), arguments)
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text + "\n")


def make_models(folder: Path) -> None:
    """Save the policy, and a reference whose weights differ slightly."""
    import torch
    from transformers import AutoModelForCausalLM

    for name in ("policy", "reference"):
        make_model(folder / name, SHAPE)
    other = AutoModelForCausalLM.from_pretrained(folder / "reference")
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.005 * torch.randn_like(weight)
    other.save_pretrained(folder / "reference")


def pairs_of(step: int, case: Case) -> list[tuple[list[int], list[int], list[int]]]:
    """Return prompt, chosen and rejected of each pair of a step, as token ids without the end token."""
    numbers = random.Random(step)

    def drawn(count: int) -> list[int]:
        return [numbers.randrange(2, SHAPE.vocabulary) for _ in range(count)]

    return [
        (
            drawn(case.prompt),
            drawn(case.answer - 1),
            drawn(numbers.randint(case.answer // 2, case.answer - 1)),
        )
        for _ in range(PAIRS)
    ]


def batch_of(step: int, case: Case, *, single: bool = False) -> Any:
    """Return a step's rows: pairs, or with ``single`` an answer per prompt and that of the row before."""
    import torch

    from rillflow.records.batch import Batch, row_ids
    from rillflow.records.ragged import Ragged
    from rillflow.records.row import RowId

    drawn = [(prompt, [*one, STOP], [*other, STOP]) for prompt, one, other in pairs_of(step, case)]
    if single:
        own = [answers[place % 2] for place, (_, *answers) in enumerate(drawn)]
        drawn = [(prompt, own[place], own[place - 1]) for place, (prompt, *_) in enumerate(drawn)]
    rows = [
        (RowId(0, step * PAIRS + place, side), asked, both[side])
        for place, (asked, *both) in enumerate(drawn)
        for side in (0, 1)
    ]
    tokens = Ragged.from_rows([[*asked, *answer] for _, asked, answer in rows])
    fields = {"tokens": tokens, "loss_mask": tokens.with_values(tokens.positions >= case.prompt)}
    if single:
        fields["label"] = torch.tensor([not place % 2 for place in range(PAIRS) for _ in (0, 1)])
    return Batch(ids=row_ids([row for row, _, _ in rows]), fields=fields)


def load(folder: Path, name: str, dtype: str = "float32") -> Any:
    """Return a model with Rillflow's attention."""
    import torch
    from transformers import AutoModelForCausalLM

    from rillflow.models.attention import ATTENTION, register

    register()
    how: dict[str, Any] = {"attn_implementation": ATTENTION, "dtype": getattr(torch, dtype)}
    return AutoModelForCausalLM.from_pretrained(folder / name, **how)


def rillflow_step(
    folder: Path, case: Case, arguments: argparse.Namespace
) -> Callable[[int], tuple[float, float]]:
    """Return a function that runs one Rillflow step and returns its wall seconds and CPU seconds."""
    import torch

    from rillflow.formulas.preferences import PairLossConfig
    from rillflow.roles.answer_totals import totals_of
    from rillflow.training.answers import AnswerLoss
    from rillflow.training.config import TrainConfig
    from rillflow.training.scorer import Scorer
    from rillflow.training.trainer import Trainer

    torch.set_num_threads(arguments.threads)
    trainer = Trainer(load(folder, "policy"), TrainConfig(lr=RATE), total_steps=1000)
    reference, loss = (
        Scorer(load(folder, "reference"), TrainConfig()),
        AnswerLoss(PairLossConfig(beta=BETA)),
    )

    def step(index: int) -> tuple[float, float]:
        rows = batch_of(index, case)
        known = totals_of(reference, rows, 1.0) if case.is_known else None
        began, cpu = time.perf_counter(), time.process_time()
        known = totals_of(reference, rows, 1.0) if known is None else known
        trainer.update(rows.with_fields(reference_totals=known), loss)
        return time.perf_counter() - began, time.process_time() - cpu

    return step


def timed(name: str, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Time one case and return its table."""
    found: dict[str, list[tuple[float, float]]] = {"Rillflow": [], "TRL DPOTrainer": []}
    step = rillflow_step(folder, CASES[name], arguments)
    with child(arguments, folder, case=name, steps=arguments.steps + 1) as their_step:
        for index in range(arguments.steps + 1):
            found["Rillflow"].append(step(index))
            if their_step is not None:
                told = their_step()
                found["TRL DPOTrainer"].append((told["seconds"], told["cpu_s"]))
            print(
                f"{name}, step {index}: {', '.join(f'{k} {v[-1][0]:.3f} s' for k, v in found.items() if v)}",
                flush=True,
            )
    mine = statistics.median(seconds for seconds, _ in found["Rillflow"][1:])
    lines = [
        "",
        f"## {name.capitalize()}",
        "",
        "| engine | s a step | least .. most | CPU s | ratio |",
        "|---|---|---|---|---|",
    ]
    for engine, both in found.items():
        seconds = [each for each, _ in both[1:]]
        if seconds:
            cpu = statistics.median(each for _, each in both[1:])
            median = statistics.median(seconds)
            spread = f"{min(seconds):.3f} .. {max(seconds):.3f}"
            lines.append(f"| {engine} | {median:.3f} | {spread} | {cpu:.3f} | {median / mine:.2f} |")
    return lines


def gradients(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Return the distance between Rillflow's and TRL's gradient of each loss, as a table."""
    import torch
    from safetensors.torch import load_file

    lines = ["", "## Gradients", "", "| loss | distance over TRL's norm | TRL's norm |", "|---|---|---|"]
    with child(arguments, folder, loss="all", steps=1) as their_step:
        for _ in LOSSES:
            assert their_step is not None
            their_step()
    for name in LOSSES:
        theirs, ours = load_file(folder / f"{name}.safetensors"), our_gradient(folder, name)
        there = torch.cat([theirs[key].flatten().double() for key in sorted(ours)])
        here = torch.cat([ours[key].flatten().double() for key in sorted(ours)])
        lines.append(
            f"| {name} | {float((here - there).norm() / there.norm()):.1e} | {float(there.norm()):.3g} |"
        )
        print(lines[-1], flush=True)
    return lines


def our_gradient(folder: Path, name: str) -> dict[str, Any]:
    """Return the gradient of the first step's loss by weight, accumulated over micro-batches."""
    from rillflow.formulas.preferences import PairLossConfig
    from rillflow.formulas.unpaired import UnpairedLossConfig
    from rillflow.roles.answer_totals import totals_of
    from rillflow.training.answers import AnswerLoss
    from rillflow.training.config import TrainConfig
    from rillflow.training.guards import loss_tokens
    from rillflow.training.scorer import LogprobReader, Scorer, micro_batches
    from rillflow.workers.collectives import SingleRank

    module, settings, single = load(folder, "policy", "float64"), LOSSES[name][0], name == "kto"
    scorer, rows = Scorer(module, TrainConfig()), batch_of(0, SMALL, single=single)
    known = totals_of(Scorer(load(folder, "reference", "float64"), TrainConfig()), rows, 1.0)
    rows = rows.with_fields(reference_totals=known)
    paired = {"beta": 2.0 if name == "simpo" else BETA, **settings}
    loss = AnswerLoss(UnpairedLossConfig(beta=BETA) if single else PairLossConfig(**paired))
    prepared = loss.settled(loss.prepare(rows), rows, scorer.logprobs, SingleRank())
    assert prepared is not None, "there are rows"
    for index in micro_batches(prepared, 100, prepared.fields.get("loss_units")):
        part = prepared.select(index)
        terms = loss(scorer.forward(part, LogprobReader()), loss_tokens(part)).terms
        (terms.sum() / float(part.dense("loss_denominator")[0])).backward()
    return {key: weight.grad for key, weight in module.named_parameters() if weight.grad is not None}


@contextmanager
def child(
    arguments: argparse.Namespace, folder: Path, *, steps: int, case: str = "", loss: str = ""
) -> Iterator[Callable[[], dict[str, float]] | None]:
    """Yield a function that makes TRL run one step, or None without ``--trl``."""
    if arguments.trl is None:
        yield None
        return
    command = [
        arguments.trl,
        __file__,
        "--peer",
        str(folder),
        "--steps",
        str(steps),
        "--case",
        case,
        "--loss",
        loss,
    ]
    with (
        (folder / "trl.log").open("w") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as peer,
    ):
        assert peer.stdin is not None and peer.stdout is not None  # both are pipes
        to_child, from_child = peer.stdin, peer.stdout

        def step() -> dict[str, float]:
            print("go", file=to_child, flush=True)
            for line in from_child:
                if line.startswith(MARK):
                    found: dict[str, float] = json.loads(line.removeprefix(MARK))
                    return found
            raise SystemExit(f"TRL ended before its last step: {(folder / 'trl.log').read_text()[-2000:]}")

        yield step


def run_trl(folder: Path, arguments: argparse.Namespace) -> None:
    """Run TRL's trainer in the child: one step per line on standard input, or the gradient of every loss."""
    import torch
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    class Turns(TrainerCallback):
        def __init__(self, loss: str) -> None:
            self.loss = loss

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sys.stdin.readline()
            self.began, self.cpu = time.perf_counter(), time.process_time()

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            if self.loss:
                named = model.named_parameters()
                found = {name: weight.grad.clone() for name, weight in named if weight.grad is not None}
                save_file(found, folder / f"{self.loss}.safetensors")

        def on_step_end(self, *_: Any, **__: Any) -> None:
            found = {"seconds": time.perf_counter() - self.began, "cpu_s": time.process_time() - self.cpu}
            print(MARK + json.dumps(found), flush=True)

    for loss in LOSSES if arguments.loss else [""]:
        their_trainer(folder, arguments, loss, Turns(loss)).train()


def their_trainer(folder: Path, arguments: argparse.Namespace, loss: str, turns: Any) -> Any:
    """Return TRL's trainer for a case or a loss."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    case = CASES[arguments.case] if arguments.case else SMALL
    dtype = torch.float64 if loss else torch.float32
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype) for name in ("policy", "reference")
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "policy")
    drawn = [pair for step in range(arguments.steps) for pair in pairs_of(step, case)]
    said = [["".join(f"t{token} " for token in part) for part in pair] for pair in drawn]
    rows: list[dict[str, Any]] = [
        dict(zip(("prompt", "chosen", "rejected"), each, strict=True)) for each in said
    ]
    if loss == "kto":
        rows = [
            {"prompt": asked, "completion": both[place % 2], "label": not place % 2}
            for place, (asked, *both) in enumerate(said)
        ]
    how: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": PAIRS,
        "max_steps": arguments.steps,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_length": None,
        "gradient_checkpointing": False,
        "max_grad_norm": 1e9 if loss else 1.0,
        "bf16": False,
        "use_cpu": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    settings = {"beta": BETA, **LOSSES[loss or "dpo"][1]}
    given = {
        "model": policy,
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_list(rows),
        "callbacks": [turns],
    }
    if loss == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        how["max_length"] = 64
        simpo = {"loss_type": "simpo", "cpo_alpha": 0.0, **settings, "beta": 2.0}
        return CPOTrainer(args=CPOConfig(**how, **simpo), **given)
    if loss == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOTrainer(args=KTOConfig(**how, **settings), ref_model=reference, **given)
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(**how, **settings, precompute_ref_log_probs=case.is_known)
    return DPOTrainer(args=config, ref_model=reference, **given)


def _head(arguments: argparse.Namespace) -> list[str]:
    command = " ".join(["python", *sys.argv])
    return [
        "# One DPO step",
        "",
        measured_at.line(),
        "",
        f"`{command}`, {os.cpu_count()} cores, {arguments.threads} threads, {_versions(arguments.trl)}. "
        f"Median and spread of {arguments.steps} steps after the first; the setting is at the script's head.",
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One DPO step against TRL's, and the gradients of its kin.")
    parser.add_argument("--trl", help="a Python interpreter that has trl; without it Rillflow runs alone")
    parser.add_argument("--steps", type=int, default=7, help="steps after the first")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each side")
    parser.add_argument("--only", choices=["steps", "gradients"], help="one of the two parts")
    parser.add_argument("--write", help="file for the table")
    for hidden in ("--peer", "--case", "--loss"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

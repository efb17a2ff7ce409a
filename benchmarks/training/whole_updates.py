"""Whole updates against the plain loop of ``plain_updates.py``.

    rillflow run, 2 steps, beta1 = 0 ──> checkpoint of step 1: weights, critics, prices
                                     ──> rollouts of step 2: tokens, rewards, costs
                                     ──> checkpoint of step 2: AdamW's first moment, which is the gradient
    plain loop over the same files: rewards ─ advantages ─ loss of a row ─ backward ──> gradient

    Trainer.update, rows of an older policy, whole and in micro-batches ──> first moment
    plain loop over the same rows                                       ──> gradient

The first part runs every algorithm's own program, from the recipe to the files of the run; there the policy
is the one that sampled. In the second part, ratios lie on both sides of every bound. ``differential.py``
prints the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from plain_updates import (
    MAX_TOKENS,
    TEMPERATURE,
    Files,
    Row,
    Trained,
    gradient,
    logprobs_of,
    plain_step,
    spread,
)
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.formulas.config import PolicyLossConfig
from rillflow.models.attention import ATTENTION, register
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss
from rillflow.training.trainer import Trainer

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
LIMIT = 1e-6
"""Largest allowed difference of two gradients."""
SCORES = Path(__file__).parent / "peers" / "plain_scores.py"
RECIPE = f"""
[run]
seed = 3
threads = 1
checkpoint_every = 1
keep_checkpoints = 2
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 80
held_out = 10
[policy]
lr = 3e-3
beta1 = 0
max_grad_norm = 1e9
tokens_per_micro_batch = 60
model.path = "start"
[rollout]
max_rows = 32
max_tokens = {MAX_TOKENS}
temperature = {TEMPERATURE}
[algorithm]
steps = 2
prompts_per_step = 6
samples_per_prompt = 4
[reward]
function = "{SCORES}:reward"
"""
COST = f'[cost]\nfunction = "{SCORES}:cost"\n'


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The gradients of one update, by Rillflow and by the plain loop."""

    name: str
    """The algorithm and its settings."""
    difference: float
    """Largest difference over all weights, divided by the largest gradient if that is above 1."""
    largest: float
    """Largest gradient of the plain loop."""


def make_start(folder: Path) -> None:
    """Write a model whose logits are far from uniform, and the recipes that use it."""
    new = NewModel(hidden=32, layers=2, heads=4, kv_heads=2, context=16, alphabet="0123456789+=")
    model = load_model(ModelConfig(new=new), seed=5, device=torch.device("cpu"), base=folder)
    with torch.no_grad():
        for weight in model.module.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    save_model(model, folder / "start")
    (folder / "run.toml").write_text(RECIPE)
    (folder / "cost.toml").write_text(RECIPE + COST)


def algorithm_cases() -> Iterator[tuple[str, list[str]]]:
    """Yield every algorithm, and for some of them every estimator, KL placement and aggregation."""
    for name in ("grpo", "dr_grpo", "dapo", "rloo", "remax", "reinforce_pp", "ppo", "gspo", "cispo"):
        yield name, []
    yield "safe_rlhf", ["algorithm.loss.kl=0.1"]
    yield "grpo", ["algorithm.scale=off"]
    yield "dapo", ["algorithm.overlong_buffer=3"]
    yield "reinforce_pp", ["algorithm.gamma=0.9"]
    yield "ppo", ["algorithm.gamma=0.9", "algorithm.lam=0.8"]
    yield "grpo", ["algorithm.loss.entropy=0.1"]
    places = (("loss", "k2"), ("loss", "k3"), ("reward", "k1"))
    everyone = ("grpo", "dr_grpo", "dapo", "rloo", "remax", "reinforce_pp", "ppo", "gspo", "cispo")
    for name, (place, estimator) in product(everyone, places):
        paid = [f"algorithm.loss.kl_in={place}", f"algorithm.loss.kl_estimator={estimator}"]
        yield name, ["algorithm.loss.kl=0.1", *paid]
    for name, aggregation in product(("grpo", "dapo", "ppo", "gspo", "cispo"), AGGREGATIONS):
        yield name, [f"algorithm.loss.aggregation={aggregation}"]
    for name in (*everyone, "safe_rlhf"):
        yield name, ["algorithm.truncated=mask"]
        yield name, ["algorithm.missing_end_penalty=0.5"]
    for name in ("ppo", "safe_rlhf"):
        yield name, ["algorithm.truncated=bootstrap"]
        yield name, ["algorithm.truncated=bootstrap", "algorithm.loss.kl=0.1", "algorithm.gamma=0.9"]


def whole_runs(folder: Path) -> Iterator[Compared]:
    """Compare the gradients of whole runs with the plain loop over their files."""
    logging.disable_progress_bar()
    make_start(folder)
    for name, settings in algorithm_cases():
        yield whole_run(folder, name, settings)


def whole_run(folder: Path, name: str, settings: Sequence[str]) -> Compared:
    """Compare one run with the plain loop."""
    path = folder / ("cost.toml" if name == "safe_rlhf" else "run.toml")
    run = folder / "run"
    loaded = load_recipe(path, [f"algorithm.name={name}", f'run.dir="{run}"', *settings])
    launch(loaded, fresh=False, quiet=True)
    files = Files(run=run, start=folder / "start")
    plain = plain_step(files, loaded.recipe.algorithm)
    found = {role: files.moments(role) for role in plain}
    run.rename(folder / f"done-{len(list(folder.iterdir()))}")
    shown = " ".join(setting.removeprefix("algorithm.").removeprefix("loss.") for setting in settings)
    return compared(f"{name} {shown}".strip(), found, plain)


def compared(name: str, found: Trained, plain: Trained) -> Compared:
    """Return the largest difference of two sets of gradients."""
    pairs = [
        (found[role][weight].double().reshape(expected.shape), expected.double())
        for role in plain
        for weight, expected in plain[role].items()
    ]
    difference = max(float((one - other).abs().max()) for one, other in pairs)
    largest = max(float(other.abs().max()) for _, other in pairs)
    return Compared(name=name, difference=difference / max(largest, 1.0), largest=largest)


def loss_cases() -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield off-policy losses, and whether their advantages are per token."""
    for aggregation in AGGREGATIONS:
        yield "ppo", {"aggregation": aggregation}, False
        yield "gspo", {"ratio": "sequence", "clip_low": 0.03, "aggregation": aggregation}, False
        yield "cispo", {"surrogate": "weight", "aggregation": aggregation}, False
    yield "ppo, a token's advantage", {"clip_high": 0.28}, True
    yield "gspo, a token's advantage", {"ratio": "sequence", "clip_low": 0.03}, True
    yield "ppo, no dual clip", {"dual_clip": 0.0}, False
    for estimator in ("k2", "k3"):
        yield f"ppo, {estimator}", {"kl": 0.1, "kl_in": "loss", "kl_estimator": estimator}, False
    yield "ppo, entropy", {"entropy": 0.1}, False
    tis = {"correction": "tis", "correction_bounds": (0, 1.05)}
    yield "ppo, truncated importance sampling", tis, False
    yield "ppo, the same by row", {"correction": "sequence_tis", "correction_bounds": (0, 1.05)}, False
    yield "ppo, icepop", {"correction": "icepop", "correction_bounds": (0.95, 1.05)}, False
    yield "ppo, topr", {"correction": "topr"}, True
    both = {**tis, "kl": 0.1, "kl_in": "loss", "kl_estimator": "k3", "entropy": 0.1}
    yield "ppo, all of these", both, False


def off_policy(cut: Sequence[int] = (16384, 30)) -> Iterator[Compared]:
    """Compare ``Trainer.update`` on rows of an older policy with the plain loop, per micro-batch size."""
    for (name, settings, of_tokens), tokens in product(loss_cases(), cut):
        config = PolicyLossConfig(**settings)
        rows = older_rows(tiny_qwen2("eager").double(), of_tokens)
        module = tiny_qwen2(ATTENTION).double()
        train = TrainConfig(lr=1e-3, beta1=0.0, max_grad_norm=1e9, tokens_per_micro_batch=tokens)
        trainer = Trainer(module, train, total_steps=1)
        trainer.update(batch_of(rows), PolicyLoss(config, max_tokens=MAX_TOKENS), TEMPERATURE)
        marks = trainer.optimizer.state()
        names = [weight for weight, _ in module.named_parameters()]
        found = {weight: marks[f"exp_avg/{weight}"] for weight in names}
        plain = gradient(tiny_qwen2("eager").double(), rows, config)
        shown = "whole" if tokens > 1000 else f"cut at {tokens} tokens"
        label = f"{name}, {config.aggregation}, {shown}"
        yield compared(label, {"policy": found}, {"policy": plain})


def tiny_qwen2(attention: str) -> Any:
    """Return a Qwen2 of two layers with random weights that are always the same."""
    register()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return Qwen2ForCausalLM._from_config(config, attn_implementation=attention).float().eval()


def older_rows(model: Any, of_tokens: bool) -> list[Row]:
    """Return twelve rows of three prompts, some with a gap of tool tokens, one without loss tokens."""
    numbers = torch.Generator().manual_seed(7)

    def ints(high: int, count: int) -> list[int]:
        return torch.randint(0, high, (count,), generator=numbers).tolist()

    def noise(scale: float, count: int) -> list[float]:
        return (torch.randn(count, generator=numbers, dtype=torch.float64) * scale).tolist()

    rows = []
    for group, length in enumerate((5, 3, 7)):
        prompt = ints(64, length)
        for sample in range(4):
            answer = ints(64, 1 + ints(9, 1)[0])
            places = [length + place for place in range(len(answer))]
            if sample == 1:
                places = [place for place in places if place not in (length + 1, length + 2)]
            if (group, sample) == (2, 3):
                places = []
            row = Row(tokens=prompt + answer, places=places, sampler=[], group=group)
            now = logprobs_of(model, row)
            row.old = [each + more for each, more in zip(now, noise(0.7, len(now)), strict=True)]
            row.sampler = [each + more for each, more in zip(row.old, noise(0.1, len(now)), strict=True)]
            row.reference = [each + more for each, more in zip(now, noise(0.5, len(now)), strict=True)]
            spread(row, noise(1.0, 1)[0])
            row.advantages = noise(1.0, len(now)) if of_tokens else row.advantages
            rows.append(row)
    return rows


def batch_of(rows: Sequence[Row]) -> Batch:
    """Return the rows as a batch for Rillflow's trainer."""
    masks = [[place in row.places for place in range(len(row.tokens))] for row in rows]

    def aligned(of: Callable[[Row], list[float]]) -> Ragged:
        filled = []
        for row in rows:
            entries = dict(zip(row.places, of(row), strict=True))
            filled.append([entries.get(place, 0.0) for place in range(len(row.tokens))])
        return Ragged.from_rows(filled, torch.float64)

    return Batch(
        ids=row_ids([RowId(0, row.group, index) for index, row in enumerate(rows)]),
        fields={
            "tokens": Ragged.from_rows([row.tokens for row in rows]),
            "loss_mask": Ragged.from_rows(masks, torch.bool),
            "advantages": aligned(lambda row: row.advantages),
            "sampler_logprobs": aligned(lambda row: row.sampler),
            "old_logprobs": aligned(lambda row: row.old or []),
            "reference_logprobs": aligned(lambda row: row.reference),
        },
    )

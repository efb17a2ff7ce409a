"""Families of models: each made tiny, then trained and sampled, or why not.

    python benchmarks/families.py gemma2 gpt_oss deepseek_v3

    its config, in small ─ random weights ─> a directory of transformers ─ load_model, as a run does
        ├─ trained   rows of like beginnings: log probabilities and gradients, against each row alone
        │            through the module as transformers has it, its attention "eager"
        └─ sampled   tokens by the native engine: its log probabilities, against the trainer's

Heads are 32 wide, windows 6 tokens, rows up to 24 tokens; soft caps are low enough to be felt.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rillflow.models.bare import character_tokenizer
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import LanguageModel, load_model, quiet
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.training.config import TrainConfig
from rillflow.training.scorer import LogprobReader, Scorer

CPU = torch.device("cpu")
VOCABULARY, CONTEXT = 64, 256
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "sliding_window": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
"""What a config is given, of the names that it has."""
LATENT = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "minicpm3": LATENT,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT},
}
"""What a type calls otherwise, or wants besides."""
PROMPTS, ANSWERS = ((3, 9, 1, 7), (5, 5, 8)), (12, 4, 20)
"""Beginnings that rows share, and lengths of the answers to each."""


def tiny_config(kind: str) -> Any:
    """A config of a type, in small."""
    there = AutoConfig.for_model(kind).to_dict()
    given = {name: value for name, value in SMALL.items() if name in there}
    return AutoConfig.for_model(kind, **{**given, **OWN.get(kind, {})})


def write_family(kind: str, folder: Path) -> Path:
    """A directory of a tiny model of random weights, as transformers writes it, and a tokeniser."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
            elif weight.dim() > 1:
                weight.mul_(3.0)  # fresh weights say nearly the same of every token
    with quiet():
        module.save_pretrained(folder)
    character_tokenizer("abcdefghij", CONTEXT).library.save_pretrained(folder)
    return folder


def family_rows() -> Batch:
    """Rows that share beginnings, one window long or several, and a weight for every loss token."""
    draw = torch.Generator().manual_seed(1)
    rows, masks, ids = [], [], []
    for prompt, start in enumerate(PROMPTS):
        for sample, length in enumerate(ANSWERS):
            rows.append([*start, *torch.randint(0, VOCABULARY, (length,), generator=draw).tolist()])
            masks.append([False] * len(start) + [True] * length)
            ids.append(RowId(0, prompt, sample))
    tokens = Ragged.from_rows(rows)
    slopes = tokens.with_values(torch.randn(len(tokens.values), generator=draw))
    mask = Ragged.from_rows(masks, torch.bool)
    return Batch(ids=row_ids(ids), fields={"tokens": tokens, "loss_mask": mask, "slopes": slopes})


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How far a run's trainer is from the module as transformers has it."""

    logprobs: float
    """Largest difference of a log probability."""
    gradients: float
    """Largest difference of a gradient, over that weight's largest."""


def load_family(folder: Path) -> LanguageModel:
    """The model as a run loads it."""
    return load_model(ModelConfig(path=str(folder)), seed=0, device=CPU, base=Path())


def trained(folder: Path) -> Trained:
    """The family's rows in one micro-batch, and one by one by the module as transformers has it."""
    rows = family_rows()
    mask = rows.ragged("loss_mask").values
    module = load_family(folder).module
    found = Scorer(module, TrainConfig()).forward(rows.only("tokens", "loss_mask"), LogprobReader()).logprobs
    (found * rows.ragged("slopes").values[mask]).sum().backward()
    with quiet():
        plain: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = torch.cat([alone(plain, rows.select([row])) for row in range(len(rows))])
    (expected * rows.ragged("slopes").values[mask]).sum().backward()
    return Trained(
        logprobs=float((found - expected).detach().abs().max()),
        gradients=max(_apart(module, plain).values()),
    )


def alone(module: PreTrainedModel, row: Batch) -> Tensor:
    """[N] log probabilities of one row's loss tokens, with nothing but transformers."""
    tokens, mask = row.ragged("tokens").values, row.ragged("loss_mask").values
    logits = module(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0][mask[1:]]


def sampled(folder: Path) -> float:
    """The largest difference of a drawn token's log probability, by the native engine and by the trainer."""
    model = load_family(folder)
    config = RolloutConfig(max_tokens=20, max_rows=4)
    engine = NativeEngine(model.module, config, stop_tokens=frozenset(), seed=1, context=CONTEXT)
    ids = row_ids([RowId(0, prompt, 0) for prompt in range(len(PROMPTS))])
    columns = Ragged.from_text(["{}"] * len(PROMPTS))
    prompts = Batch(ids=ids, fields={"tokens": Ragged.from_rows(PROMPTS), "columns": columns})
    rows = engine.generate(prompts, samples=3)
    said = Scorer(model.module, TrainConfig()).logprobs(rows).values
    return float((said - rows.ragged("sampler_logprobs").values).abs().max())


def _apart(one: nn.Module, other: nn.Module) -> Mapping[str, float]:
    """The difference of every weight's gradient, over the largest of the second's."""
    theirs = {name: each.grad for name, each in other.named_parameters() if each.grad is not None}
    ours = {name: each.grad for name, each in one.named_parameters() if each.grad is not None}
    if theirs.keys() != ours.keys():
        raise ValueError(f"weights that learn on one side alone: {sorted(theirs.keys() ^ ours.keys())[:3]}")
    return {
        name: float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-6))
        for name in theirs
    }


def main() -> None:
    """Try the families that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "kinds", nargs="*", default=["gemma2", "gpt_oss", "deepseek_v3"], help="types of models"
    )
    torch.set_num_threads(1)
    for kind in parser.parse_args().kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = write_family(kind, Path(folder) / kind)
            print(kind, trained(path), f"sampled: {sampled(path):.2g}", flush=True)


if __name__ == "__main__":
    main()

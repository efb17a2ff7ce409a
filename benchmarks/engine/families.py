"""Model families: a tiny model of each is trained, sampled by the native engine and scored by vLLM.

    python benchmarks/engine/families.py gemma2 gpt_oss                                # seconds each
    python benchmarks/engine/families.py --vllm .venv-vllm/bin/python --write benchmarks/results/families.md

    a small config ─ random weights ─> a directory of transformers ─ load_model, as in a run
        ├─ trained   rows with shared prefixes: log probabilities and gradients, compared with each row alone
        │            through the unchanged module of transformers, attention "eager"
        ├─ sampled   tokens of the native engine: its log probabilities, compared with the trainer's
        └─ vLLM      the canary's texts on a vLLM server, compared with the trainer

The table gives the reason for each failure. Each family runs in its own process with a time limit. Heads are
32 wide, windows 6 tokens, rows up to 24 tokens. Soft caps are low enough to have an effect.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rillflow.errors import RillflowError
from rillflow.models.bare import character_tokenizer
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import LanguageModel, load_model, quiet
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.roles.logprob_check import canary_rows, canary_texts
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.engine import Stops
from rillflow.rollout.native.engine import NativeEngine
from rillflow.training.config import TrainConfig
from rillflow.training.scorer import LogprobReader, Scorer
from rillflow.workers.collectives import SingleRank
from rillflow_parts.vllm.engine import VllmEngine

SMALLEST = []
SLOW = ["qwen2"]

CPU = torch.device("cpu")
VOCABULARY, CONTEXT = 64, 256
MOST = 10_000_000
"""Largest number of parameters of a tiny model."""
TOLD = 240
"""Largest number of characters of a reason."""
KINDS = [
    *("qwen2", "qwen3", "qwen3_moe", "qwen3_next", "llama", "llama4_text", "mistral", "mixtral", "gemma"),
    *(
        "gemma2",
        "gemma3_text",
        "vaultgemma",
        "phi3",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "granite",
        "granitemoe",
    ),
    *("granitemoehybrid", "smollm3", "glm4", "glm4_moe", "deepseek_v2", "deepseek_v3", "minicpm3", "gpt_oss"),
    *("gpt2", "cohere2", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "seed_oss", "falcon_h1", "mamba"),
    *("mamba2", "jamba", "bamba", "lfm2", "nemotron", "stablelm", "gptj", "bert"),
]
"""Model types that run by default."""
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
"""Values for those of these names that a config has."""
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
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "jamba": {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "max_position_embeddings": CONTEXT,
    },
    "mamba": {"state_size": 16, "max_position_embeddings": CONTEXT},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 64},
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT, "rotary_dim": 8},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT},
}
"""Values for names that only this type has, or that replace values of SMALL."""
PROMPTS, ANSWERS = ((3, 9, 1, 7), (5, 5, 8)), (12, 4, 20)
"""Prompts that rows share, and lengths of the completions of each."""


def tiny_config(kind: str) -> Any:
    """Return a small config of a model type."""
    there = AutoConfig.for_model(kind).to_dict()
    given = {name: value for name, value in SMALL.items() if name in there}
    return AutoConfig.for_model(kind, **{**given, **OWN.get(kind, {})})


def write_family(kind: str, folder: Path) -> Path:
    """Write a tiny random model and its tokenizer, as transformers does; return the directory."""
    config = tiny_config(kind)
    with torch.device("meta"):
        numbers = sum(part.numel() for part in AutoModelForCausalLM.from_config(config).parameters())
    if numbers > MOST:
        raise ValueError(f"{numbers:,} parameters: its config has other names than {', '.join(SMALL)}")
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
            elif weight.dim() > 1:
                weight.mul_(3.0)  # fresh weights give every token nearly the same probability
    with quiet():
        module.save_pretrained(folder)
    character_tokenizer("abcdefghij", CONTEXT).library.save_pretrained(folder)
    return folder


def family_rows() -> Batch:
    """Return rows with shared prefixes, up to several windows long, and a weight for every loss token."""
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
    """Differences between a run's trainer and the module as transformers loads it."""

    logprobs: float
    """Largest difference of a log probability."""
    gradients: float
    """Largest difference of a gradient, divided by that weight's largest gradient."""
    own: str | None
    """Why it trains with its own attention on padded rows; None with Rillflow's attention."""


def load_family(folder: Path) -> LanguageModel:
    """Load the model as a run does."""
    return load_model(ModelConfig(path=str(folder)), seed=0, device=CPU, base=Path())


def trained(folder: Path) -> Trained:
    """Compare one micro-batch of the family's rows with each row alone through the module of transformers."""
    rows = family_rows()
    mask = rows.ragged("loss_mask").values
    model = load_family(folder)
    module = model.module
    found = Scorer(module, TrainConfig()).forward(rows.only("tokens", "loss_mask"), LogprobReader()).logprobs
    (found * rows.ragged("slopes").values[mask]).sum().backward()
    with quiet():
        plain: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = torch.cat([alone(plain, rows.select([row])) for row in range(len(rows))])
    (expected * rows.ragged("slopes").values[mask]).sum().backward()
    return Trained(
        logprobs=float((found - expected).detach().abs().max()),
        gradients=max(_apart(module, plain).values()),
        own=model.own,
    )


def alone(module: PreTrainedModel, row: Batch) -> Tensor:
    """Return [N] log probabilities of one row's loss tokens, with transformers only."""
    tokens, mask = row.ragged("tokens").values, row.ragged("loss_mask").values
    logits = module(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0][mask[1:]]


def sampled(folder: Path) -> float:
    """Return the largest gap between native engine and trainer in a sampled token's log probability."""
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
    """Return the difference of every weight's gradient, divided by the second module's largest gradient."""
    theirs = {name: each.grad for name, each in other.named_parameters() if each.grad is not None}
    ours = {name: each.grad for name, each in one.named_parameters() if each.grad is not None}
    if theirs.keys() != ours.keys():
        raise ValueError(f"weights that learn on one side alone: {sorted(theirs.keys() ^ ours.keys())[:3]}")
    return {
        name: float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-6))
        for name in theirs
    }


def by_vllm(folder: Path, python: str) -> float:
    """Return the largest difference of a log probability of the canary's texts between vLLM and trainer."""
    model = load_family(folder)
    config = RolloutConfig(max_tokens=20, max_rows=4, engine="vllm", server=python)
    stops = Stops((), model.tokenizer)
    how: dict[str, Any] = {"stop_tokens": stops.tokens, "seed": 1, "context": CONTEXT, "stops": stops}
    engine = VllmEngine(model.module, config, tp=SingleRank(), **how)
    engine.load(0, dict(model.module.named_parameters()))
    found = engine.score(canary_texts(model))
    rows = canary_rows(model)
    said = Scorer(model.module, TrainConfig()).logprobs(rows).values[rows.ragged("loss_mask").values]
    return float((said - torch.tensor([each for text in found for each in text])).abs().max())


def attempt(step: Callable[[], Trained | float], most: float) -> str:
    """Run a step and return its result in words; a difference above ``most`` is a failure."""
    try:
        found = step()
    except Exception as error:  # noqa: BLE001  any exception of a family's code is a result
        told = (
            f"{error.what}: {error.why}"
            if isinstance(error, RillflowError)
            else f"{type(error).__name__}: {error}"
        )
        told = re.sub(r" \(process \d+, [^)]*\)", "", told)  # the process id is irrelevant
        return "no: " + " ".join(told.split()).replace("|", "/")[:TOLD]
    if isinstance(found, float):
        return f"yes, {found:.0e}" if found <= most else f"no: log probabilities differ by {found:.2g}"
    if max(found.logprobs, found.gradients) > most:
        return f"no: log probabilities differ by {found.logprobs:.2g}, gradients by {found.gradients:.2g}"
    return f"{'packed' if found.own is None else 'padded'}, {found.logprobs:.0e}, {found.gradients:.0e}"


def one(kind: str, python: str | None) -> dict[str, str]:
    """Run all steps of one family; return the results by column."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / kind
        said = ["vllm"] if python is not None else []
        try:
            write_family(kind, folder)
        except Exception as error:  # noqa: BLE001  see attempt
            why = " ".join(f"not made: {type(error).__name__}: {error}".split()).replace("|", "/")[:TOLD]
            return dict.fromkeys(["trained", "native", *said], why)
        steps: dict[str, tuple[Callable[[], Trained | float], float]] = {
            "trained": (lambda: trained(folder), 1e-4),
            "native": (lambda: sampled(folder), 1e-4),
        }
        if python is not None:
            steps["vllm"] = (lambda: by_vllm(folder, python), 1e-3)
        found: dict[str, str] = {}
        for column, (step, most) in steps.items():
            found[column] = attempt(step, most)
            print(json.dumps(found), flush=True)  # results so far, in case the time limit ends this process
        return found


def in_child(kind: str, python: str | None, limit_s: float) -> dict[str, str]:
    """Run ``one`` in a separate process with a time limit."""
    command = [sys.executable, __file__, kind, "--child", *(["--vllm", python] if python else [])]
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True)
        with suppress(subprocess.TimeoutExpired):
            child.wait(limit_s)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.startswith("{")]
    columns = ["trained", "native", *(["vllm"] if python else [])]
    late = dict.fromkeys(columns, f"no: not within {limit_s:g} s, or its process died")
    return late | (json.loads(lines[-1]) if lines else {})


def table(found: Mapping[str, Mapping[str, str]], command: str) -> str:
    """Return the results as a page."""
    columns = {"trained": "trained", "native": "sampled natively", "vllm": "sampled by vLLM"}
    there = {key: title for key, title in columns.items() if any(key in row for row in found.values())}
    lines = [
        "# Families of models",
        "",
        f"`{command}`: transformers {version('transformers')}, torch {version('torch')}, "
        f"{platform.machine()}, one thread. Random weights, float32.",
        "",
        "Trained: on packed rows with Rillflow's attention, or on padded ones with its own; the largest "
        "difference of a log probability, and of a gradient over its weight's largest. Sampled: the largest "
        "difference of a log probability from the trainer's.",
        "",
        "| type | " + " | ".join(there.values()) + " |",
        "|---" * (1 + len(there)) + "|",
    ]
    for kind, row in sorted(found.items()):
        lines.append(f"| {kind} | " + " | ".join(row.get(key, "") for key in there) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the chosen families."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", help="types of models; those of RL post-training without any")
    parser.add_argument("--vllm", help="the python of an environment that has vLLM")
    parser.add_argument("--write", type=Path, help="where the table goes")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one family")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(one(given.kinds[0], given.vllm)), flush=True)
        return
    found: dict[str, dict[str, str]] = {}
    for kind in given.kinds or KINDS:
        found[kind] = in_child(kind, given.vllm, given.limit)
        print(kind, *found[kind].values(), sep=" | ", flush=True)
    if given.write is not None:
        shown = "python benchmarks/engine/families.py" + (
            " --vllm .venv-vllm/bin/python" if given.vllm else ""
        )
        given.write.write_text(table(found, shown))


if __name__ == "__main__":
    main()

"""Small models of each family, trained and sampled as in a run, match transformers' eager attention."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "engine"))

from families import sampled, trained, write_family

from rillflow.errors import ModelError

EVERYDAY = ["gemma2", "gpt_oss", "deepseek_v3"]
OTHERS = ["qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "gemma3_text", "vaultgemma", "phi3", "cohere2"]
OTHERS += ["olmo2", "olmo3", "granite", "granitemoe", "granite_swa", "smollm3", "glm4", "glm4_moe", "gpt2"]
OTHERS += ["deepseek_v2", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "seed_oss", "minicpm3"]

PADDED = [
    "qwen3_next",
    "falcon_h1",
    "mamba",
    "mamba2",
    "llama4_text",
    "jamba",
    "bamba",
    "nemotron",
    "stablelm",
]
PADDED += ["olmo_hybrid", "granitemoehybrid", "gptj"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "kind", [*EVERYDAY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
)
def test_a_family_says_and_learns_what_its_own_attention_does(kind: str, tmp_path: Path) -> None:
    folder = write_family(kind, tmp_path / kind)
    found = trained(folder)
    assert found.own is None
    assert found.logprobs < (5e-5 if kind == "minicpm3" else 1e-5) and found.gradients < 1e-4
    assert sampled(folder) < 2e-5


@pytest.mark.parametrize("kind", ["lfm2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in PADDED)])
def test_a_family_whose_attention_is_its_own_learns_what_each_row_alone_teaches(
    kind: str, tmp_path: Path
) -> None:
    folder = write_family(kind, tmp_path / kind)
    found = trained(folder)
    assert found.own is not None and "For" in found.own
    assert found.logprobs < 3e-5 and found.gradients < 1e-4
    with pytest.raises(ModelError, match="cannot be sampled by the native engine"):
        sampled(folder)

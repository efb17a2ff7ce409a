"""Each rank reads its own slices of a model, with the bits of a model that is loaded whole and then cut."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rillflow.errors import RillflowError
from rillflow.models.attention import ATTENTION
from rillflow.models.bare import character_tokenizer
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, outline
from rillflow.models.tokenizer import Tokenizer
from rillflow.roles.model_shard import ModelShard
from rillflow.sharding.module import Parallel
from rillflow.workers.collectives import Ranks
from rillflow.workers.config import MeshSizes

sys.path.insert(0, str(Path(__file__).parent))
from meshes import Case, decoder, groups_of, own_rows, trainer, update
from processes import together

CPU = torch.device("cpu")
NEW = NewModel(hidden=32, layers=3, heads=4, kv_heads=4, context=32, alphabet="0123456789")


def written(case: Case, folder: Path) -> Path:
    """Write a model in several files, with transformers only."""
    decoder(case).save_pretrained(folder, max_shard_size="30KB")
    Tokenizer(character_tokenizer("0123456789", 32), stop_tokens=[0]).save(folder)
    return folder


def outlined(config: ModelConfig) -> LanguageModel:
    return outline(LanguageModel, config, seed=3, device=CPU, base=Path(), section="policy.model")


def read(ranks: Ranks, cases: list[Case], folders: list[str]) -> list[list[str]]:
    """Return the names of wrong weights, freshly read and after a training step."""
    found = []
    for case, folder in zip(cases, folders, strict=True):
        config = ModelConfig(path=folder, dtype=case.dtype) if folder else ModelConfig(new=NEW)  # type: ignore[arg-type]
        sizes = MeshSizes(dp=case.dp, fsdp=case.fsdp, pp=case.pp, tp=case.tp)
        share = ModelShard.of(outlined(config), sizes, ranks)
        if folder:
            dtype = getattr(torch, case.dtype)
            how = {"attn_implementation": ATTENTION, "dtype": dtype}
            expected = AutoModelForCausalLM.from_pretrained(folder, **how)
        else:
            expected = load_model(config, seed=3, device=CPU, base=Path()).module
        parallel = Parallel(expected, groups_of(case, ranks))
        odd = differing(share.parallel, parallel)
        for one in (share.parallel, parallel) if folder else ():
            update(case, trainer(case, one.module, one), own_rows(case, one.groups))
        found.append(odd + differing(share.parallel, parallel))
    return found


def differing(one: Parallel, other: Parallel) -> list[str]:
    mine, theirs = one.local_weights(), other.local_weights()
    assert mine.keys() == theirs.keys() and len(mine) > 3
    return [name for name, weight in mine.items() if not torch.equal(weight, theirs[name])]


BASE = Case(dtype="float32", layers=3)
TWO = [
    replace(BASE, tp=2),
    replace(BASE, tp=2, tied=False, dtype="bfloat16"),
    replace(BASE, pp=2),
    replace(BASE, dp=2, fsdp=2),
    replace(BASE, dp=2, fsdp=2, tied=False, dtype="bfloat16"),
    replace(BASE, dp=2),
]


def test_two_ranks_read_what_they_keep(tmp_path: Path) -> None:
    folders = [str(written(case, tmp_path / str(place))) for place, case in enumerate(TWO)]
    assert len(list((tmp_path / "0").glob("*.safetensors"))) > 2
    cases = [*TWO, replace(BASE, tp=2), replace(BASE, dp=2, fsdp=2)]
    assert together(2, read, cases, [*folders, "", ""]) == [[[]] * len(cases)] * 2


@pytest.mark.slow
def test_four_ranks_read_what_they_keep(tmp_path: Path) -> None:
    cases = [
        replace(BASE, tp=2, pp=2),
        replace(BASE, tp=2, dp=2, fsdp=2),
        replace(BASE, pp=2, dp=2, fsdp=2),
        replace(BASE, tp=4),
        replace(BASE, kind="qwen3", tp=2, dp=2, fsdp=2, tied=False),
    ]
    folders = [str(written(case, tmp_path / str(place))) for place, case in enumerate(cases)]
    assert together(4, read, cases, folders) == [[[]] * len(cases)] * 4


def refused(ranks: Ranks, folder: str) -> tuple[str, str]:
    try:
        ModelShard.of(outlined(ModelConfig(path=folder)), MeshSizes(pp=2), ranks)
    except RillflowError as error:
        return type(error).__name__, error.what
    return "", ""


def test_what_one_rank_cannot_read_no_rank_has(tmp_path: Path) -> None:
    folder = written(replace(BASE, tied=False), tmp_path / "model")
    name = "model.layers.2.mlp.c_fc.bias"
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        if name in weights:
            weights[name][5] = torch.inf
            save_file(weights, file, metadata={"format": "pt"})
    told = together(2, refused, str(folder))
    assert told[1] == ("ModelError", f"the weight {name} has numbers that are not finite")
    assert told[0] == ("TrainingError", told[1][1])

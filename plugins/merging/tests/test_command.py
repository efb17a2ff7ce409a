"""What may stand in the place of a model's directory in a merge: adapters of one base; and what may not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rillflow.cli.main import main
from rillflow.errors import ConfigError, ModelError
from rillflow.models.config import AdapterConfig, ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from rillflow_merging.command import merge_models
from rillflow_merging.merge import MergeSettings

NEW = NewModel(hidden=16, layers=1, heads=2, kv_heads=1, context=16, alphabet="0123456789+=")


def written(config: ModelConfig, folder: Path, seed: int = 0) -> Path:
    made = load_model(config, seed=seed, device=torch.device("cpu"), base=Path())
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.module.named_parameters():
        if name.endswith("up.weight"):
            parameter.data.normal_(generator=generator)
    save_model(made, folder)
    return folder


def test_adapters_of_one_base_are_put_into_it_first(tmp_path: Path) -> None:
    base = written(ModelConfig(new=NEW), tmp_path / "base")
    beside = ModelConfig(path=str(base), adapter=AdapterConfig(rank=2))
    parents = [written(beside, tmp_path / str(seed), seed) for seed in (1, 2)]
    assert main(["merge", *map(str, parents), "--out", str(tmp_path / "out")]) == 0
    for parent in parents:
        assert main(["merge-adapter", str(parent), "--out", f"{parent}-whole"]) == 0
    whole = [load_file(tmp_path / f"{seed}-whole" / "model.safetensors") for seed in (1, 2)]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == whole[0].keys()
    for name in found:
        torch.testing.assert_close(found[name], (whole[0][name] + whole[1][name]) / 2)
    assert sorted(path.name for path in tmp_path.glob(".out*")) == []


def test_adapters_of_other_bases_and_beside_whole_models_are_refused(tmp_path: Path) -> None:
    bases = [written(ModelConfig(new=NEW), tmp_path / f"base{seed}", seed) for seed in range(2)]
    adapter = AdapterConfig(rank=2)
    parents = [written(ModelConfig(path=str(each), adapter=adapter), Path(f"{each}-lora")) for each in bases]
    with pytest.raises(ConfigError, match="have different base models"):
        merge_models(parents, tmp_path / "out", MergeSettings())
    with pytest.raises(ConfigError, match="some parents are adapters"):
        merge_models([parents[0], bases[0]], tmp_path / "out", MergeSettings())
    with pytest.raises(ModelError, match="is not there"):
        merge_models([bases[0], tmp_path / "none"], tmp_path / "out", MergeSettings())
    assert not (tmp_path / "out").exists()


def test_models_are_aligned_by_what_they_compute_on_the_prompts_of_a_file(tmp_path: Path) -> None:
    pytest.importorskip("ot", reason="optimal transport is the extra `merge`")
    parents = [written(ModelConfig(new=NEW), tmp_path / str(seed), seed) for seed in (1, 2)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+2="}\n{"prompt": "45+4=49"}\n')
    said = merge_models(parents, tmp_path / "out", MergeSettings(method="ot"), prompts=prompts)
    assert said["aligned_by"] == "activations"

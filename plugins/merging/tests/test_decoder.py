"""Decoders aligned by optimal transport: units permuted, widths that differ, what is refused."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

pytest.importorskip("ot", reason="optimal transport is the extra `merge`")

from rillflow.cli.main import main
from rillflow.errors import ModelError
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import load_model, load_scalar_model, save_model
from rillflow_merging.merge import MergeSettings, merge

sys.path.insert(0, str(Path(__file__).parent))
from conftest import NEW, Made, model

TEXTS = ["1+2=3", "45+4=49", "77+8=", "123+456=", "90+90=180", "3=3"]
OT = MergeSettings(method="ot")


def permute(module: PreTrainedModel, seed: int) -> None:
    """Put the units of a decoder in another order; it says what it said."""
    generator = torch.Generator().manual_seed(seed)

    def order(count: int) -> torch.Tensor:
        return torch.randperm(count, generator=generator)

    def cut(part: torch.nn.Module, dim: int, units: torch.Tensor) -> None:
        part.weight.data = part.weight.data.index_select(dim, units)
        if dim == 0 and getattr(part, "bias", None) is not None:
            part.bias.data = part.bias.data[units]

    config, body = module.config, module.base_model
    size = config.hidden_size // config.num_attention_heads
    residual, dims = order(config.hidden_size), torch.arange(size)
    cut(body.embed_tokens, 1, residual)
    cut(body.norm, 0, residual)
    for layer in body.layers:
        parts, shared = layer.self_attn, config.num_attention_heads // config.num_key_value_heads
        rows: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": [], "o": []}
        for group in order(config.num_key_value_heads).tolist():
            values = order(size)
            rows["k"].append(group * size + dims)
            rows["v"].append(group * size + values)
            for head in (group * shared + order(shared)).tolist():
                rows["q"].append(head * size + dims)
                rows["o"].append(head * size + values)
        for part in "qkv":
            cut(parts.get_submodule(f"{part}_proj"), 0, torch.cat(rows[part]))
            cut(parts.get_submodule(f"{part}_proj"), 1, residual)
        cut(parts.o_proj, 1, torch.cat(rows["o"]))
        cut(parts.o_proj, 0, residual)
        inner = order(config.intermediate_size)
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
            cut(part, 0, inner)
            cut(part, 1, residual)
        cut(layer.mlp.down_proj, 1, inner)
        cut(layer.mlp.down_proj, 0, residual)
        for part in (layer.input_layernorm, layer.post_attention_layernorm):
            cut(part, 0, residual)
    if module.get_output_embeddings() is not None:
        module.lm_head.weight = body.embed_tokens.weight


def logits(folder: Path) -> torch.Tensor:
    loaded = load_model(ModelConfig(path=str(folder)), seed=0, device=torch.device("cpu"), base=Path())
    with torch.no_grad():
        found: torch.Tensor = loaded.module(input_ids=torch.tensor([[1, 2, 11, 4]])).logits
    return found


@pytest.mark.parametrize("texts", [[], TEXTS], ids=["weights", "activations"])
@pytest.mark.parametrize("reg", [None, pytest.param(0.1, marks=pytest.mark.slow)], ids=["exact", "sinkhorn"])
def test_the_order_of_a_parents_units_changes_nothing(
    make: Made, tmp_path: Path, texts: list[str], reg: float | None
) -> None:
    a, b = make("a", noise=1), make("b", noise=2)
    other = model(noise=1)
    permute(other.module, 3)
    save_model(other, tmp_path / "permuted")
    torch.testing.assert_close(logits(tmp_path / "permuted"), logits(a), rtol=0, atol=1e-5)
    how = MergeSettings(method="ot", reg=reg)
    merge([a, b], tmp_path / "one", how, texts=texts)
    said = merge([tmp_path / "permuted", b], tmp_path / "two", how, texts=texts)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-6)
    assert said["aligned_by"] == ("activations" if texts else "weights") and said["aligned_to"] == 1
    if reg is None:
        merge([tmp_path / "permuted", a], tmp_path / "itself", how, texts=texts)
        torch.testing.assert_close(logits(tmp_path / "itself"), logits(a), rtol=0, atol=1e-5)


def test_groups_of_heads_that_differ_in_their_keys_alone_are_matched_by_them(
    make: Made, tmp_path: Path
) -> None:
    """Both groups have equal queries, values and outputs, so only the keys tell how they are exchanged."""
    one = model(NEW.model_copy(update={"layers": 1}), noise=1)
    part = one.module.base_model.layers[0].self_attn
    with torch.no_grad():
        for each in (part.q_proj, part.v_proj):
            for weights in each.parameters():
                weights[len(weights) // 2 :] = weights[: len(weights) // 2]
        part.o_proj.weight[:, 8:] = part.o_proj.weight[:, :8]
    save_model(one, tmp_path / "one")
    with torch.no_grad():
        for weights in part.k_proj.parameters():
            weights.copy_(weights.roll(len(weights) // 2, 0))
    save_model(one, tmp_path / "exchanged")
    for first, last in product(("one", "exchanged"), repeat=2):
        merged = tmp_path / f"{first} into {last}"
        merge([tmp_path / first, tmp_path / last], merged, OT)
        found, wanted = (load_file(folder / "model.safetensors") for folder in (merged, tmp_path / last))
        for name, weights in wanted.items():
            torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-6)


def test_a_command_merges_models_of_other_widths_into_the_last_ones(make: Made, tmp_path: Path) -> None:
    narrow = NEW.model_copy(update={"layers": 1})
    wide = narrow.model_copy(update={"hidden": 32, "heads": 8, "kv_heads": 4})
    parents = [make("wide", wide, noise=1), make("narrow", narrow, noise=2), make("last", wide, noise=3)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    for number, words in enumerate(([], ["--prompts", str(prompts)])):
        out = tmp_path / f"out{number}"
        assert main(["merge", *map(str, parents), "--method", "ot", *words, "--out", str(out)]) == 0
        assert json.loads((out / "config.json").read_text())["hidden_size"] == 32
        assert logits(out).isfinite().all()
    merge([parents[0], parents[1]], tmp_path / "small", OT)
    assert json.loads((tmp_path / "small" / "config.json").read_text())["hidden_size"] == 16
    assert logits(tmp_path / "small").isfinite().all()


def test_reward_models_are_averaged_with_their_heads(tmp_path: Path) -> None:
    folders = []
    for seed in range(3):
        made = load_scalar_model(ModelConfig(new=NEW), seed=seed, device=torch.device("cpu"), base=Path())
        torch.nn.init.normal_(made.module.score.weight, generator=torch.Generator().manual_seed(seed))
        folders.append(tmp_path / str(seed))
        save_model(made, folders[-1])
    heads = [load_file(folder / "model.safetensors")["score.weight"] for folder in folders]
    merge(folders, tmp_path / "mean", MergeSettings())
    merge(folders, tmp_path / "ot", OT)
    loaded = load_scalar_model(
        ModelConfig(path=str(tmp_path / "mean")), seed=0, device=torch.device("cpu"), base=Path()
    )
    torch.testing.assert_close(loaded.module.score.weight.detach(), torch.stack(heads).mean(0))
    assert load_file(tmp_path / "ot" / "model.safetensors")["score.weight"].shape == heads[0].shape


def refused(parents: list[Path], out: Path) -> str:
    with pytest.raises(ModelError) as raised:
        merge(parents, out, OT)
    assert not out.exists()
    return str(raised.value)


def test_decoders_that_cannot_be_aligned_are_refused(make: Made, tmp_path: Path) -> None:
    a, out = make("a", noise=1), tmp_path / "out"
    heads = make("heads", NEW.model_copy(update={"heads": 2}))
    assert "heads have the size 4 in" in refused([a, heads], out)
    deep = make("deep", NEW.model_copy(update={"layers": 3}))
    assert "num_hidden_layers is 2 in" in refused([a, deep], out)
    more = make("more", NEW.model_copy(update={"alphabet": NEW.alphabet + "*/"}))
    assert "vocab_size is 13 in" in refused([a, more], out)
    gpt2 = NEW.model_copy(update={"architecture": "gpt2", "kv_heads": 4})
    assert "cannot be aligned" in refused([make("one", gpt2), make("two", gpt2, seed=1)], out)
    assert main(["merge", str(a), str(deep), "--method", "linear", "--prompts", "x", "--out", str(out)]) == 2

"""Adapters: LoRA and its variants match PEFT, in files that both read."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import local_torch_dtype

from rillflow.app.model_files import require_adapter_fits
from rillflow.errors import ModelError
from rillflow.models.adapters import adapted, drawn, is_adapter, merge, trained_beside
from rillflow.models.config import AdapterConfig, ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, load_scalar_model, quiet, save_model
from rillflow.models.lazy_weights import ALONE

CPU = torch.device("cpu")
KINDS = ["lora", "rslora", "dora"]
TOKENS = torch.tensor([[3, 5, 2, 9, 4, 4, 1]])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    new = NewModel(hidden=32, layers=2, context=64)
    save_model(load_model(ModelConfig(new=new), seed=0, device=CPU, base=Path()), tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def load(base: Path) -> Callable[..., LanguageModel]:
    def loaded(path: Path = base, dtype: Any = "float32", **adapter: Any) -> LanguageModel:
        config = AdapterConfig(**adapter) if adapter else None
        return load_model(
            ModelConfig(path=str(path), dtype=dtype, adapter=config), seed=1, device=CPU, base=Path()
        )

    return loaded


def logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(input_ids=TOKENS).logits
    return found


def trained(model: LanguageModel) -> LanguageModel:
    """Return the model with adapter values that training could have produced."""
    draw = torch.Generator().manual_seed(7)
    for tensor in trained_beside(model.module).values():
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=draw))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_says_what_its_base_says_and_is_all_that_is_trained(
    load: Callable[..., LanguageModel], kind: str
) -> None:
    model = load(rank=4, kind=kind)
    torch.testing.assert_close(logits(model.module), logits(load().module), rtol=0, atol=1e-6)
    learns = {name for name, each in model.module.named_parameters() if each.requires_grad}
    assert learns == model.trained == {name for name in learns if is_adapter(name)}
    assert len(adapted(model.module)) == 2 * 7
    assert not any(is_adapter(name) for name, _ in load().module.named_parameters())


def test_parameters_have_the_order_of_the_module_whatever_names_the_layers(
    load: Callable[..., LanguageModel], tmp_path: Path
) -> None:
    """The order decides the last bit of the gradient norm; files and recipes name layers in any order."""

    def names(model: LanguageModel) -> list[str]:
        return [name for name, each in model.module.named_parameters() if each.requires_grad]

    whole = load(rank=4)
    save_model(whole, tmp_path / "saved")
    layers = sorted({name.rpartition(".")[2] for name in adapted(whole.module)})
    for targets in (layers, layers[::-1], ["mlp.down_proj", *layers], layers[3:] + layers[:3]):
        assert names(load(rank=4, targets=tuple(targets))) == names(whole)
    assert names(load(tmp_path / "saved")) == names(whole)
    some = load(rank=4, targets=("up_proj", "q_proj", "v_proj"))
    save_model(some, tmp_path / "some")
    inside = [
        name
        for name in names(whole)
        if any(f".{each}_adapter." in name for each in ("q_proj", "v_proj", "up_proj"))
    ]
    assert names(load(tmp_path / "some")) == names(some) == inside


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_what_was_saved_and_says_the_same(
    load: Callable[..., LanguageModel], tmp_path: Path, base: Path, kind: str
) -> None:
    peft = pytest.importorskip("peft")
    model = trained(load(rank=4, alpha=8.0, kind=kind))
    save_model(model, tmp_path / "saved")
    assert sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors")) < 40_000
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(base)
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "saved").eval()
    torch.testing.assert_close(logits(model.module), logits(theirs), rtol=0, atol=2e-6)
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again.module), logits(model.module))


@pytest.mark.parametrize(
    ("kind", "targets"), [("lora", "all-linear"), ("rslora", ["q_proj", "v_proj"]), ("dora", "all-linear")]
)
def test_what_peft_saved_is_read_and_says_the_same(
    load: Callable[..., LanguageModel], tmp_path: Path, base: Path, kind: str, targets: Any
) -> None:
    peft = pytest.importorskip("peft")
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(base)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=3,
            lora_alpha=5,
            target_modules=targets,
            use_dora=kind == "dora",
            use_rslora=kind == "rslora",
            init_lora_weights=False,
        )
        theirs = peft.get_peft_model(plain, config).eval()
        theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert len(adapted(ours.module)) == (4 if len(targets) == 2 else 14)
    torch.testing.assert_close(logits(ours.module), logits(theirs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_say_what_base_and_adapter_say(load: Callable[..., LanguageModel], kind: str) -> None:
    model = trained(load(rank=4, kind=kind))
    expected = logits(model.module)
    assert not torch.equal(expected, logits(load().module))
    merge(model.module)
    assert not adapted(model.module)
    assert not any(is_adapter(name) for name, _ in model.module.named_parameters())
    torch.testing.assert_close(logits(model.module), expected, rtol=0, atol=2e-6)


def test_a_vocabulary_head_is_adapted_if_a_target_names_it(load: Callable[..., LanguageModel]) -> None:
    model = trained(load(rank=4, targets=("q_proj", "lm_head")))
    assert "lm_head" in adapted(model.module) and "lm_head" not in adapted(load(rank=4).module)
    plain = trained(load(rank=4, targets=("q_proj",)))
    assert not torch.equal(logits(model.module), logits(plain.module))
    with pytest.raises(ModelError, match="the adapter of the head cannot be merged"):
        merge(model.module)


def test_a_head_is_trained_and_kept_beside_the_adapter(base: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(base), adapter=AdapterConfig(rank=4))
    model = load_scalar_model(config, seed=1, device=CPU, base=Path())
    assert {name for name in model.trained if not is_adapter(name)} == {"score.weight"}
    for tensor in trained_beside(model.module).values():
        tensor.add_(0.1)
    save_model(model, tmp_path / "critic")
    again = load_scalar_model(ModelConfig(path=str(tmp_path / "critic")), seed=2, device=CPU, base=Path())
    assert torch.equal(again.module.score.weight, model.module.score.weight)
    assert float(again.module.score.weight.detach().abs().min()) > 0


def written(folder: Path, **changed: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"peft_type": "IA3"}, "has peft_type = 'IA3'"),
        ({"bias": "all"}, "has bias = 'all'"),
        ({"modules_to_save": ["embed_tokens"]}, r"has modules_to_save = \['embed_tokens'\]"),
        ({"rank_pattern": {"q_proj": 8}}, "has rank_pattern"),
        ({"base_model_name_or_path": None}, "has base_model_name_or_path = None"),
        ({"r": 5}, r"lora_A.weight of the adapter .* has the shape \[4, \d+\]"),
        ({"target_modules": ["q_proj"]}, "has base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"),
        ({"target_modules": ["q_prjo"]}, "target 'q_prjo' is not a linear layer .*\n?.*"),
        ({"base_model_name_or_path": "no/where/at/all"}, "'no/where/at/all' is not there"),
        ({"base_model_name_or_path": "."}, "names itself as its base"),
    ],
)
def test_an_adapter_of_something_else_is_refused(
    load: Callable[..., LanguageModel], tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    save_model(load(rank=4), tmp_path / "saved")
    written(tmp_path / "saved", **changed)
    with pytest.raises(ModelError, match=told):
        load(tmp_path / "saved")


SAME: dict[str, dict[str, Any]] = {
    "dropout": {"lora_dropout": 0.1},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "one layer": {"layers_to_transform": [1]},
    "layers by pattern": {"layers_to_transform": 0, "layers_pattern": "layers"},
    "excluded": {"exclude_modules": ["up_proj"]},
    "excluded by expression": {"exclude_modules": r".*\.0\..*"},
    "by expression": {"target_modules": r".*layers\.1\.(self_attn\.q|mlp\.up)_proj"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "init_lora_weights: quick": {"init_lora_weights": "pissa_niter_2"},
    "init_lora_weights: olora": {"init_lora_weights": "olora"},
    "use_rslora": {"use_dora": True, "use_rslora": True},
    "lora_bias": {"lora_bias": True},
    "bias": {"bias": "lora_only"},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 2}},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5, 2]},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "revision": {"revision": "main2"},
}


def peft_logits(base: Path, folder: Path, settings: dict[str, Any]) -> Tensor:
    """Write an adapter with PEFT; return what PEFT's own reading of it says."""
    peft = pytest.importorskip("peft")
    with quiet():
        config = peft.LoraConfig(
            **{
                "task_type": "CAUSAL_LM",
                "r": 4,
                "target_modules": ["q_proj", "v_proj", "up_proj"],
                **settings,
            }
        )
        made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        draw = torch.Generator().manual_seed(7)
        for name, tensor in made.named_parameters():
            if "lora_B" in name:
                tensor.data.add_(0.1 * torch.randn(tensor.shape, generator=draw))
        made.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(base)
        return logits(peft.PeftModel.from_pretrained(again, folder).eval())


@pytest.mark.parametrize("settings", SAME.values(), ids=SAME)
def test_an_adapter_of_each_kind_says_what_peft_says(
    load: Callable[..., LanguageModel], base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    theirs = peft_logits(base, tmp_path / "theirs", settings)
    ours = load(tmp_path / "theirs")
    torch.testing.assert_close(logits(ours.module), theirs, rtol=0, atol=2e-6)
    save_model(ours, tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again").module), logits(ours.module))


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_of_another_kind_is_refused_by_the_setting(
    load: Callable[..., LanguageModel], base: Path, tmp_path: Path, name: str
) -> None:
    by_hand = name in ("revision", "layer_replication")  # need a hub, and a deeper base
    peft_logits(base, tmp_path / "theirs", {} if by_hand else REFUSED[name])
    if by_hand:
        written(tmp_path / "theirs", **REFUSED[name])
    with pytest.raises(ModelError, match=f"has {name.partition(':')[0]} = ") as refused:
        load(tmp_path / "theirs")
    assert "does not know" not in refused.value.why and "merge it into its base" in refused.value.fix


def test_a_setting_of_a_later_version_is_refused_unless_it_is_off(
    load: Callable[..., LanguageModel], tmp_path: Path
) -> None:
    save_model(trained(load(rank=4)), tmp_path / "saved")
    written(tmp_path / "saved", use_x=False, x_config=None, y_pattern={})
    load(tmp_path / "saved")
    written(tmp_path / "saved", use_x=True)
    with pytest.raises(ModelError, match="has use_x = True") as refused:
        load(tmp_path / "saved")
    assert "does not know the setting" in refused.value.why


@pytest.mark.parametrize("form", ["full", "int8"])
def test_a_model_is_read_alike_while_another_thread_builds_a_narrow_one(
    load: Callable[..., LanguageModel], form: str
) -> None:
    """Transformers changes torch's default dtype while it builds a bfloat16 model."""

    def read() -> dict[str, Tensor]:
        module = load(rank=3, base=form).module
        return {name: each.detach() for name, each in module.named_parameters()}

    alone, begun, end = read(), Event(), Event()

    def build() -> None:
        with ALONE, local_torch_dtype(torch.bfloat16):
            begun.set()
            end.wait(60)

    with ThreadPoolExecutor(2) as pool:
        building = pool.submit(build)
        assert begun.wait(60)
        reading = pool.submit(read)
        wait([reading], 0.2)
        end.set()
        beside = reading.result(60)
        building.result(60)
    assert all(torch.equal(alone[name], beside[name]) for name in alone)
    with local_torch_dtype(torch.bfloat16):
        assert drawn("a", "down.weight", torch.Size([3, 5]), 0).dtype == torch.float32


def test_an_adapter_for_another_base_is_refused(load: Callable[..., LanguageModel], tmp_path: Path) -> None:
    save_model(load(rank=4), tmp_path / "saved")
    other = load_model(
        ModelConfig(new=NewModel(hidden=48, layers=2, context=64)), seed=0, device=CPU, base=Path()
    )
    save_model(other, tmp_path / "other")
    written(tmp_path / "saved", base_model_name_or_path=str(tmp_path / "other"))
    with pytest.raises(ModelError, match=r"lora_A.weight of the adapter .*saved has the shape \[4, \d+\]"):
        load(tmp_path / "saved")


@pytest.mark.parametrize("target", ["gate_proj", "down_proj", "mlp.experts"])
def test_a_target_within_a_mixtures_experts_is_refused_with_the_cause(tmp_path: Path, target: str) -> None:
    new = NewModel(hidden=32, layers=1, context=64, architecture="qwen3_moe")
    save_model(load_model(ModelConfig(new=new), seed=0, device=CPU, base=Path()), tmp_path / "mixture")
    adapter = AdapterConfig(rank=2, targets=(target,))
    with pytest.raises(ModelError, match="is not a linear layer") as refused:
        load_model(
            ModelConfig(path=str(tmp_path / "mixture"), adapter=adapter), seed=0, device=CPU, base=Path()
        )
    assert refused.value.why.startswith("all experts of a layer share one weight, model.layers.0.mlp.experts")
    assert refused.value.fix.startswith("adapt k_proj, o_proj, q_proj, v_proj")


def test_one_adapter_is_trained(load: Callable[..., LanguageModel], tmp_path: Path) -> None:
    save_model(load(rank=4), tmp_path / "saved")
    with pytest.raises(ModelError, match="is an adapter, and the recipe adds another one"):
        load(tmp_path / "saved", rank=8)
    with pytest.raises(ValueError, match="greater than 0"):
        AdapterConfig(rank=0)


def test_a_check_reads_both_shapes_from_the_headers(
    load: Callable[..., LanguageModel], base: Path, tmp_path: Path
) -> None:
    save_model(load(rank=4), tmp_path / "saved")
    require_adapter_fits(tmp_path / "saved", base)
    wide = load_model(
        ModelConfig(new=NewModel(hidden=48, layers=2, context=64)), seed=0, device=CPU, base=Path()
    )
    save_model(wide, tmp_path / "wide")
    with pytest.raises(ModelError, match=r"saved has the shape \[(4, \d+|\d+, 4)\]") as caught:
        require_adapter_fits(tmp_path / "saved", tmp_path / "wide")
    assert "wide has the shape [" in str(caught.value) and "adapter_config.json" in str(caught.value)

"""A tokeniser beside an adapter is the model's: its template, its end token; it must fit the base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rillflow.app.facts import RecipeFacts
from rillflow.app.recipe import load_recipe
from rillflow.errors import ModelError
from rillflow.models.config import AdapterConfig, ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, save_model
from rillflow.models.tokenizer import Chat

CPU = torch.device("cpu")
TEMPLATE = "{% for m in messages %}own {{ m['content'] }}{% endfor %}"
CHAT = Chat(turns=[{"role": "user", "content": "17"}])
RECIPE = """
[task]
source = "rows.jsonl"
held_out = 0
[policy.model]
path = "adapter"
[rollout]
max_tokens = 4
[algorithm]
name = "grpo"
steps = 1
prompts_per_step = 1
[reward]
function = "reward.py:reward"
"""


def loaded(path: Path) -> LanguageModel:
    return load_model(ModelConfig(path=str(path)), seed=1, device=CPU, base=Path())


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Return an adapter as PEFT writes it, without a tokeniser, and its base without a template beside it."""
    new = NewModel(hidden=32, layers=1, context=64, alphabet="0123456789 nouw")
    save_model(load_model(ModelConfig(new=new), seed=0, device=CPU, base=Path()), tmp_path / "base")
    config = ModelConfig(path=str(tmp_path / "base"), adapter=AdapterConfig(rank=2))
    save_model(load_model(config, seed=0, device=CPU, base=Path()), tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / "adapter" / name).unlink(missing_ok=True)
    return tmp_path / "adapter"


def saved_beside(adapter: Path) -> None:
    """Save the base's tokeniser beside the adapter with a template and an end token, as trainers do."""
    own = PreTrainedTokenizerFast.from_pretrained(adapter.parent / "base")
    own.chat_template = TEMPLATE
    own.save_pretrained(adapter)
    file = adapter / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": "9"}))


def test_an_adapters_own_template_and_end_token_count_and_go_into_the_merged_model(adapter: Path) -> None:
    assert not loaded(adapter).tokenizer.chat_template, "the base's"
    saved_beside(adapter)
    model = loaded(adapter)
    assert model.tokenizer.decode(model.tokenizer.encode_chats([CHAT])[0]) == "own 17"
    assert model.tokenizer.token_of("9") in model.tokenizer.stop_tokens
    assert loaded(adapter.parent / "base").tokenizer.stop_tokens < model.tokenizer.stop_tokens
    save_model(model, adapter.parent / "again")
    assert loaded(adapter.parent / "again").tokenizer.chat_template == TEMPLATE


def test_check_and_run_read_it_alike(adapter: Path) -> None:
    saved_beside(adapter)
    folder = adapter.parent
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": [*CHAT.turns]}) + "\n")
    (folder / "reward.py").write_text("def reward(completions):\n    return [1.0 for _ in completions]\n")
    (folder / "run.toml").write_text(RECIPE)
    recipe = load_recipe(folder / "run.toml", ())
    facts = RecipeFacts(resolved=recipe)
    assert facts.model_input is not None and facts.encoded is not None
    assert facts.model_input.tokenizer.reads_as(loaded(adapter).tokenizer)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_part_of_a_tokeniser_is_refused(adapter: Path, name: str) -> None:
    saved_beside(adapter)
    (adapter / "tokenizer.json").unlink()
    for each in adapter.glob("*token*"):
        if each.name != name:
            each.unlink()
    if name != "chat_template.jinja":
        (adapter / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=f"has {name} and no vocabulary") as refused:
        loaded(adapter)
    assert "save_pretrained" in refused.value.fix


def test_a_tokeniser_of_another_vocabulary_is_refused(adapter: Path) -> None:
    saved_beside(adapter)
    file = adapter / "tokenizer.json"
    file.write_text(file.read_text().replace('"7"', '"x"'))
    with pytest.raises(ModelError, match="is not that of its base") as refused:
        loaded(adapter)
    assert "is 'x', and '7' in the base" in (refused.value.why or "")


def test_tokens_beyond_the_base_are_refused(adapter: Path) -> None:
    own = PreTrainedTokenizerFast.from_pretrained(adapter.parent / "base")
    own.add_tokens([f"<{number}>" for number in range(4)])
    own.save_pretrained(adapter)
    with pytest.raises(
        ModelError, match=r"in the adapter .* the tokeniser has 20 tokens and the model's embedding 16"
    ):
        loaded(adapter)


def test_a_reserved_token_may_have_another_name(adapter: Path) -> None:
    """The end token is an added one: models reserve such tokens for those who tune them."""
    saved_beside(adapter)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = adapter / name
        file.write_text(file.read_text().replace("<|end|>", "<|tool|>"))
    assert loaded(adapter).tokenizer.token_of("<|tool|>") == 0
    shutil.rmtree(adapter)

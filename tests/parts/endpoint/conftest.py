"""A small model, prompts for it, and the checks of rows that others write together with the policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.rollout.engine import Engine
from rillflow.rollout.native.engine import NativeEngine
from rillflow.tasks.encoded import Encoder

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<|end|> {% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
NEW = NewModel(hidden=32, layers=1, heads=2, kv_heads=1, context=96, alphabet="0123456789+=:asut ")


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = load_model(ModelConfig(new=NEW), seed=3, device=torch.device("cpu"), base=Path())
    made.tokenizer._library.chat_template = TEMPLATE
    yield made
    torch.set_num_threads(threads)


def sharpen(model: LanguageModel) -> None:
    """Give the fresh model's tokens different probabilities, so that other keys show."""
    with torch.no_grad():
        for weight in model.module.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)


def around(model: LanguageModel, inner: Callable[..., Engine] = NativeEngine) -> dict[str, Any]:
    """Return the arguments of a wrapper around an engine."""
    encoder = Encoder(tokenizer=model.tokenizer)
    return {"inner": inner, "encoder": encoder, "seed": 11, "context": model.context}


def prompts(model: LanguageModel, kinds: Sequence[str]) -> Batch:
    """Return a prompt for each kind, which is a column."""
    columns = [json.dumps({"prompt": f"{place}+1=", "kind": kind}) for place, kind in enumerate(kinds)]
    tokens = [model.tokenizer.encode(f"{place}+1=") for place in range(len(kinds))]
    ids = row_ids([RowId(0, place, 0) for place in range(len(kinds))])
    return Batch(ids=ids, fields={"tokens": Ragged.from_rows(tokens), "columns": Ragged.from_text(columns)})


def columns_of(rows: Batch) -> list[dict[str, Any]]:
    """Return the columns of every row."""
    return [json.loads(text) for text in rows.ragged("columns").to_text()]


def check_logprobs(
    model: LanguageModel, tokens: Sequence[int], mask: Sequence[bool], logprobs: Sequence[float]
) -> None:
    """Check that sampled tokens have the model's log probabilities, and the others 0."""
    with torch.inference_mode():
        logits = model.module(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    read = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0].tolist()
    for at, (is_own, logprob) in enumerate(zip(mask, logprobs, strict=True)):
        assert logprob == (pytest.approx(read[at - 1], abs=1e-4) if is_own else 0)


def check_sampled_once(
    engine: Engine, model: LanguageModel, kinds: Sequence[str]
) -> list[tuple[dict[str, Any], list[str], list[bool]]]:
    """Generate twice; check that both are equal, and versions and log probabilities are as sampled.

    Returns:
        Columns, pieces and loss mask of every row.
    """
    engine.load(4, {})
    found, again = (engine.generate(prompts(model, kinds), samples=2) for _ in range(2))
    names = ("tokens", "loss_mask", "sampler_logprobs", "versions")
    for name in (*names, "columns"):
        assert torch.equal(found.ragged(name).values, again.ragged(name).values), name
    rows = zip(columns_of(found), *(found.ragged(name).lists() for name in names), strict=True)
    checked = []
    for columns, tokens, mask, logprobs, versions in rows:
        assert [4 if is_own else -1 for is_own in mask] == versions
        check_logprobs(model, tokens, mask, logprobs)
        checked.append((columns, model.tokenizer.pieces(tokens), mask))
    return checked

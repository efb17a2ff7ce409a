"""The canary distinguishes rounding from wrong weights."""

from __future__ import annotations

from math import nan
from pathlib import Path

import pytest
import torch

from rillflow.errors import WeightError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model
from rillflow.roles.logprob_check import canary_rows, canary_texts, check_canary


def test_texts_are_the_same_wherever_the_model_is() -> None:
    new = NewModel(hidden=16, layers=1, heads=2, context=12, alphabet="0123456789+=")
    one, other = (
        load_model(ModelConfig(new=new), seed=seed, device=torch.device("cpu"), base=Path())
        for seed in (1, 2)
    )
    texts = canary_texts(one)
    assert texts == canary_texts(other) == canary_rows(one).ragged("tokens").lists()
    assert {len(text) for text in texts} == {12} and len({*map(tuple, texts)}) == len(texts)
    tokens = {token for text in texts for token in text}
    assert tokens <= set(range(one.tokenizer.vocabulary_size)) and len(tokens) > 8
    masks = canary_rows(one).ragged("loss_mask").lists()
    assert masks == [[False] + [True] * 11] * len(texts)


def test_float32_is_held_to_every_token_and_bfloat16_to_the_mean() -> None:
    said, found = (-1.0, -2.0, -3.0), [[-1.0, -2.0009], [-3.0]]
    check_canary(said, found, 7, is_exact=True)
    found[0][1] = -2.0011
    with pytest.raises(WeightError, match=r"version 7.* -2\.0011 in the engine and -2 in the trainer"):
        check_canary(said, found, 7, is_exact=True)
    check_canary(said, found, 7, is_exact=False)
    found[0][1] = -2.14
    check_canary(said, found, 7, is_exact=False)
    found[0][1] = -2.16
    with pytest.raises(WeightError) as caught:
        check_canary(said, found, 7, is_exact=False)
    assert "the mean difference is 0.0533, more than 0.05" in caught.value.why


@pytest.mark.parametrize("is_exact", [True, False])
def test_what_is_no_number_is_refused(is_exact: bool) -> None:
    with pytest.raises(WeightError, match="nan in the engine"):
        check_canary((-1.0, -2.0), [[-1.0, nan]], 1, is_exact=is_exact)

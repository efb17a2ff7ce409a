"""A template reads a given time as transformers would have it read the machine's."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
import torch

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model
from rillflow.models.tokenizer import Chat, Tokenizer

MOMENT = datetime(2031, 3, 7, 4, 5, 6)
BODY = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    new = NewModel(hidden=16, layers=1, heads=2, context=32)
    return load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path()).tokenizer


def rendered(tokenizer: Tokenizer, template: str, **arguments: str) -> str:
    tokenizer._library.chat_template = template
    chat = Chat(turns=[{"role": "user", "content": "1"}], arguments=arguments)
    return tokenizer.at(MOMENT).rendered(chat, opens=True)


@pytest.mark.parametrize(
    "form",
    ["%d %b %Y", "%Y-%m-%d", "%A, %-d %B", "%H:%M:%S %p", "%j%U", "day %d of %m", "no time", "%e %_d %^a"],
)
def test_every_directive_is_that_of_strftime(tokenizer: Tokenizer, form: str) -> None:
    assert rendered(tokenizer, "{{ strftime_now('" + form + "') }}|" + BODY) == f"{MOMENT.strftime(form)}|1"


def test_a_time_may_be_read_in_a_condition_a_macro_or_by_a_variable(tokenizer: Tokenizer) -> None:
    llama = (
        "{%- if strftime_now is defined %}{%- set date = strftime_now('%d %b %Y') %}"
        "{%- else %}{%- set date = '26 Jul 2024' %}{%- endif %}{{ date }} "
    )
    assert rendered(tokenizer, llama + BODY) == "07 Mar 2031 1"
    inside = "{% macro head() %}{{ strftime_now(format='%d') }}{% endmacro %}{{ head() }} "
    assert rendered(tokenizer, inside + BODY) == "07 1"
    assert rendered(tokenizer, "{{ strftime_now(form) }} " + BODY, form="%d/%m") == "07/03 1"


def test_a_template_without_a_clock_is_left_as_it_is(tokenizer: Tokenizer) -> None:
    assert rendered(tokenizer, "  \n" + BODY) == "  \n1"
    tokenizer._library.chat_template = "{{ strftime_now('%Y') }}"
    now = tokenizer.rendered(Chat(turns=[{"role": "user", "content": "1"}]), opens=True)
    assert now == datetime.now().strftime("%Y")

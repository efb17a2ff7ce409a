"""An agent's row with tools: what clients send back continues it, and no sampled token is read again."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from rillflow.errors import DataError, ModelError
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.tasks.encoded import Encoder
from rillflow_parts.endpoint.conversation import Conversation
from rillflow_parts.endpoint.openai_protocol import ChatRequest, checked
from rillflow_parts.endpoint.responses import ResponsesRequest
from rillflow_parts.endpoint.tool_calls import tool_format
from tests.clients.small_model import TEMPLATE, TOOLS, make_tokenizer

USER = {"role": "user", "content": "both sums"}
SAMPLED = 'I add. <tool_call>{"arguments":{"a":17,"b":25},  "name":"add"}</tool_call>'
"""A call as no template writes it."""
RESULT = {"role": "tool", "tool_call_id": "call", "content": "42"}


@cache
def tokenizer_of(template: str) -> Tokenizer:
    inner = make_tokenizer()
    inner.chat_template = template
    return Tokenizer(inner)


def talk(template: str = TEMPLATE) -> Conversation:
    tokenizer = tokenizer_of(template)
    start = Rollout.start(RowId(0, 0, 0), tokenizer.encode("both sums"))
    encoder = Encoder(tokenizer=tokenizer)
    return Conversation(start, SamplingConfig(max_tokens=300), encoder, tool_format("auto", tokenizer))


def asked(messages: list[Any], **more: Any) -> ChatRequest:
    return checked(ChatRequest, {"messages": messages, "tools": TOOLS} | more)


def answer(of: Conversation, request: ChatRequest, text: str, *, ends: bool = True) -> Rollout:
    """Continue the row by a text that the policy samples."""
    (row,) = of.begin(request)
    tokenizer = of._encoder.tokenizer
    tokens = tokenizer.encode_more(text, is_rendered=True) + [*tokenizer.stop_tokens][:1] * ends
    row = row.sampled(tokens, [-0.5] * len(tokens), 3, Finish.STOP)
    of.over(request, [row])
    return row


def shown(of: Conversation, *, sampled: bool | None = None) -> str:
    pieces = of._encoder.tokenizer.pieces(of.row.tokens)
    return "".join(
        piece for piece, own in zip(pieces, of.row.loss_mask, strict=True) if sampled in (None, own)
    )


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    """Return the assistant's message as a client sends it back."""
    function = {"name": "add", "arguments": arguments}
    calls = [{"id": "call", "type": "function", "function": function}]
    return {"role": "assistant", "content": "I add.", "tool_calls": calls} | more


FORMS: dict[str, dict[str, Any]] = {
    "as it was": call('{"a": 17, "b": 25}'),
    "other JSON": call('{"b":25,\n"a":17}'),
    "an object": call({"a": 17, "b": 25}),
    "openai's model_dump": call(
        '{"a": 17, "b": 25}', refusal=None, audio=None, function_call=None, annotations=[], name=None
    ),
    "parts": call('{"a": 17, "b": 25}', content=[{"type": "text", "text": "I add."}]),
}


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_call_continues_the_row_as_it_was_sampled(form: str, ends: bool) -> None:
    made = talk()
    answer(made, asked([USER]), SAMPLED, ends=ends)
    before = made.row
    answer(made, asked([USER, FORMS[form], RESULT]), "It is 42.")
    assert made.row.tokens[: len(before.tokens)] == before.tokens
    assert made.row.logprobs[: len(before.tokens)] == before.logprobs
    assert shown(made) == (
        "<|im_start|>system\nTools: add<|im_end|>\n<|im_start|>user\nboth sums<|im_end|>\n"
        f"<|im_start|>assistant\n{SAMPLED}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n"
        "<|im_start|>assistant\nIt is 42.<|im_end|>"
    )
    assert shown(made, sampled=True) == SAMPLED + "<|im_end|>" * ends + "It is 42.<|im_end|>"


@pytest.mark.parametrize("content", [None, "", [], "missing"])
def test_a_call_without_text_may_have_any_content_that_says_nothing(content: Any) -> None:
    made, sent = talk(), call('{"a": 17, "b": 25}', content=content)
    if content == "missing":
        del sent["content"]
    answer(made, asked([USER]), SAMPLED.removeprefix("I add. "))
    answer(made, asked([USER, sent, RESULT]), "It is 42.")
    assert shown(made).endswith("<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\nIt is 42.<|im_end|>")


@pytest.mark.parametrize("content", [None, "", "missing"])
def test_an_empty_answer_may_have_any_content_that_says_nothing(content: Any) -> None:
    made, sent = talk(), {"role": "assistant", "content": content}
    if content == "missing":
        del sent["content"]
    answer(made, asked([USER]), "")
    answer(made, asked([USER, sent, USER]), "What?")
    assert shown(made, sampled=True) == "<|im_end|>What?<|im_end|>"


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (call('{"a": 17, "b": 26}'), "message 2 is"),
        (call('{"a": 17, "b": 25}') | {"tool_calls": []}, "message 2 is"),
        (call('{"a": 17'), "message 2 is"),
        (call('{"a": 17, "b": 25}', content="I think."), "message 2 is"),
        (call('{"a": 17, "b": 25}', role="user"), "message 2 is"),
    ],
)
def test_another_call_than_the_sampled_one_is_told(sent: Any, told: str) -> None:
    made = talk()
    answer(made, asked([USER]), SAMPLED)
    before = made.row
    with pytest.raises(DataError, match=told):
        made.begin(asked([USER, sent, RESULT]))
    assert made.row == before
    answer(made, asked([USER, FORMS["as it was"], RESULT]), "It is 42.")


def test_other_tools_than_at_first_are_told() -> None:
    made = talk()
    answer(made, asked([USER]), SAMPLED)
    with pytest.raises(DataError, match="tools are null, but were"):
        made.begin(asked([USER, FORMS["as it was"], RESULT], tools=None))


def test_a_call_that_does_not_parse_is_text_and_the_row_goes_on() -> None:
    broken = '<tool_call>{"name": "add", "argu</tool_call>'
    made = talk()
    answer(made, asked([USER]), broken)
    answer(made, asked([USER, {"role": "assistant", "content": broken}, USER]), "Sorry.")
    assert shown(made, sampled=True) == f"{broken}<|im_end|>Sorry.<|im_end|>"


def test_a_choice_of_no_tool_continues_the_row() -> None:
    made = talk()
    answer(made, asked([USER]), SAMPLED)
    answer(made, asked([USER, FORMS["as it was"], RESULT], tool_choice="none"), "It is 42.")
    answer(
        made,
        asked([USER, FORMS["as it was"], RESULT, {"role": "assistant", "content": "It is 42."}, USER]),
        "?",
    )
    assert made.row.tokens and shown(made).count("<|im_start|>") == 7


THINKING = TEMPLATE.replace(
    "(m.content or '')",
    "(m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1])",
)


def test_a_template_that_drops_earlier_thoughts_is_told() -> None:
    made, said = talk(THINKING), "<think>hm</think>It is 42."
    answer(made, asked([USER]), said)
    with pytest.raises(ModelError, match="the chat template rewrites an earlier turn") as caught:
        made.begin(asked([USER, {"role": "assistant", "content": said}, USER]))
    assert "<think>hm" in caught.value.what and "keeps earlier turns" in caught.value.fix
    assert not made.is_asking


def test_a_template_that_rewrites_the_text_before_an_answer_is_told() -> None:
    late = TEMPLATE.replace("system\\nTools:", "system\\n' ~ messages | length ~ ' Tools:")
    assert late != TEMPLATE
    made = talk(late)
    answer(made, asked([USER]), SAMPLED)
    with pytest.raises(ModelError, match="the chat template rewrites an earlier turn"):
        made.begin(asked([USER, FORMS["as it was"], RESULT]))


def test_a_response_continues_the_row_of_a_chat() -> None:
    """Both forms of the protocol are conversations of turns."""
    made = talk()
    flat = [{"type": "function", "name": "add"}]
    first = [{"role": "user", "content": "both sums"}]
    answer(made, checked(ResponsesRequest, {"input": "both sums", "tools": flat}).chat(), SAMPLED)
    items = [
        *first,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": json.dumps({"b": 25, "a": 17})},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ]
    answer(made, checked(ResponsesRequest, {"input": items, "tools": flat}).chat(), "It is 42.")
    assert shown(made, sampled=True) == f"{SAMPLED}<|im_end|>It is 42.<|im_end|>"


def test_the_tokeniser_s_own_response_template_reads_calls() -> None:
    inner = make_tokenizer()
    inner.init_kwargs["response_template"] = inner.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }
    form = tool_format("auto", Tokenizer(inner))
    prompt = "<|im_start|>assistant\n"
    found = form.read("<think>hm</think>I add.\n" + SAMPLED[7:], TOOLS, prompt=prompt)
    assert [each.same for each in found.calls] == [("add", {"a": 17, "b": 25})]
    assert (found.reasoning, found.content.strip()) == ("hm", "I add.")
    assert form.read("<tool_call>{</tool_call>", TOOLS, prompt=prompt).content == "<tool_call>{</tool_call>"
    with pytest.raises(DataError, match="the tokeniser has no response_template"):
        tool_format("template", Tokenizer(make_tokenizer()))


EMPTY_THOUGHTS = TEMPLATE.replace(
    "(m.content or '')",
    "('<think>\\n\\n</think>\\n\\n' if loop.last and m.role == 'assistant' else '') + (m.content or '')",
)
LLAMA = """\
{%- for m in messages %}
{%- if m.tool_calls %}
{{- '<|im_start|>assistant\\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '}<|im_end|>' }}
{%- else %}{{ '<|im_start|>' + ('ipython' if m.role == 'tool' else m.role) + '\\n' }}
{{- m.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_a_template_that_writes_empty_thoughts_in_the_last_turn_alone_continues() -> None:
    """The prompt before the answer, and the answer, are the same once there are later messages."""
    made = talk(EMPTY_THOUGHTS)
    answer(made, asked([USER]), SAMPLED)
    answer(made, asked([USER, FORMS["as it was"], RESULT]), "It is 42.")
    assert shown(made, sampled=True) == f"{SAMPLED}<|im_end|>It is 42.<|im_end|>"


@pytest.mark.parametrize("said", [SAMPLED.removeprefix("I add. "), SAMPLED])
def test_empty_thoughts_before_the_newest_answer_alone_are_no_rewriting(said: str) -> None:
    """As with thoughts turned off: the row keeps the text that the policy saw."""
    off = "<think>\n\n</think>\n\n"
    template = TEMPLATE.replace(
        "'<|im_start|>assistant\\n' }}{% endif", "'<|im_start|>assistant\\n' + OFF }}{% endif"
    )
    made = talk(template.replace("OFF", repr(off)))
    answer(made, asked([USER]), said)
    sent = call('{"a": 17, "b": 25}', content="I add." if said == SAMPLED else None)
    answer(made, asked([USER, sent, RESULT]), "It is 42.")
    answer(made, asked([USER, sent, RESULT, {"role": "assistant", "content": "It is 42."}, USER]), "?")
    text = shown(made)
    assert text.count(off) == 3 and text.count("<|im_start|>assistant\n" + off) == 3
    assert shown(made, sampled=True) == f"{said}<|im_end|>It is 42.<|im_end|>?<|im_end|>"


def test_a_bare_object_of_a_llama_continues() -> None:
    made = talk(LLAMA)
    said = '{"name":"add","parameters":{"a":17,"b":25}}'
    answer(made, asked([USER]), said)
    answer(made, asked([USER, call('{"a": 17, "b": 25}', content=None), RESULT]), "It is 42.")
    assert shown(made) == (
        f"<|im_start|>user\nboth sums<|im_end|><|im_start|>assistant\n{said}<|im_end|>"
        "<|im_start|>ipython\n42<|im_end|><|im_start|>assistant\nIt is 42.<|im_end|>"
    )

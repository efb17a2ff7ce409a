"""The text between two answers of a conversation: as the template writes it, or the template is refused."""

from __future__ import annotations

import pytest

from rillflow.errors import ModelError
from rillflow.models.tokenizer import Chat, Tokenizer
from rillflow_parts.endpoint.next_turn import encode_next
from tests.unit.models.test_chat_templates import CHAT, QWEN, gemma, made, qwen, shown


@pytest.mark.parametrize("content", ["sat", " sat ", ""])
@pytest.mark.parametrize("is_ended", [True, False])
def test_between_two_answers_stands_what_the_template_writes(content: str, is_ended: bool) -> None:
    """Prompt, sampled answer and the text before the next answer are together the template's own text."""
    for tokenizer in (gemma(), qwen()):
        later = Chat(
            turns=[
                *CHAT.turns,
                {"role": "assistant", "content": content},
                {"role": "tool", "content": "on the mat"},
            ]
        )
        sampled = tokenizer.to_end(tokenizer.encode_replies([CHAT], [content])[0])
        sampled = sampled if is_ended else sampled[:-1]
        before = tokenizer.rendered(CHAT, opens=True)
        found = encode_next(
            tokenizer,
            before,
            content,
            later,
            is_ended=is_ended,
            agrees=lambda body: body.strip() == content.strip(),
        )
        assert found.text == tokenizer.rendered(later, opens=True)
        more = found.tokens
        row = [*tokenizer.encode_chats([CHAT])[0], *sampled, *more]
        assert row == tokenizer.encode_chats([later])[0]


def test_a_template_without_an_end_goes_on_behind_the_answer() -> None:
    plain = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}"
    tokenizer = Tokenizer(
        made(plain + "{% if add_generation_prompt %}assistant {% endif %}", "<eos> <x>", "<eos>")
    )
    turns = [*CHAT.turns, {"role": "assistant", "content": "sat"}, {"role": "user", "content": "on"}]
    before = tokenizer.rendered(CHAT, opens=True)
    more = encode_next(tokenizer, before, "sat", Chat(turns=turns), is_ended=True, agrees="sat".__eq__).tokens
    assert shown(tokenizer, more) == "\nuser on\nassistant "


def test_a_template_that_rewrites_earlier_turns_cannot_go_on() -> None:
    late = QWEN.replace("{{ '\\n' + m['content'] }}", "{{ '\\n' + (m['content'] if loop.last else '-') }}")
    tokenizer = qwen(late)
    turns = [*CHAT.turns, {"role": "assistant", "content": "sat"}, {"role": "user", "content": "on"}]
    before = tokenizer.rendered(CHAT, opens=True)
    with pytest.raises(ModelError, match="the chat template rewrites an earlier turn") as caught:
        encode_next(tokenizer, before, "sat", Chat(turns=turns), is_ended=True, agrees="sat".__eq__)
    assert "user\\n-<|im_end|>" in caught.value.what and "keeps earlier turns" in caught.value.fix

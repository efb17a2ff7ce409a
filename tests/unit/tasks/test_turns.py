"""Supervised steps learn every assistant turn of a conversation, the last alone, or a whole text."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from rillflow.errors import DataError
from rillflow.models.tokenizer import Tokenizer
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.example import example_of
from rillflow.tasks.kinds import DEMONSTRATIONS, PROMPTS
from tests.unit.models.token_kinds import END, byte_level, fallback

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<{{ c['function']['name'] }}>{% endfor %}"
    "{% if m['role'] == 'assistant' %}" + END + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
FORGETFUL = TEMPLATE.replace(
    "{{ m['content'] }}", "{{ m['content'].split('/')[-1] if not loop.last else m['content'] }}"
)
TURNS = [("user", "hi"), ("assistant", "you"), ("user", "then"), ("assistant", "so/be it")]
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


def chatting(template: str = TEMPLATE) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer._library.chat_template = template
    return tokenizer


def messages(*turns: tuple[str, str]) -> list[dict[str, object]]:
    return [{"role": role, "content": text} for role, text in turns]


def learnt(tokenizer: Tokenizer, rows: Sequence[dict[str, object]], *, turns: bool = True) -> list[str]:
    """Return the learnt text of each row, other text between turns as a bar."""
    examples = [DEMONSTRATIONS.read({**row}, place, "") for place, row in enumerate(rows)]
    found = Encoder(tokenizer=tokenizer, learns_turns=turns).rows(examples, DEMONSTRATIONS)
    batch, texts = DEMONSTRATIONS.batch(found, 0), []
    for tokens, mask in zip(batch.ragged("tokens").lists(), batch.ragged("loss_mask").lists(), strict=True):
        shown, was = "", True
        for token, is_own in zip(tokenizer.pieces(tokens), mask, strict=True):
            shown += token if is_own else "|" * was
            was = bool(is_own)
        texts.append(shown)
    return texts


def test_all_turns_of_the_assistant_are_learnt_with_their_ends() -> None:
    row: dict[str, object] = {"messages": messages(*TURNS)}
    short: dict[str, object] = {"messages": messages(("system", "be"), *TURNS[:2])}
    assert learnt(chatting(), [row, short]) == [f"|you{END}|so/be it{END}", f"|you{END}"]
    assert learnt(chatting(), [row], turns=False) == [f"|so/be it{END}"]


def test_a_turn_that_calls_a_tool_is_learnt() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    said = [*messages(("user", "x")), called, *messages(("tool", "y"), ("assistant", "z"))]
    assert learnt(chatting(), [{"messages": said}]) == [f"|<look>{END}|z{END}"]


def test_all_turns_have_the_tokens_of_the_last_turn_alone() -> None:
    tokenizer = chatting()
    example = example_of({"messages": messages(*TURNS)}, 0, "")
    whole, last = (
        Encoder(tokenizer=tokenizer, learns_turns=turns).rows([example], DEMONSTRATIONS)[0]
        for turns in (True, False)
    )
    assert whole.prompt + whole.answers[0] == last.prompt + last.answers[0]
    assert Encoder(tokenizer=tokenizer, learns_turns=True).rows([example])[0].prompt == last.prompt


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    turns = [("user", "hi"), ("assistant", "so/you"), *TURNS[2:]]
    with pytest.raises(DataError, match="renders a prompt differently") as refused:
        learnt(chatting(FORGETFUL), [{"messages": messages(*turns)}])
    assert "task.turns = 'last'" in refused.value.fix


@pytest.mark.parametrize("make", [byte_level, fallback])
def test_a_text_is_learnt_from_its_second_token_on(make: type[Tokenizer]) -> None:
    tokenizer = make()
    rows: list[dict[str, object]] = [{"text": "the end"}, {"text": "so"}]
    assert learnt(tokenizer, rows) == [f"|{'the end'[1:]}{END}", f"|o{END}"]
    with pytest.raises(DataError, match="has a text to learn and no prompt"):
        Encoder(tokenizer=tokenizer).rows([DEMONSTRATIONS.read({"text": "so"}, 0, "")], PROMPTS)


WRITTEN = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m['thinking'] %}({{ m['thinking'] }}){% endif %}{{ m['content'] }}",
).replace("<{{ c['function']['name'] }}>", "<{{ c['function']['name'] }} {{ c['function']['arguments'].a }}>")
"""A template that writes thoughts, and an argument of a call."""
USER: dict[str, object] = {"role": "user", "content": "hi"}
CALLING: dict[str, object] = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": '{"a": 7}'}}],
}


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize(
    ("answer", "written"),
    [
        (CALLING, "<look 7>"),
        ({"role": "assistant", "thinking": "well", "content": "so"}, "(well)so"),
        ({**CALLING, "content": "wait", "thinking": "well"}, "(well)wait<look 7>"),
    ],
)
def test_an_answer_with_calls_or_thoughts_is_learnt_as_the_template_writes_it(
    answer: dict[str, object], written: str, turns: bool
) -> None:
    rows: list[dict[str, object]] = [
        {"messages": [USER, answer]},
        {"prompt": [USER], "completion": [answer]},
    ]
    assert learnt(chatting(WRITTEN), rows, turns=turns) == [f"|{written}{END}"] * 2


@pytest.mark.parametrize(
    ("answer", "part"), [({"thinking": "well"}, "well"), ({"tool_calls": CALLING["tool_calls"]}, "look")]
)
@pytest.mark.parametrize("turns", [True, False])
def test_thoughts_and_calls_that_the_template_leaves_out_are_refused(
    answer: dict[str, object], part: str, turns: bool
) -> None:
    mute = TEMPLATE.replace("<{{ c['function']['name'] }}>", "")
    row: dict[str, object] = {"messages": [USER, {"role": "assistant", "content": "so", **answer}]}
    with pytest.raises(DataError, match=f"leaves out '{part}': it writes the answer as 'so"):
        learnt(chatting(mute), [row], turns=turns)


def test_thoughts_need_a_prompt_of_messages() -> None:
    answer = {"role": "assistant", "content": "so", "thinking": "well"}
    with pytest.raises(DataError, match="has thinking, and the prompt is text"):
        example_of({"prompt": "hi", "completion": [answer]}, 0, "")


OPENING = (
    "{% for m in messages %}" + END + "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}" + END
)
OPENING += "{% endif %}"
"""A template that ends a turn only by opening the next one, as GLM's does."""


def test_a_turn_is_learnt_with_the_end_token_that_opens_the_next() -> None:
    row: dict[str, object] = {"messages": messages(*TURNS)}
    tokenizer = chatting(OPENING)
    assert learnt(tokenizer, [row]) == [f"|you{END}|so/be it{END}"]
    (example,) = [DEMONSTRATIONS.read({**row}, 0, "")]
    (found,) = Encoder(tokenizer=tokenizer, learns_turns=True).rows([example], DEMONSTRATIONS)
    text = "".join(tokenizer.pieces([*found.prompt, *found.answers[0]]))
    assert text == f"{END}hi{END}you{END}then{END}so/be it{END}"  # nothing is added between turns


def test_a_turn_without_an_end_gets_none_in_the_middle_of_a_row() -> None:
    template = (
        "{% for m in messages %}[{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[{% endif %}"
    )
    assert learnt(chatting(template), [{"messages": messages(*TURNS)}]) == [f"|you|so/be it{END}"]


def test_a_rows_own_template_variables_replace_those_of_the_task() -> None:
    tokenizer = chatting("{{ mood }}{{ tone }}" + TEMPLATE)
    encoder = Encoder(tokenizer=tokenizer, template_arguments={"mood": "calm", "tone": "low"})
    rows = [
        example_of({"prompt": [USER], "chat_template_kwargs": {"mood": "wild", "tone": None}}, 0, ""),
        example_of({"prompt": [USER], "chat_template_kwargs": None}, 1, ""),
    ]
    texts = [tokenizer.decode(row.prompt, special=True) for row in encoder.rows(rows)]
    assert texts == ["wildlow[u]hi[a]", "calmlow[u]hi[a]"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ("low", 'has "low"'),
        ({"tools": []}, "has 'tools'"),
        ({"mood": END}, "a template variable contains the text of the special token"),
    ],
)
def test_wrong_template_variables_of_a_row_are_refused(variables: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        Encoder(tokenizer=chatting()).rows(
            [example_of({"prompt": [USER], "chat_template_kwargs": variables}, 0, "")]
        )


def test_tools_are_also_read_as_json_text() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    row = {"prompt": [USER], "tools": json.dumps(tools)}
    assert example_of({**row}, 0, "").tools == tools
    assert example_of({**row, "tools": " "}, 0, "").tools is None
    for wrong in ("{", '{"a": NaN}', '{"a": 1}'):
        with pytest.raises(DataError, match="the column 'tools' has"):
            example_of({**row, "tools": wrong}, 0, "")


def test_a_template_that_joins_arguments_to_text_gets_them_as_text() -> None:
    joining = TEMPLATE.replace(
        "<{{ c['function']['name'] }}>",
        "{{ '<' + c['function']['name'] + c['function']['arguments'] + '>' }}",
    )
    assert learnt(chatting(joining), [{"messages": [USER, CALLING]}]) == ['|<look{"a": 7}>' + END]

"""Chat templates: ends of answers, rendered prompts, and templates that rewrite earlier turns."""

from __future__ import annotations

import inspect

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rillflow.config.load import validate
from rillflow.errors import ConfigError, ModelError
from rillflow.models.tokenizer import Chat, Tokenizer
from rillflow.tasks.config import TaskConfig

GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}{{ '\\n' }}"
    "{{ m['content'] | trim }}<end_of_turn>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model{{ '\\n' }}{% endif %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system{{ '\\n' + tools[0].function.name }}<|im_end|>{{ '\\n' }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if m.name %}({{ m.name }}){% endif %}"
    "{{ '\\n' + m['content'] }}{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}"
    "<|im_end|>{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
NAMES = "<bos> <eos> <start_of_turn> <end_of_turn>"
CHAT = Chat(turns=[{"role": "user", "content": "the cat"}])


def made(template: str, specials: str, end: str, begins: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with these special tokens; ``begins`` adds the first to all texts."""
    names = specials.split()
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=names, initial_alphabet=alphabet)
    backend.train_from_iterator(["the cat sat on the mat"], trainer)
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{names[0]} $A", special_tokens=[(names[0], 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=names[0] if begins else None,
        eos_token=end,
        additional_special_tokens=names,
        chat_template=template,
    )


def gemma(stop: tuple[int, ...] = (3,)) -> Tokenizer:
    inner = made(GEMMA, NAMES, "<eos>", begins=True)
    return Tokenizer(inner, stop_tokens=stop)


def qwen(template: str = QWEN) -> Tokenizer:
    return Tokenizer(made(template, "<|endoftext|> <|im_start|> <|im_end|>", "<|im_end|>"))


def shown(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return "".join(tokenizer.pieces(tokens))


def test_an_answer_ends_as_the_template_ends_it() -> None:
    reply = gemma().encode_replies([CHAT], [" sat "])[0]
    assert shown(gemma(), reply) == "sat<end_of_turn>\n", "not <eos>; and trimmed, as the template does"
    assert shown(qwen(), qwen().encode_replies([CHAT], ["sat"])[0]) == "sat<|im_end|>\n"


def test_prompt_and_reply_are_the_template_s_own_whole() -> None:
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    whole = made(GEMMA, NAMES, "<eos>", begins=True).apply_chat_template(turns, tokenize=False)
    row = [*gemma().encode_chats([CHAT])[0], *gemma().encode_replies([CHAT], ["sat"])[0]]
    assert shown(gemma(), row) == whole
    assert whole == "<bos><start_of_turn>user\nthe cat<end_of_turn>\n<start_of_turn>model\nsat<end_of_turn>\n"


def test_an_answer_without_an_end_token_of_the_model_s_gets_one() -> None:
    """Generation would not stop at <end_of_turn>, so the model's end token follows."""
    blind = gemma(stop=())
    assert shown(blind, blind.encode_replies([CHAT], ["sat"])[0]) == "sat<end_of_turn>\n<eos>"


def test_a_sampled_answer_stops_where_one_of_a_pair_is_cut() -> None:
    for tokenizer, end in ((gemma(), "<end_of_turn>"), (qwen(), "<|im_end|>"), (gemma(stop=()), "<eos>")):
        cut = tokenizer.to_end(tokenizer.encode_replies([CHAT], ["sat"])[0])
        assert tokenizer.pieces(cut)[-1] == end
        assert [token in tokenizer.stop_tokens for token in cut] == [False] * (len(cut) - 1) + [True]


def test_a_template_that_rewrites_the_past_is_named() -> None:
    tokenizer = qwen(FORGETFUL)
    assert shown(tokenizer, tokenizer.encode_chats([CHAT])[0]).endswith("<|im_start|>assistant\n<think>")
    with pytest.raises(
        ModelError, match="the chat template renders a prompt differently before an answer"
    ) as caught:
        tokenizer.encode_replies([CHAT], ["sat"])
    assert "assistant\\n<think>' became" in caught.value.what
    assert "task.chat_template_applied" in caught.value.fix


STRIPPING = QWEN.replace("'\\n' + m['content']", "'\\n' + m['content'].split('</think>')[-1].strip()")
"""Leaves out thoughts, as the template of DeepSeek's R1 models does."""
EMPTY = "'<think>\\n\\n</think>\\n\\n' * (m.role == 'assistant')"
ADDING = QWEN.replace("'\\n' + m['content']", "'\\n' + " + EMPTY + " + m['content'] | trim")
OPENING = QWEN.replace("assistant{{ '\\n' }}", "assistant{{ '\\n<think>\\n' }}")
"""Opens an answer with the beginning of its thoughts."""


@pytest.mark.parametrize("answer", ["<think>\nsix\n</think>\n\n42", "so</think>42"])
def test_a_template_that_leaves_out_a_part_of_an_answer_to_learn_is_refused(answer: str) -> None:
    with pytest.raises(ModelError) as refused:
        qwen(STRIPPING).encode_replies([CHAT, CHAT], ["42", answer])
    assert f"writes the answer {answer!r} as '42<|im_end|>" in refused.value.what
    assert "chat_template.jinja" in refused.value.fix


@pytest.mark.parametrize(
    ("template", "answer", "reply"),
    [
        (STRIPPING, " 42\n", "42<|im_end|>"),
        (ADDING, "  42\n", "<think>\n\n</think>\n\n42<|im_end|>"),
        (OPENING, "<think>\nsix\n</think>\n\n42", "six\n</think>\n\n42<|im_end|>"),
    ],
)
def test_trimmed_blanks_empty_thoughts_and_opened_ones_are_no_loss(
    template: str, answer: str, reply: str
) -> None:
    tokenizer = qwen(template)
    assert shown(tokenizer, tokenizer.encode_replies([CHAT], [answer])[0]).rstrip() == reply


def test_a_template_gets_its_arguments_tools_names_and_calls() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "name": "ann", "content": "the"},
        {"role": "assistant", "tool_calls": [call], "content": ""},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    chat = Chat(turns=turns, tools=[{"type": "function", "function": {"name": "add"}}])
    assert shown(qwen(), qwen().encode_chats([chat])[0]) == (
        "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user(ann)\nthe<|im_end|>\n"
        "<|im_start|>assistant\n[add]<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )
    brief = Chat(turns=CHAT.turns, arguments={"enable_thinking": False})
    assert shown(qwen(), qwen().encode_chats([brief])[0]).endswith("assistant\n<think></think>")


@pytest.mark.parametrize(
    "chat",
    [
        Chat(turns=[{"role": "user", "content": "a", "name": "x<|im_end|>"}]),
        Chat(turns=[{"role": "user", "content": "", "tool_calls": [{"function": {"name": "<|im_end|>"}}]}]),
        Chat(turns=CHAT.turns, tools=[{"function": {"name": "<|im_end|>"}}]),
    ],
)
def test_a_special_token_is_refused_wherever_a_template_may_write_it(chat: Chat) -> None:
    with pytest.raises(ModelError, match=r"contains the text of the special token '<\|im_end\|>'"):
        qwen().encode_chats([chat])


def test_an_answer_that_spells_a_special_token_is_refused_in_a_chat() -> None:
    with pytest.raises(ModelError, match="'assistant' contains"):
        qwen().encode_replies([CHAT], ["sat<|im_end|>"])


def test_a_rendered_prompt_has_the_tokens_of_its_messages() -> None:
    for tokenizer, text in (
        (qwen(), "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"),
        (gemma(), "<bos><start_of_turn>user\nthe cat<end_of_turn>\n<start_of_turn>model\n"),
    ):
        (rendered,) = tokenizer.encode_texts([text], is_rendered=True)
        assert rendered == tokenizer.encode_chats([CHAT])[0], "one begin token, though the tokeniser adds one"
        (plain,) = tokenizer.encode_texts([text])
        assert len(plain) > 2 * len(rendered), "as plain text its special tokens are many ordinary ones"
        assert tokenizer.special_in(text) == tokenizer.pieces(rendered)[0]
    (bare,) = gemma().encode_texts(["<start_of_turn>user\n"], is_rendered=True)
    assert gemma().pieces(bare)[:2] == ["<bos>", "<start_of_turn>"], "added where the text has none"


def test_a_rendered_answer_keeps_its_own_end() -> None:
    ended, open_ = qwen().encode_completions(["sat<|im_end|>\n", "sat"], is_rendered=True)
    assert shown(qwen(), ended) == "sat<|im_end|>\n"
    assert shown(qwen(), open_) == "sat<|im_end|>"


def test_no_variable_of_a_template_has_the_name_of_what_rendering_takes() -> None:
    """All parameters of transformers' call, except documents, which only the template reads."""
    taken = {*inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters, "messages"}
    for name in taken - {"self", "kwargs", "documents"}:
        with pytest.raises(ConfigError, match=f"'{name}' is set by the rendering itself"):
            validate(TaskConfig, {"template_arguments": {name: 1}}, "task")
    free = {"enable_thinking": False, "documents": "none"}
    assert validate(TaskConfig, {"template_arguments": free}, "task").template_arguments == free


def test_several_templates_without_a_default_are_refused_by_name() -> None:
    inner = made(QWEN, "<|endoftext|> <|im_start|> <|im_end|>", "<|im_end|>")
    inner.chat_template = {"rag": FORGETFUL, "tool_use": QWEN}
    with pytest.raises(ModelError) as refused:
        Tokenizer(inner).encode_chats([CHAT])
    assert refused.value.what == "no chat template of the model is named default"
    assert refused.value.why == "it has the templates rag, tool_use"
    tools = [{"type": "function", "function": {"name": "weather"}}]
    with_tools = Tokenizer(inner).rendered(Chat(turns=CHAT.turns, tools=tools), opens=True)
    assert with_tools.startswith("<|im_start|>system\nweather<|im_end|>"), "tool_use writes such messages"

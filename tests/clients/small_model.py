"""A small model with a chat template and tools: it learns a few conversations by heart.

    python tests/clients/small_model.py FOLDER

To "17+25" it answers with a call of the tool ``add`` if the request has tools, and with text if not; to a
tool's result it answers with the result. The template writes the names of the tools alone, so any client's
description of them makes the same prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role in ('system', 'developer') %}{% continue %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if m.content or not loop.first }}
{{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Messages between ``<|im_start|>`` and ``<|im_end|>``, calls as JSON between ``<tool_call>`` tags."""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}]
SUMS = [(17, 25), (3, 4), (20, 5), (8, 9)]
TWICE = "both sums"
"""Prompt that is answered with two calls."""
STEPS, KNOWN = 300, 0.01
"""Most steps, and the loss that is low enough."""


def conversations() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]]:
    """Return messages, tools and the answer to learn."""
    found: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]] = []
    for a, b in SUMS:
        user, said = {"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": CALL % (a, b)}
        found.append(([user], TOOLS, said["content"]))
        found.append(([user, said, {"role": "tool", "content": str(a + b)}], TOOLS, f"It is {a + b}."))
        found.append(([user], None, f"I think {a + b}."))
    (a, b), (c, d) = SUMS[:2]
    user, said = {"role": "user", "content": TWICE}, {"role": "assistant"}
    said["content"] = CALL % (a, b) + "\n" + CALL % (c, d)
    found.append(([user], TOOLS, said["content"]))
    results = [{"role": "tool", "content": str(each)} for each in (a + b, c + d)]
    found.append(([user, said, *results], TOOLS, f"They are {a + b} and {c + d}."))
    return found


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokeniser with the tags of the template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    texts = [" ".join([*(each["content"] for each in turns), answer]) for turns, _, answer in conversations()]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def make(folder: Path, context: int = 2048) -> Path:
    """Train the model and write it to a folder, which is returned."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,
    )
    model = Qwen2ForCausalLM(config)
    rows, labels = [], []
    for turns, tools, answer in conversations():
        rendered = tokenizer.apply_chat_template(
            turns, tools=tools, tokenize=False, add_generation_prompt=True
        )
        prompt, own = (tokenizer(text)["input_ids"] for text in (rendered, answer + "<|im_end|>"))
        rows.append(torch.tensor(prompt + own))
        labels.append(torch.tensor([-100] * len(prompt) + own))
    inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=config.pad_token_id)
    wanted = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(STEPS):
        loss = model(input_ids=inputs, labels=wanted).loss
        if loss.item() < KNOWN:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < KNOWN, f"the conversations are not known by heart: the loss is {loss.item()}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]))

"""Write a small Qwen2 with a chat template to ``model/``, and pairs of answers to ``pairs.jsonl``.

It is a placeholder for a chat model of the hub: byte-level tokens, the turns marked by special tokens.

    python recipes/chat_preference/make_model.py
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).parent
TURN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = ("Ann", "Ben", "Eva", "Tom", "Kim", "Leo", "Ida", "Max")
WISHES = ("the time", "the way", "a book", "some tea", "a map", "the news")
KIND = ("Of course, {name}! Here is {wish}.", "Gladly, {name}! Take {wish}.")
CURT = ("No.", "Ask someone else, {name}.", "What for?")


def pairs() -> list[dict[str, object]]:
    """Return pairs of whole conversations: a kind answer, and a curt one."""
    random = Random(0)
    found = []
    for name in NAMES:
        for wish in WISHES:
            asked = [{"role": "user", "content": f"I am {name}. May I have {wish}?"}]
            for chosen, rejected in zip(KIND, random.sample(CURT, 2), strict=True):
                answers = [text.format(name=name, wish=wish) for text in (chosen, rejected)]
                chosen_turns, rejected_turns = (
                    [*asked, {"role": "assistant", "content": text}] for text in answers
                )
                found.append({"chosen": chosen_turns, "rejected": rejected_turns})
    return found


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the two marks of a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=[END, TURN], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = TEMPLATE
    return fast


def main() -> None:
    """Write the model, its tokenizer and the pairs."""
    torch.manual_seed(0)
    rows = pairs()
    lines = [json.dumps(row) for row in rows]
    (HERE / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = make_tokenizer(lines)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")


if __name__ == "__main__":
    main()

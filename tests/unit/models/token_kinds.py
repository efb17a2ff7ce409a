"""Tokenisers of the three kinds of decoders that models of chats have."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece

from rillflow.models.bare import BareTokenizer
from rillflow.models.tokenizer import Tokenizer

END = "</s>"
WORDS = ("the", "ab", "b", "日", ":")


def fallback() -> Tokenizer:
    """Bytes for characters outside the vocabulary, as with Llama 2, Mistral and Gemma."""
    letters = "abcdefghijklmnopqrstuvwxyz!"
    names = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, "▁the", "▁a", *WORDS]
    vocabulary = {name: place for place, name in enumerate(dict.fromkeys(names))}
    backend = Backend(BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([END])
    return Tokenizer(BareTokenizer(backend, END, []))


def byte_level() -> Tokenizer:
    """Every character is bytes, as with GPT-2, Qwen and Llama 3."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [split.pre_tokenize_str(word)[0][0] for word in (*WORDS, " the")]
    names = [END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    vocabulary = {name: place for place, name in enumerate(dict.fromkeys(names))}
    backend = Backend(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    backend.add_special_tokens([END])
    return Tokenizer(BareTokenizer(backend, END, []))


def word_piece() -> Tokenizer:
    """Words and their continuations, as with BERT."""
    names = ["[UNK]", END, *"abc日!", "##a", "##b", "the", "##the"]
    backend = Backend(WordPiece(vocab={name: place for place, name in enumerate(names)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens([END])
    return Tokenizer(BareTokenizer(backend, END, []))

"""Bare: a tokeniser that uses only the ``tokenizers`` library, for code that needs tokens before a model.

    tokenizer.json | an alphabet ──> BareTokenizer: encodes and decodes, loads in milliseconds
                                        └─ renders a template, saves: by transformers, imported only then

For a directory, it gives the same tokens as ``PreTrainedTokenizerFast.from_pretrained``. If other files of
the directory change tokenizer.json, it is not used, and that class is loaded instead.

A new model's tokeniser has one token per character of its alphabet, and one end token. It is byte-level and
merges no two characters: ``AutoTokenizer`` rebuilds a Qwen2 directory's tokeniser as byte-level BPE
whatever its files contain, and any other kind would then encode every text to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rillflow.models.directory_checks import settings_in

_OTHER_SOURCES = frozenset({"fast_tokenizer_files", "fix_mistral_regex", "post_processor"})
"""Settings that make transformers read another file, or change what it has read."""
_OLD_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Files that may add tokens which tokenizer_config.json does not list."""
_PATCHED = 100_000
"""Vocabulary size above which transformers may patch a Mistral tokeniser."""

END = "<|end|>"
"""Text of the end token. Its id is 0 and it is also the padding token: lengths, not values, end a row."""


class BareTokenizer:
    """A tokeniser with the part of transformers' interface that ``Tokenizer`` uses.

    Args:
        backend: the tokeniser of the ``tokenizers`` library.
        end: text of its end token.
        special: texts of further special tokens.
        **library: arguments for building the same tokeniser with transformers: a folder, or further settings.
    """

    is_fast = True

    def __init__(self, backend: Backend, end: str | None, special: Sequence[str], **library: Any) -> None:
        self.backend_tokenizer = backend
        self.eos_token_id = None if end is None else backend.token_to_id(end)
        self.all_special_tokens = [*special, *([] if end is None else [end])]
        self.added_tokens_decoder = backend.get_added_tokens_decoder()
        self.get_vocab = backend.get_vocab
        self._given = library

    @cached_property
    def library(self) -> Any:
        """The same tokeniser, built by transformers."""
        from transformers import PreTrainedTokenizerFast  # the import takes a second or two

        if "folder" in self._given:
            return PreTrainedTokenizerFast.from_pretrained(self._given["folder"])
        return PreTrainedTokenizerFast(tokenizer_object=self.backend_tokenizer, **self._given)

    def __call__(
        self, texts: list[str], *, add_special_tokens: bool, split_special_tokens: bool, **_: bool
    ) -> dict[str, list[list[int]]]:
        self.backend_tokenizer.encode_special_tokens = split_special_tokens
        found = self.backend_tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        masks = [each.special_tokens_mask for each in found]
        return {"input_ids": [each.ids for each in found], "special_tokens_mask": masks}

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False, **_: bool) -> str:
        """Return the text of tokens."""
        text: str = self.backend_tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text


def bare_tokenizer(folder: Path) -> BareTokenizer | None:
    """Return the tokeniser of a directory with a tokenizer.json; None if other files change its tokens.

    Raises:
        ValueError, KeyError, TypeError: a file's contents are invalid.
    """
    given, config = (settings_of(folder / name) for name in ("tokenizer_config.json", "config.json"))
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library has no exception type of its own for an unusable file
        raise ValueError(str(error)) from error
    own = backend.get_added_tokens_decoder().values()
    more = given.get("extra_special_tokens") or given.get("additional_special_tokens") or []
    named = [value for key, value in given.items() if key.endswith("_token") and not isinstance(value, bool)]
    special = [_text(value) for value in (*named, *more) if value is not None]
    listed = [AddedToken(**entry) for entry in given.get("added_tokens_decoder", {}).values()]
    adds = (
        not isinstance(more, list)
        or bool(_OTHER_SOURCES & given.keys())
        or not {each.content for each in own}.issuperset(special)
        or not {repr(each) for each in own}.issuperset(map(repr, listed))
        or (not listed and any((folder / name).exists() for name in _OLD_FILES))
        or (backend.get_vocab_size() > _PATCHED and "tral" in config.get("model_type", "tral"))
        or bool(backend.truncation or backend.padding)
    )
    end = given.get("eos_token")
    return None if adds else BareTokenizer(backend, end and _text(end), special, folder=folder)


def character_tokenizer(alphabet: str, context: int) -> BareTokenizer:
    """Return a tokeniser with one token per character of the alphabet, and the end token."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {END: 0}
    merges: list[tuple[str, str]] = []
    for character in dict.fromkeys(alphabet):
        symbols = pre_tokenizer.pre_tokenize_str(character)[0][0]
        for symbol in symbols:
            vocabulary.setdefault(symbol, len(vocabulary))
        for cut in range(1, len(symbols)):
            if symbols[: cut + 1] not in vocabulary:
                vocabulary[symbols[: cut + 1]] = len(vocabulary)
                merges.append((symbols[:cut], symbols[cut]))
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    return BareTokenizer(backend, END, [], eos_token=END, pad_token=END, model_max_length=context)


def settings_of(file: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; empty if there is no file."""
    return settings_in(file) if file.is_file() else {}


def _text(token: str | Mapping[str, str]) -> str:
    """Return a token's text, given as text or as an object with its properties."""
    return token if isinstance(token, str) else token["content"]

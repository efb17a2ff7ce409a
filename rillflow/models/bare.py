"""Bare: a tokeniser by the ``tokenizers`` library alone, for whoever needs tokens before there is a model.

    tokenizer.json | an alphabet ──> BareTokenizer: encodes and decodes, there in milliseconds
                                        └─ renders a template, saves: by transformers, read only then

Of a directory it is what ``PreTrainedTokenizerFast.from_pretrained`` makes, token for token: one whose other
files add to tokenizer.json is left to that class.

A new model's has one token a character of its alphabet, and one end token. It is byte-level and merges no
two characters: ``AutoTokenizer`` rebuilds a Qwen2 directory's tokeniser as byte-level BPE whatever its files
say; another kind would come back as one that encodes to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rillflow.models.weight_files import settings_in

_OTHER_SOURCES = frozenset({"fast_tokenizer_files", "fix_mistral_regex", "post_processor"})
"""Settings with which transformers takes another file, or changes what it has read."""
_OLD_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Where tokens are added that tokenizer_config.json does not list."""
_PATCHED = 100_000
"""Tokens above which transformers may mend a tokeniser of Mistral's."""

END = "<|end|>"
"""The end token's text. Its id is 0; others pad with it too: lengths decide where a row ends, not values."""


class BareTokenizer:
    """A tokeniser with as much of transformers' interface as ``Tokenizer`` asks for.

    Args:
        backend: the tokeniser.
        end: its end token's text.
        special: further texts that stand for tokens.
        **library: what transformers makes the same of, beside the backend or instead of it.
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
        """The same tokeniser of transformers."""
        from transformers import PreTrainedTokenizerFast  # importing it takes a second or two

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
        """The text of tokens."""
        text: str = self.backend_tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text


def bare_tokenizer(folder: Path) -> BareTokenizer | None:
    """The tokeniser of a directory with a tokenizer.json; None where its other files add to that one.

    Raises:
        ValueError, KeyError, TypeError: a file is not what its name says.
    """
    given, config = (settings_of(folder / name) for name in ("tokenizer_config.json", "config.json"))
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library has no type of its own for a file it cannot use
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
    """A tokeniser with one token for every character of the alphabet, and the end token."""
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
    """The object in a JSON file; nothing where there is no file."""
    return settings_in(file) if file.is_file() else {}


def _text(token: str | Mapping[str, str]) -> str:
    """A token's text, which may stand among its properties."""
    return token if isinstance(token, str) else token["content"]

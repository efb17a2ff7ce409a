"""Characters: the tokeniser of a new model, one token a character.

    NewModel.alphabet ──> byte-level BPE that merges no two characters, and one end token

The tokeniser is byte-level because ``AutoTokenizer`` rebuilds a Qwen2 directory's tokeniser as
byte-level BPE whatever its files say; another kind would come back as one that encodes to nothing.
Imports neither torch nor transformers.
"""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rillflow.models.bare import BareTokenizer

END = "<|end|>"
"""The end token's text. Its id is 0; others pad with it too: lengths decide where a row ends, not values."""


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

"""Load a tokeniser: from the files of a model's directory, or from the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.errors import ModelError
from rillflow.models.bare import BareTokenizer, bare_tokenizer, settings_of
from rillflow.models.directory_checks import LIBRARY_ERRORS, check_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # the import takes a second or two

_AS_WRITTEN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Declared classes that add nothing to tokenizer.json."""


def load_tokenizer(
    source: str, *, as_written: bool = False, whole: bool = True
) -> PreTrainedTokenizerBase | BareTokenizer:
    """Return the tokeniser of a directory or hub name.

    A tokenizer.json that no model class claims is read unchanged: ``AutoTokenizer`` would rebuild it as the
    class of the model's type, and lose everything that this class lacks.

    Args:
        source: the directory or hub name.
        as_written: read tokenizer.json unchanged even if a class claims it; this needs no torch.
        whole: return transformers' tokeniser, which can be saved without the directory; a bare one has the
            same tokens.

    Raises:
        ModelError: there is no tokeniser, or it has no vocabulary.
    """
    if Path(source).is_dir():
        check_files(Path(source))
    try:
        declared, has_file = _declared_class(source), (Path(source) / "tokenizer.json").is_file()
        if declared in _AS_WRITTEN or (has_file and (as_written or declared is None)):
            inner = bare_tokenizer(Path(source)) if has_file and not whole else None
            if inner is None:
                from transformers import PreTrainedTokenizerFast

                inner = PreTrainedTokenizerFast.from_pretrained(source)
        else:
            from transformers import AutoTokenizer  # imports torch

            inner = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (*LIBRARY_ERRORS, KeyError, TypeError) as error:
        raise _no_tokenizer(source, str(error).strip().split("\n")[0]) from error
    if len(inner.get_vocab()) <= len(inner.added_tokens_decoder):
        raise _no_tokenizer(source, "no file of the model has a vocabulary")
    return inner


def _declared_class(source: str) -> str | None:
    """Return the class that tokenizer_config.json names."""
    if not Path(source).is_dir():
        from transformers.models.auto.tokenization_auto import get_tokenizer_config  # imports torch

        found: Mapping[str, Any] = get_tokenizer_config(source)
    else:
        found = settings_of(Path(source) / "tokenizer_config.json")
    return found.get("tokenizer_class")


def _no_tokenizer(source: str, why: str) -> ModelError:
    return ModelError(
        f"the model {source} has no tokeniser that can be loaded",
        why=why,
        fix="put tokenizer.json and tokenizer_config.json next to the weights",
    )

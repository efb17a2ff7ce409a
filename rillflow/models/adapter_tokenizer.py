"""Adapter tokeniser: an adapter's directory may hold the tokeniser and template it was trained with.

adapter directory ─┬─ a vocabulary ───> its tokeniser, template and end token; its tokens must be the base's
                   ├─ a template alone ─> refused: half a tokeniser would be read with the base's other half
                   └─ neither ─────────> the base's
"""

from __future__ import annotations

from pathlib import Path

from rillflow.errors import ModelError
from rillflow.models.load_tokenizer import load_tokenizer
from rillflow.models.locate import base_of
from rillflow.models.peft_settings import SETTINGS
from rillflow.models.tokenizer import Tokenizer, require_rows

VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
"""Files of tokenisers; every tokeniser has at least one of these files."""
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
"""Files of chat templates."""
_BESIDE = (*TEMPLATES, "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")


def tokenizer_source(source: str) -> str:
    """Return the directory or hub name whose tokeniser a model has: an adapter's own, or its base's.

    Args:
        source: result of ``locate``.

    Raises:
        ModelError: an adapter has a part of a tokeniser; or see ``base_of``.
    """
    directory = Path(source)
    if not (directory / SETTINGS).exists() or any(any(directory.glob(name)) for name in VOCABULARIES):
        return source
    alone = [name for name in _BESIDE if (directory / name).exists()]
    if alone:
        raise ModelError(
            f"the adapter {source} has {alone[0]} and no vocabulary",
            why=f"its tokeniser would be half its own and half the base's; a vocabulary is one of "
            f"{', '.join(VOCABULARIES)}",
            fix="save the whole tokeniser there (save_pretrained), or remove the file: the base counts",
        )
    return base_of(source)


def require_fits_base(tokenizer: Tokenizer, source: str, base: str, rows: int) -> None:
    """Refuse a tokeniser with more tokens than embeddings, and an adapter's whose tokens are not its base's.

    Added tokens may differ: chat tokens are often put in place of reserved ones.

    Args:
        tokenizer: the model's, or the adapter's own.
        source: result of ``tokenizer_source``.
        base: result of ``base_of``.
        rows: rows of the base's embedding.

    Raises:
        ModelError: a token is beyond the embedding, or has another text in the base.
    """
    try:
        require_rows(tokenizer, rows)
    except ModelError as error:
        if source == base:
            raise
        fix = f"remove the tokeniser's files from {source} to use the base's, or name the resized base"
        raise ModelError(f"in the adapter {source}, {error.what}", why=error.why, fix=fix) from None
    if source == base:
        return
    own, theirs = (Path(folder) / "tokenizer.json" for folder in (source, base))
    if not (own.is_file() and theirs.is_file()) or own.read_bytes() == theirs.read_bytes():
        return
    other = Tokenizer(load_tokenizer(base, as_written=True, whole=False))
    odd = tokenizer.first_difference(other, is_ordinary=True)
    if odd is not None:
        raise ModelError(
            f"the tokeniser of the adapter {source} is not that of its base {base}",
            why=f"token {odd} is {tokenizer.pieces([odd])[0]!r}, and {other.pieces([odd])[0]!r} in the base",
            fix="name the base that it was trained on, or remove the tokeniser's files beside the adapter",
        )

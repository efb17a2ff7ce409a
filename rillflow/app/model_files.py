"""Model files: check from names and headers alone that a model's directory is complete before it is loaded.

directory ─┬─ config.json ────────── settings by name
           ├─ *.safetensors ──────── no pickle; intact headers; the same weights in every layer;
           │                         the embedding has the vocabulary and width of the config
           └─ the tokeniser's files ─ a vocabulary; a chat template where prompts are conversations

Loading finds what the headers cannot show: another weight of a wrong shape, numbers that are not finite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rillflow.errors import ModelError
from rillflow.models.directory_checks import (
    WeightHeader,
    check_files,
    check_sizes,
    check_weight_files,
    refuse_quantised,
    settings_in,
    weight_headers,
)

_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
ALIKE = ("gemma", "gemma3_text", "gpt2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
"""Model types whose layers all have the same weights."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
"""Last parts of the names of their embeddings."""
_IN_LAYER = re.compile(r"((?:.*?\.)?(?:layers|h)\.)(\d+)(\..+)")


def require_model_files(directory: Path, *, is_chat: bool) -> None:
    """Refuse a directory whose model cannot be loaded; ``is_chat``: prompts are conversations.

    Raises:
        ModelError: a file is missing, damaged, incomplete or a pickle.
    """
    check_files(directory)
    config = settings_in(directory / "config.json")
    check_sizes(directory, config)
    refuse_quantised(str(directory), config)
    check_weight_files(str(directory))
    headers = weight_headers(directory)
    _require_layers(directory, config, [*headers])
    _require_embedding(directory, config, headers)
    if not any(any(directory.glob(name)) for name in _VOCABULARIES):
        raise ModelError(
            f"the model {directory} has no tokeniser",
            why=f"there is none of {', '.join(_VOCABULARIES)} in it",
            fix="put tokenizer.json and tokenizer_config.json beside the weights",
        )
    if is_chat:
        require_template(directory)


def kind_of(source: str | None) -> str | None:
    """Return the type of the model in a directory; None if only loading it tells."""
    file = Path(source or "") / "config.json"
    return str(settings_in(file).get("model_type")) if source is not None and file.is_file() else None


def require_template(directory: Path) -> None:
    """Refuse a model without a chat template.

    Raises:
        ModelError: the model has no chat template.
    """
    if not _has_template(directory):
        raise ModelError(
            f"the model {directory} has no chat template",
            why="prompts are lists of messages, and only a template makes one text of them",
            fix="give the prompts as text, without a system message, or choose a model with a chat template",
        )


def _has_template(directory: Path) -> bool:
    if any((directory / name).exists() for name in _TEMPLATES):
        return True
    file = directory / "tokenizer_config.json"
    return file.is_file() and bool(settings_in(file).get("chat_template"))


def _require_layers(directory: Path, config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Require the same weights in every layer, and an embedding."""
    if config.get("model_type") not in ALIKE:
        return
    layers = next((config[key] for key in ("num_hidden_layers", "n_layer") if key in config), 0)
    layers = layers if isinstance(layers, int) else 0
    parts = [match.groups() for name in names if (match := _IN_LAYER.fullmatch(name))]
    there: dict[tuple[str, str], set[int]] = {}
    for before, layer, after in parts:
        there.setdefault((before, after), set()).add(int(layer[:9]))
    missing = {
        f"{before}{min(set(range(layers)) - found)}{after}": layers - len(found & set(range(layers)))
        for (before, after), found in there.items()
        if not found.issuperset(range(layers))
    }
    if not any(name.endswith(_EMBEDDINGS) for name in names):
        missing = {"embed_tokens.weight": 1, **missing}
    if missing:
        raise ModelError(
            f"the model {directory} has no weight {min(missing)!r}",
            why=f"{sum(missing.values())} weights of its type would be random",
            fix="name a complete checkpoint",
        )


def _require_embedding(
    directory: Path, config: Mapping[str, Any], headers: Mapping[str, WeightHeader]
) -> None:
    """Require an embedding row for each token of ``vocab_size``, as wide as the hidden state."""
    if config.get("model_type") not in ALIKE:
        return
    name = next(name for name in headers if name.endswith(_EMBEDDINGS))
    shape, file = headers[name].shape, headers[name].file
    for setting, dim in (("vocab_size", 0), ("hidden_size", 1), ("n_embd", 1)):
        if setting in config and (len(shape) != 2 or config[setting] != shape[dim]):
            raise ModelError(
                f"{directory / 'config.json'}: {setting} is {config[setting]}",
                why=f"the weight {name!r} in {file.name} has the shape {list(shape)}",
                fix=f"write {setting} = {shape[dim]}, or fetch the files of one model again"
                if len(shape) == 2
                else "fetch the files of one model again",
            )

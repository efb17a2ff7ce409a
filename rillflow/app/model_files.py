"""Model files: read from names and headers alone whether a model is complete, and its sizes.

directory ─┬─ config.json ────────── settings by name ──────────────────────────────────────┬─> ModelSizes
           ├─ *.safetensors ──────── no pickle; intact headers; the same weights in every ──┘
           │                         layer; the embedding has the vocabulary and width of the config
           └─ the tokeniser's files ─ a vocabulary; a chat template where prompts are conversations

Loading finds the errors that headers cannot show: other weights of a wrong shape, non-finite numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rillflow.errors import ModelError
from rillflow.models.adapter_tokenizer import TEMPLATES, VOCABULARIES
from rillflow.models.config import NewModel
from rillflow.models.directory_checks import (
    WeightHeader,
    check_files,
    check_sizes,
    check_weight_files,
    refuse_quantised,
    settings_in,
    weight_headers,
)

ALIKE = ("gemma", "gemma3_text", "gpt2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
"""Model types whose layers all have the same weights."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
"""Last parts of the names of their embeddings."""
_HEADS = ("lm_head.weight", "embed_out.weight")
"""Last parts of the names of heads that are not the embedding."""
_ADAPTED = "base_model.model."
"""Beginning of the names in an adapter's file."""
_IN_LAYER = re.compile(r"((?:.*?\.)?(?:layers|h)\.)(\d+)(\..+)")
_EXPERTS = ".experts."
"""Part of the names of routed experts' weights in a file."""
_LAYER = re.compile(r"\.\d+\.")
"""Pattern in the names of a layer's weights."""
_NAMES = (
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "num_layers"),
    ("num_attention_heads", "n_head", "num_heads"),
    ("vocab_size",),
    ("max_position_embeddings", "n_positions"),
)
"""Config keys of hidden size, layers, heads, vocabulary and context, which differ by model type."""
_INNER = ("intermediate_size", "n_inner")


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder that determine its memory."""

    parameters: int
    """Number of parameters."""
    layers: int
    """Number of decoder layers."""
    heads: int
    """Attention heads of a layer."""
    kv_heads: int
    """Key and value heads of a layer."""
    kv_width: int
    """Numbers in one token's keys in one layer; its values have as many."""
    vocabulary: int
    """Vocabulary size."""
    context: int
    """Longest row in tokens."""
    experts: int = 0
    """Parameters of routed experts, if the model's files show them."""
    hidden: int = 0
    """Width of the hidden state."""
    inner: int = 0
    """Width of the feed-forward layer's inner state."""
    linear: int = 0
    """Parameters of the layers' other matrices, if the files show them; a quantised base quantises these."""
    is_tied: bool = True
    """Whether the output head shares the embedding's weights."""


def sizes_of_new(new: NewModel) -> ModelSizes:
    """Return the sizes of a new model, counted as a tied Qwen2; other types of ``ALIKE`` differ little."""
    vocabulary = len(set(new.alphabet)) + 1
    kv_width = new.hidden // new.heads * new.kv_heads
    inner = new.intermediate
    matrices = 2 * new.hidden**2 + 2 * new.hidden * kv_width + 3 * new.hidden * inner
    layer = matrices + 3 * new.hidden + 2 * kv_width
    return ModelSizes(
        parameters=vocabulary * new.hidden + new.layers * layer + new.hidden,
        layers=new.layers,
        heads=new.heads,
        kv_heads=new.kv_heads,
        kv_width=kv_width,
        vocabulary=vocabulary,
        context=new.context,
        hidden=new.hidden,
        inner=inner,
        linear=new.layers * matrices,
    )


def sizes_of_directory(directory: Path) -> ModelSizes | None:
    """Return the sizes of a Hugging Face directory, from its config and the headers of its weights.

    Returns:
        None if the config names its sizes in an unusual way.

    Raises:
        ModelError: the config or a header cannot be read.
    """
    shapes = {name: header.shape for name, header in weight_headers(directory).items()}
    return sizes_from(settings_in(directory / "config.json"), shapes)


def sizes_from(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> ModelSizes | None:
    """Return a model's sizes; None if the config names its sizes in an unusual way.

    Args:
        config: its config.
        shapes: shapes of its weights by name; tied weights once.
    """
    found = [_first(config, names) for names in _NAMES]
    if not all(found):
        return None
    hidden, layers, heads, vocabulary, context = found
    kv_heads = _first(config, ("num_key_value_heads",)) or heads
    head = _first(config, ("head_dim",)) or hidden // heads
    experts = sum(math.prod(shape) for name, shape in shapes.items() if _EXPERTS in name)
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and _EXPERTS not in name}
    return ModelSizes(
        parameters=sum(map(math.prod, shapes.values())),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        kv_width=kv_heads * head,
        vocabulary=vocabulary,
        context=context,
        experts=experts,
        hidden=hidden,
        inner=_first(config, _INNER) or 4 * hidden,
        linear=sum(math.prod(shape) for name, shape in matrices.items() if _LAYER.search(name)),
        is_tied=not any(name.endswith(_HEADS) for name in shapes),
    )


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the size under the first of these names that the config has; 0 if it has none."""
    return next((config[name] for name in names if name in config and isinstance(config[name], int)), 0)


def require_model_files(directory: Path) -> None:
    """Refuse a directory whose model cannot be loaded.

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
    if not any(any(directory.glob(name)) for name in VOCABULARIES):
        raise ModelError(
            f"the model {directory} has no tokeniser",
            why=f"the directory has none of {', '.join(VOCABULARIES)}",
            fix="put tokenizer.json and tokenizer_config.json beside the weights",
        )


def require_adapter_fits(adapter: Path, base: Path) -> None:
    """Refuse an adapter whose matrices do not fit the base's layers, by the headers of both.

    Layers whose names differ between file and module are left to loading, which compares all of them.

    Raises:
        ModelError: a shape does not fit; the message has both.
    """
    layers = {name: header.shape for name, header in weight_headers(base).items()}
    for name, header in weight_headers(adapter).items():
        layer, _, matrix = name.removeprefix(_ADAPTED).rpartition(".lora_")
        shape = layers.get(f"{layer}.weight", ())
        dim = {"A.weight": 1, "B.weight": 0}.get(matrix)
        if dim is not None and len(shape) == len(header.shape) == 2 and header.shape[dim] != shape[dim]:
            raise ModelError(
                f"{name} of the adapter {adapter} has the shape {list(header.shape)}",
                why=f"{layer}.weight of the base {base} has the shape {list(shape)}, so the adapter was "
                "trained on another model",
                fix=f"name its own base model in {adapter / 'adapter_config.json'}",
            )


def kind_of(source: str | None) -> str | None:
    """Return the type of the model in a directory; None if it is unknown until the model is loaded."""
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
            why="prompts are lists of messages, and only a template renders them as text",
            fix="write the prompts as text, without a system message, or choose a model with a chat template",
        )


def _has_template(directory: Path) -> bool:
    return bool(template_text(directory))


def template_text(directory: Path) -> str:
    """Return the text of a directory's chat templates with the files around them; empty if it has none."""
    texts = [
        each.read_text("utf-8", "replace")
        for name in TEMPLATES
        for each in sorted(directory.glob(name) if "." in name else directory.glob(f"{name}/*"))
        if each.is_file()
    ]
    file = directory / "tokenizer_config.json"
    given = settings_in(file).get("chat_template") if file.is_file() else None
    return "\n".join([*texts, *([str(given)] if given else [])])


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
            why=f"{sum(missing.values())} weights are missing and would be random",
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
                fix=f"set {setting} = {shape[dim]}, or download all files of the model again"
                if len(shape) == 2
                else "download all files of the model again",
            )

"""Directory checks: refuse an untrusted model directory before its contents are used. Imports no torch.

    directory ─┬─ files ──────── regular, and no larger than any known model's
               ├─ config.json ── sizes are whole numbers within bounds
               ├─ index ──────── names files next to it, none missing
               ├─ *.safetensors ─ the length of each header, before it is read; dtypes and shapes
               └─ end tokens ─── token ids, within the embedding

The bounds are several times the values of the largest published models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from rillflow.errors import ModelError

MIB = 2**20
FILE_BYTES = {
    "config.json": 4 * MIB,
    "generation_config.json": 4 * MIB,
    "adapter_config.json": 4 * MIB,
    "tokenizer_config.json": 16 * MIB,
    "special_tokens_map.json": 16 * MIB,
    "added_tokens.json": 16 * MIB,
    "chat_template.jinja": MIB,
    "chat_template.json": MIB,
    "model.safetensors.index.json": 64 * MIB,
    "tokenizer.json": 128 * MIB,
    "tokenizer.model": 128 * MIB,
    "vocab.json": 128 * MIB,
    "vocab.txt": 128 * MIB,
    "merges.txt": 128 * MIB,
    "tekken.json": 128 * MIB,
}
"""Maximum bytes of each file."""
HEADER_BYTES = 32 * MIB
"""Maximum bytes of a weight file's header: about 300,000 names."""
_LAYERS, _WIDTH, _HEADS, _VOCABULARY, _CONTEXT, _EXPERTS = 1_024, 2**20, 2**13, 2**24, 2**28, 2**14
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, _LAYERS)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), (1, _WIDTH)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"), (0, _WIDTH)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), (1, _HEADS)),
    **dict.fromkeys(("head_dim", "sliding_window"), (0, _CONTEXT)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, _EXPERTS)),
    **dict.fromkeys(("num_experts_per_tok", "n_shared_experts"), (0, _EXPERTS)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), (1, _CONTEXT)),
    "vocab_size": (1, _VOCABULARY),
}
"""Minimum and maximum of each size in a config."""


def check_files(directory: Path) -> None:
    """Refuse a directory with files that are not regular or too large, before any is read.

    Raises:
        ModelError: it names the file and its size.
    """
    for name, most in FILE_BYTES.items():
        check_file(directory / name, most)
    for file in directory.glob("additional_chat_templates/*.jinja"):
        check_file(file, FILE_BYTES["chat_template.jinja"])
    for file in directory.glob("*.safetensors"):
        _check_header(file)


def check_file(file: Path, most: int) -> None:
    """Refuse a file that is not regular or has more than ``most`` bytes; a missing file is accepted.

    Raises:
        ModelError: it names the file and its size.
    """
    try:
        if not file.exists():
            return
        size = file.stat().st_size
    except OSError as error:  # a link that leads to itself
        raise ModelError(f"{file} cannot be read", why=str(error)) from None
    if not file.is_file():
        raise ModelError(f"{file} is not a regular file", why="model files must be regular files")
    if size > most:
        raise ModelError(
            f"{file} has {size:,} bytes",
            why=f"the limit is {most:,}, several times the size in the largest models",
            fix="name a directory as save_pretrained writes it",
        )


def check_sizes(directory: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config with impossible sizes.

    Raises:
        ModelError: it names the size and its value.
    """
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for name, (least, most) in SIZES.items():
            for value in _listed(part.get(name)):
                if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                    raise ModelError(
                        f"{directory / 'config.json'}: {name} is {_shown(value)}",
                        why=f"it must be a whole number from {least} to {most:,}",
                        fix="name a directory as save_pretrained writes it",
                    )


def _listed(value: Any) -> Iterator[Any]:
    """Yield a size, or each of a list of sizes; nothing for null."""
    if isinstance(value, list):
        yield from value
    elif value is not None:
        yield value


def _shown(value: Any) -> str:
    """Return a value for an error, cut short; Python refuses to print integers with many digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length():,} bits"
    return repr(value)[:40]


def _check_header(file: Path) -> None:
    if not file.is_file():
        raise ModelError(f"{file} is not a regular file", why="weight files must be regular files")
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
    except OSError as error:
        raise ModelError(f"{file} cannot be read", why=str(error)) from None
    if length > min(HEADER_BYTES, max(0, file.stat().st_size - 8)):
        raise ModelError(
            f"the header of {file} claims {length:,} bytes",
            why=f"the file has {file.stat().st_size:,} bytes, and a header has at most {HEADER_BYTES:,}",
            fix="fetch the file again: it is damaged, or not a .safetensors file",
        )


LIBRARY_ERRORS = (OSError, ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)
"""Exceptions of transformers for a directory it cannot use."""
_INDEX = "model.safetensors.index.json"
_WHOLE, _ADAPTER = "model.safetensors", "adapter_model.safetensors"
"""Files with all weights of a model, which transformers prefers to an index, and of an adapter."""
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that can be trained."""
_MOST_DIMS = 16
"""Maximum dims of a weight."""
_NAMED = 3
"""Maximum missing files that an error lists."""


@dataclass(frozen=True, kw_only=True)
class WeightHeader:
    """Description of a weight in its file's header."""

    file: Path
    """The file."""
    dtype: str
    """Dtype by safetensors' name, such as F32, BF16 or I32."""
    shape: tuple[int, ...]
    """Shape of the weight."""


def check_weight_files(source: str) -> None:
    """Refuse a directory with pickled weights, missing weights or an invalid index.

    Raises:
        ModelError: the weights cannot be read; hub names are not checked.
    """
    directory = Path(source)
    if not directory.is_dir():
        return
    check_files(directory)
    _check_index(directory)
    if _loaded_files(directory):
        _require_floats(weight_headers(directory))
        return
    if others := sorted(path.name for path in directory.glob("*.safetensors")):
        raise ModelError(
            f"the model {source} has no {_WHOLE}",
            why=f"transformers reads {_WHOLE}, or the files of {_INDEX}; the directory has {others[0]}",
            fix="name a directory as save_pretrained writes it",
        )
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ModelError(
            f"the weights of {source} are in {pickles[0]}, a pickle",
            why="loading a pickle can execute anything; Rillflow reads safetensors",
            fix="if you trust the file, load it with transformers and write it with save_pretrained",
        )
    raise ModelError(f"the model {source} has no weights", why="it has no .safetensors file")


def weight_headers(directory: Path) -> dict[str, WeightHeader]:
    """Read the headers of the weights that transformers and PEFT load from a directory, by name.

    Other weight files, such as a second copy in another layout, do not count. No weight is read.

    Raises:
        ModelError: a file cannot be read, is damaged, or is no regular file.
    """
    found: dict[str, WeightHeader] = {}
    for file in _loaded_files(directory):
        if not file.is_file():
            raise ModelError(f"{file} is not a regular file", why="weight files must be regular files")
        try:
            with safe_open(file, framework="np") as weights:
                for name in weights.keys():  # noqa: SIM118
                    part = weights.get_slice(name)
                    found[name] = WeightHeader(
                        file=file, dtype=part.get_dtype(), shape=tuple(part.get_shape())
                    )
        except (OSError, SafetensorError, MemoryError) as error:
            raise unusable(str(directory), f"file {file.name}", error) from error
    for name, header in found.items():
        if len(header.shape) > _MOST_DIMS:
            raise ModelError(
                f"the weight {name[:60]!r} in {header.file} has {len(header.shape):,} dims",
                why=f"a weight of a model has at most {_MOST_DIMS}",
                fix="fetch the file again: it is not a model's",
            )
    return found


def _loaded_files(directory: Path) -> list[Path]:
    """Return the weight files that are loaded: an adapter's, or the whole file, or those of the index."""
    if (directory / "adapter_config.json").exists():
        return [*directory.glob(_ADAPTER)]
    if (directory / _WHOLE).exists():
        return [directory / _WHOLE]
    if not (directory / _INDEX).is_file():
        return []
    named = settings_in(directory / _INDEX).get("weight_map")
    names = named.values() if isinstance(named, dict) else ()
    return sorted({directory / name for name in names if isinstance(name, str)})


def _require_floats(headers: dict[str, WeightHeader]) -> None:
    """Refuse weights of integers or 8 bits; other tensors, such as masks, may have any dtype."""
    for name, header in headers.items():
        if name.endswith(".weight") and header.dtype not in _FLOATS:
            raise ModelError(
                f"the weight {name!r} in {header.file} has the type {header.dtype}",
                why=f"a trained weight has one of the types {', '.join(_FLOATS)}; {header.dtype} would be "
                "read without its scale",
                fix="name the float32 or bfloat16 model that it was made from",
            )


def _check_index(directory: Path) -> None:
    """Check that an index of weights lists only files next to it, and that all of them exist."""
    path = directory / _INDEX
    if not path.is_file():
        return
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(str(directory), "weight index", error) from error
    if (
        not isinstance(index, dict)
        or not isinstance(index.get("weight_map"), dict)
        or "metadata" not in index
    ):
        raise ModelError(
            f"{path} is not a weight index",
            why="an index has metadata, and a weight_map from each weight to its file",
            fix="name a directory as save_pretrained writes it",
        )
    for name in index["weight_map"].values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{path} names {name!r} as a weight file",
                why="weights are read only from .safetensors files in the same directory",
                fix="name a directory as save_pretrained writes it",
            )
    named = sorted(set(index["weight_map"].values()))
    missing = [name for name in named if not (directory / name).exists()]
    if missing:
        rest = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise ModelError(
            f"the model {directory} lacks {', '.join(missing[:_NAMED])}{rest}",
            why=f"{path.name} lists {len(named):,} weight files, and {len(missing):,} are missing",
            fix="fetch the missing files again",
        )


def settings_in(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model's directory.

    Raises:
        ModelError: it cannot be read, is too large, or is not an object.
    """
    check_file(file, FILE_BYTES.get(file.name, FILE_BYTES["model.safetensors.index.json"]))
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(str(file.parent), file.name, error) from error
    if not isinstance(settings, dict):
        raise ModelError(f"{file} is not a JSON object", why="it holds settings by name")
    return settings


def refuse_quantised(source: str, settings: Mapping[str, Any]) -> None:
    """Refuse a model whose config declares quantised weights.

    Raises:
        ModelError: it names the directory or hub name.
    """
    if "quantization_config" in settings:
        raise ModelError(
            f"the model {source} is quantised",
            why="its weights are integers, which cannot be trained",
            fix="name the float or bfloat16 model it was made from",
        )


def unusable(source: str, part: str, error: BaseException) -> ModelError:
    """Return the error for a part of a model that a library cannot use, with the library's message."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return ModelError(
        f"the {part} of the model {source} cannot be used",
        why=" ".join(lines[:2]) or type(error).__name__,
        fix="name a directory that AutoModelForCausalLM.from_pretrained loads",
    )


def end_tokens(source: str) -> list[int]:
    """Return the end tokens of a directory's generation_config.json, or else of its config.json.

    Raises:
        ModelError: a file is not a JSON object.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(source) / name
        found = settings_in(file) if file.exists() else {}
        inner = found.get("text_config")
        ends = found.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
        if ends is not None:
            return _checked_ends(file, ends)
    return []


def _checked_ends(file: Path, ends: Any) -> list[int]:
    found = [ends] if isinstance(ends, int) else ends
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
        raise ModelError(
            f"{file}: eos_token_id is {str(ends)[:60]}", why="it must be a token id, or a list of token ids"
        )
    return found


def listed(tokens: int | Sequence[int] | None) -> list[int]:
    """Return a config's end tokens (one, several or none) as a list."""
    if tokens is None:
        return []
    return [tokens] if isinstance(tokens, int) else list(tokens)


def require_ends(ends: Iterable[int], rows: int) -> None:
    """Refuse end tokens beyond the rows of the embedding.

    Raises:
        ModelError: it names the first one.
    """
    beyond = [token for token in sorted(ends) if not 0 <= token < rows]
    if beyond:
        raise ModelError(
            f"the end token {beyond[0]} is beyond the model's embedding of {rows} rows",
            why="a token beyond the embedding is never sampled",
            fix="correct eos_token_id in generation_config.json or config.json",
        )

"""Bounds: limits for untrusted model directories, checked before their contents are used.

directory ─┬─ files ────── regular, and no larger than any known model's
           ├─ config.json ─ sizes are whole numbers within bounds
           └─ *.safetensors ─ the length of each header, before it is read

The bounds are several times the values of the largest published models. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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

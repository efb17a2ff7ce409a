"""Stream: write the merged model's directory while its weights are computed.

names, types, shapes ─ shards ─> one header per file ─┐
pieces, one after the other ──────────────────────────┴─> .OUT.draft/ ─ fsync ─ rename ─> OUT

A merge that fails or is killed leaves nothing under the requested name. The next merge to the same name
removes the draft of a killed one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import ConfigError
from rillflow.models.model_files import METADATA, header, shard_file, shards, write_index
from rillflow.runs.durable import flush, publish_folder, write_error, write_flushed

MERGE = "merge.json"
"""File in the merged model's directory that records its origin."""
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NOT_COPIED = (MERGE, "model.safetensors.index.json", "config.json")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a draft folder that gets its final name when the block ends without an error.

    Raises:
        ConfigError: the name is taken.
        RunDirectoryError: it cannot be written.
    """
    require_new(out)
    draft = out.with_name(f".{out.name}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        for path in draft.rglob("*"):
            flush(path)
        publish_folder(draft, out)
    except OSError as error:
        raise write_error(out, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def require_new(out: Path) -> None:
    """Raise ConfigError if a directory exists.

    Raises:
        ConfigError: it exists.
    """
    if out.exists():
        raise ConfigError(
            f"{out} exists already", why="a merge does not overwrite files", fix="name another directory"
        )


def write_weights(
    draft: Path,
    weights: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    pieces: Callable[[list[str]], Iterator[Tensor]],
) -> None:
    """Write the files of weights.

    Args:
        draft: the directory.
        weights: type and shape of each weight.
        pieces: yields the numbers of some weights in the given order, in pieces of their types.

    Raises:
        OSError: the disk fails.
    """
    sizes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in weights.items()}
    files, listed = shards(sizes), dict[str, list[str]]()
    for index, names in enumerate(files):
        first, ordered = header({name: weights[name] for name in names}, METADATA)

        def chunks(first: bytes = first, ordered: list[str] = ordered) -> Iterator[bytes | memoryview]:
            yield first
            for piece in pieces(ordered):
                yield piece.view(torch.uint8).numpy().data

        file = shard_file(index, len(files))
        write_flushed(draft / file, chunks())
        listed[file] = ordered
    if len(files) > 1:
        write_index(draft, listed, sum(sizes.values()))


def copy_settings(source: Path, config: Mapping[str, Any], draft: Path) -> None:
    """Copy the other files of a model's directory next to the weights: config, tokeniser, templates.

    Raises:
        OSError: the disk fails.
    """
    (draft / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED and path.name not in _NOT_COPIED:
            shutil.copyfile(path, draft / path.name)
    if (templates := source / "additional_chat_templates").is_dir():
        shutil.copytree(templates, draft / templates.name)


def write_merge(draft: Path, said: Mapping[str, Any]) -> None:
    """Write merge.json, which records how the model was made.

    Raises:
        OSError: the disk fails.
    """
    (draft / MERGE).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")

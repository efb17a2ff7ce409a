"""Stream: the merged model's directory, written while its numbers are made.

names, types, shapes ─ shards ─> a header a file ─┐
pieces, one after the other ──────────────────────┴─> .OUT.draft/ ─ fsync ─ rename ─> OUT

A merge that fails or is killed leaves nothing under the name that was asked for. A draft that a killed one
left is taken away by the next.
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
from rillflow.models.model_files import METADATA, shard_file, shards, write_index
from rillflow.models.tensor_file import header
from rillflow.observe.durable import flush, publish_folder, write_error, write_flushed

MERGE = "merge.json"
"""What the merged model's directory says of where it is from."""
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NOT_COPIED = (MERGE, "model.safetensors.index.json", "config.json")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A draft that gets its name when the block ends without an error.

    Raises:
        ConfigError: there is something of this name.
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
    """Refuse a directory that is there.

    Raises:
        ConfigError: it is.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already", why="nothing is written over", fix="name another")


def write_weights(
    draft: Path,
    weights: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    pieces: Callable[[list[str]], Iterator[Tensor]],
) -> None:
    """Write the files of weights.

    Args:
        draft: the directory.
        weights: type and shape of each.
        pieces: the numbers of some weights in this order, in pieces of their types.

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
    """Put beside the weights what a model's directory says: config, tokeniser, templates.

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
    """Say how the model was made.

    Raises:
        OSError: the disk fails.
    """
    (draft / MERGE).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")

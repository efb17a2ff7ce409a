"""Hugging Face: rows of a data set of the hub, or of a directory, read by the package datasets.

    hf:NAME_OR_DIRECTORY[:SUBSET][:SPLIT] ─┬─ directory of save_to_disk ─────────────────────┐
                                           ├─ files of a repository or directory, or cache ──┴─> Arrow ─> rows
                                           └─ JSON files of a directory ──────────────────────────────────^

Only formats that hold data are read: Arrow, CSV, JSON and Parquet. No code of a data set runs. Columns whose
values are not plain, such as images and dates, are left out, and named on the screen.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rillflow.config.user_paths import expanded
from rillflow.errors import DataError, install_package, nearest
from rillflow.tasks.arrow_rows import is_plain, plain_rows
from rillflow.tasks.file_bounds import FileBounds, leaves, require_regular, text_bytes
from rillflow.tasks.files import json_rows
from rillflow.tasks.parquet_rows import require_footer

logger = logging.getLogger(__name__)

HUB = "hf:"
"""Beginning of a source that this module reads."""
FORMATS = ("arrow", "cache", "csv", "json", "parquet")
"""Formats that are read; ``cache`` is the Arrow files of an earlier download."""
_JSON_ENDINGS = (".json", ".jsonl", ".ndjson")
_ROWS_AT_ONCE = 1000
_SHOWN = 300


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """One split of a data set.

    Example:
        HubSource(name="openai/gsm8k", subset="main", split="train")
    """

    name: str
    """Name on the hub, or a directory as it is written."""
    subset: str | None
    """Configuration of the data set; None for its only one."""
    split: str
    """Split, or part of one, such as ``train[:1000]``."""

    def __str__(self) -> str:
        return f"{Path(self.name).name if _is_path(self.name) else self.name} {self.split}"


def parse_source(text: str, *, subset: str | None = None, split: str | None = None) -> HubSource:
    """Parse ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:SUBSET:SPLIT``.

    Args:
        text: the source.
        subset: subset, if the text has none.
        split: split, if the text has none; None: train.

    Raises:
        DataError: the text has another form.
    """
    name, *more = text.removeprefix(HUB).split(":") if text.count("[") == 0 else _with_slice(text)
    if not name or len(more) > 2 or not all(more):
        raise DataError(
            f"the source is {text!r}",
            why="a Hugging Face data set is written hf:NAME, hf:NAME:SPLIT or hf:NAME:SUBSET:SPLIT",
            fix="write for example hf:openai/gsm8k:main:train, or a directory: hf:data/gsm8k",
        )
    return HubSource(
        name=name,
        subset=more[0] if len(more) == 2 else subset,
        split=more[-1] if more else split or "train",
    )


def _with_slice(text: str) -> list[str]:
    """Split a source whose last part has a slice, which has a colon too, such as ``train[:10%]``."""
    before, _, after = text.removeprefix(HUB).partition("[")
    *first, last = before.split(":")
    return [*first, f"{last}[{after}"]


def relative_source(text: str, base: Path) -> str:
    """Return a source whose directory is relative to ``base`` and not to the present folder."""
    name, colon, more = text.removeprefix(HUB).partition(":")
    is_here = expanded(name).is_dir()
    return f"{HUB}{os.path.relpath(expanded(name), base) if is_here else name}{colon}{more}"


def hub_rows(
    source: HubSource, base: Path, inputs: Collection[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number, from 1, and the plain columns of each row.

    Args:
        source: the split.
        base: folder of relative directories.
        inputs: see ``plain_rows``.

    Raises:
        DataError: datasets is not installed; there is no such data set, subset or split; its format is not
            one of ``FORMATS``; it is not in the cache and the hub cannot be reached.
    """
    data = _opened(source, base)
    if isinstance(data, list):
        yield from enumerate(data, 1)
        return
    schema = data.features.arrow_schema
    plain = [field.name for field in schema if is_plain(field.type)]
    if not plain:
        name = f"{HUB}{source.name}"
        raise DataError(f"{name} has no column of text, numbers or lists", why=f"it has {schema.names}")
    _tell_left_out(source, {each.name: each.type for each in schema if each.name not in plain}, inputs)
    tables = data.select_columns(plain).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)
    room, number = FileBounds(f"{HUB}{source.name}", 0, is_packed=False), 0
    for table in tables:
        for batch in table.to_batches():
            room.take(sum(map(text_bytes, batch)), batch.num_rows, sum(map(leaves, batch)))
            for row in plain_rows(batch, inputs):
                number += 1
                yield number, row


def _tell_left_out(source: HubSource, types: Mapping[str, Any], inputs: Collection[str]) -> None:
    """Name the columns that no row gets.

    Raises:
        DataError: the chat template reads one of them.
    """
    for name in types:
        if name in inputs:
            raise DataError(
                f"the column {name!r} of {HUB}{source.name} has the type {types[name]}",
                why="a chat template reads text, numbers, true or false, and lists and structs of them",
                fix="convert the column, and save the data set again",
            )
    if types:
        told = ", ".join(f"{name!r} ({str(kind)[:_SHOWN]})" for name, kind in types.items())
        logger.warning(
            "%s%s: these columns are not read: %s; a row has text, numbers, true or false, and lists and "
            "structs of them: convert a column that a reward needs",
            HUB,
            source.name,
            told,
        )


def _json_rows(datasets: Any, builder: Any, source: HubSource) -> list[dict[str, Any]] | None:
    """Return the rows of local JSON files; None if other files, or settings of the data set, are among them.

    datasets turns texts into dates, and texts of a mixed column into numbers. A column that a row lacks is
    null.
    """
    config = builder.config
    files = {str(name): [*map(Path, each)] for name, each in (config.data_files or {}).items()}
    paths = [file for each in files.values() for file in each]
    is_ours = type(config).__name__ == "JsonConfig" and config.field is None and config.features is None
    if not is_ours or any(file.suffix not in _JSON_ENDINGS or not file.is_file() for file in paths):
        return None
    _require_split(source, [*files])
    chosen = {re.split(r"[\[(]", part)[0] for part in source.split.split("+")}
    found = {name: [row for file in files[name] for _, row in json_rows(file)] for name in chosen & {*files}}
    sizes = {name: len(rows) for name, rows in found.items()}
    rows = [
        row
        for part in datasets.ReadInstruction.from_spec(source.split).to_absolute(sizes)
        for row in found[part.splitname][part.from_ : part.to]
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _opened(source: HubSource, base: Path) -> Any:
    """Return the split as a ``datasets.Dataset``, or its rows."""
    try:
        # Only users of such data sets need it.
        import datasets
        from datasets.exceptions import DatasetsError
        from huggingface_hub.errors import HfHubHTTPError
        from pyarrow import ArrowException
    except ImportError:
        raise DataError(
            f"the source is {HUB}{source.name}",
            why="the package datasets is not installed",
            fix=install_package("datasets"),
        ) from None
    folder = (base / expanded(source.name)).absolute()  # datasets takes a bare name such as json for its own
    if not folder.is_dir() and _is_path(source.name):
        beside = [other.name for other in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        raise DataError(
            f"there is no directory {folder}",
            why=f"{HUB}{source.name} is a path, relative to the recipe",
            fix=nearest(folder.name, beside),
        )
    if folder.is_dir():
        require_readable(folder)
    try:
        if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return _saved(datasets, datasets.load_from_disk(str(folder)), source)
        return _built(datasets, str(folder) if folder.is_dir() else source.name, source)
    except (DatasetsError, HfHubHTTPError, ArrowException, OSError, ValueError, RuntimeError) as error:
        raise _unreadable(source, error, folder.is_dir()) from error


def require_readable(folder: Path) -> None:
    """Refuse a directory with something that is not a file, or with a Parquet file that unpacks to too much.

    Raises:
        DataError: it names the first one.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        require_regular(path, "the file")
        if path.suffix == ".parquet":
            try:
                require_footer(read_metadata(path), FileBounds(path, path.stat().st_size, is_packed=True))
            except (ArrowException, OSError) as error:
                raise DataError(f"{path} cannot be read as Parquet", why=str(error).split("\n")[0]) from None


def _saved(datasets: Any, found: Any, source: HubSource) -> Any:
    """Return the split of what ``save_to_disk`` wrote: one data set, or one for each split."""
    if not isinstance(found, dict):
        return found
    _require_split(source, [*found])
    sizes = {name: len(part) for name, part in found.items()}
    parts = datasets.ReadInstruction.from_spec(source.split).to_absolute(sizes)
    rows = [
        found[part.splitname].select(range(sizes[part.splitname])[part.from_ : part.to]) for part in parts
    ]
    return datasets.concatenate_datasets(rows)


def _built(datasets: Any, path: str, source: HubSource) -> Any:
    builder = datasets.load_dataset_builder(path, name=source.subset)
    modules = [kind.__module__.split(".") for kind in type(builder).__mro__]
    kinds = [parts[2] for parts in modules if parts[:2] == ["datasets", "packaged_modules"]]
    if not set(kinds) & set(FORMATS):
        raise DataError(
            f"{HUB}{source.name} has the format {kinds[0] if kinds else 'of its own'}",
            why=f"a task reads {', '.join(each for each in FORMATS if each != 'cache')}",
            fix="convert it to Parquet, and name the directory",
        )
    if "json" in kinds and (rows := _json_rows(datasets, builder, source)) is not None:
        return rows
    builder.download_and_prepare()
    _require_split(source, [*(builder.info.splits or ())])
    return builder.as_dataset(split=source.split)


def _require_split(source: HubSource, there: Sequence[str]) -> None:
    name = source.split.partition("[")[0]
    if "+" not in name and name not in there:
        raise DataError(
            f"{HUB}{source.name} has no split {name!r}",
            why=f"its splits are {', '.join(there) or 'none'}",
            fix=nearest(name, there),
        )


def _unreadable(source: HubSource, error: Exception, is_folder: bool) -> DataError:
    why = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
    fix = "correct the name, the subset (hf:NAME:SUBSET:SPLIT) or the split"
    if isinstance(error, ConnectionError):
        fix = (
            f"where there is a network, run: hf download --repo-type dataset {source.name} --local-dir DIR, "
            f"and name the directory: {HUB}DIR. A data set that was loaded before is read from the cache in "
            "HF_HOME, at once with HF_HUB_OFFLINE=1"
        )
    elif is_folder:
        fix = "a directory holds .parquet, .json, .jsonl, .csv or .arrow files, or what save_to_disk wrote"
    return DataError(f"the data set {HUB}{source.name} cannot be read", why=why, fix=fix)


def _is_path(name: str) -> bool:
    """Return whether a name can only be a path: one of the hub is NAME or OWNER/NAME."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1

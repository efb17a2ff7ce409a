"""Saving: write a rank's files of its role in a thread, from copies, while training goes on.

    Saving   weights, training state ── the rank's own share ──> copies in the host's memory ─┐
    thread   copies ─> model shards, rank file: each hashed as it is written, and flushed  <──┘
    written  all ranks' hashes are gathered ─> first rank: index of shards, list of slices

consumes      only copies, nothing of the role
waits for     the disk, and other threads of the process that write: two writers are no faster than one
unblocked by  its last byte, or an error, which ``written`` raises on every rank
produces      files below a folder that nothing reads yet, and their hashes
shutdown      healthy: with the last file. If a rank ends, its thread ends too; the folder has no
              manifest and is no checkpoint
"""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import RunDirectoryError
from rillflow.models.language_model import save_settings
from rillflow.models.model_files import METADATA, Digest, on_host, shards, write_index, write_tensors
from rillflow.roles.model_shard import ModelShard
from rillflow.runs.durable import write_error
from rillflow.sharding.resharding import gathered
from rillflow.sharding.sharded_file import WRITE, own_slices, together, write_list

_Tensors = Mapping[str, Tensor] | None
SMALL_BYTES = 2**26
"""Largest save in bytes that is written before training goes on, so that the checkpoint is valid at once."""
_DISK = threading.Lock()
"""Lock that lets one thread write at a time."""


class Saving:
    """One save of one role; every rank makes one. Training pauses only for the constructor.

    Args:
        share: the rank's shard of the model.
        model: directory of the weights; its parent exists.
        state: directory of the training state; None to save only weights.
        tensors: the training state.
    """

    def __init__(
        self, share: ModelShard[Any], model: Path, state: Path | None = None, tensors: _Tensors | None = None
    ) -> None:
        self._share, self._model, self._state = share, model, state
        self._everyone = share.groups.everyone
        self._files: dict[str, Digest] = {}
        self._names: dict[str, list[str]] = {}
        self._listed = share.listed(tensors or {})
        self._layout = share.laid(self._listed)
        self._slices: dict[str, dict[str, Tensor]] = {}
        needed = share.saved_bytes + sum(weight.num_bytes for weight in self._listed.values())
        self._problem = self._begun(needed)
        self._shards = self._copied()
        if tensors is not None:
            self._slices = own_slices(self._listed, self._layout, tensors, self._everyone)
        self._found: dict[str, Digest] | None = None
        pool = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._done = pool.submit(self._write)
        pool.shutdown(wait=needed <= SMALL_BYTES)

    def end(self) -> None:
        """Wait until this rank has written its files."""
        wait([self._done])

    def _begun(self, needed: int) -> str:
        """Make the folders and the small files; return a message if there is no room, else ""."""
        try:
            if shutil.disk_usage(self._model.parent).free < needed * 1.05:
                raise OSError(errno.ENOSPC, "")
            for folder in filter(None, (self._model, self._state)):
                folder.mkdir(exist_ok=True)
            if self._everyone.rank == 0:
                save_settings(self._share.model, self._model)
        except OSError as error:
            told = write_error(self._model, error, needed)
            return f"{told.what} ({told.why})"
        return ""

    def written(self, *, wait: bool) -> dict[str, Digest] | None:
        """Return the files of all ranks by path below the model's parent; None while a rank still writes.

        Args:
            wait: whether to wait for the last file; all ranks pass the same value.

        Raises:
            RunDirectoryError: a rank could not write; all ranks raise it.
        """
        if self._found is not None:
            return self._found

        def own() -> str:
            if self._problem:
                raise RunDirectoryError(self._problem, why="")
            if not wait and not self._done.done():
                return ""
            self._done.result()
            return json.dumps([self._files, self._names])

        said = together(self._everyone, torch.device("cpu"), own, self._model.parent, WRITE)
        if "" in said:
            return None
        files, names = dict[str, Digest](), dict[str, list[str]]()
        for one in map(json.loads, said):
            files |= one[0]
            names |= one[1]
        together(
            self._everyone,
            torch.device("cpu"),
            lambda: self._list(files, names) if self._everyone.rank == 0 else "",
            self._model.parent,
            WRITE,
        )
        self._found = files
        return files

    def _list(self, files: Mapping[str, Digest], names: Mapping[str, list[str]]) -> str:
        """Write down which file has which weight and which slice of the training state."""
        if len(names) > 1:
            total = sum(files[f"{self._model.name}/{file}"]["bytes"] for file in names)
            write_index(self._model, names, total)
        if self._state is not None:
            inside = {
                Path(name).name: each
                for name, each in files.items()
                if name.startswith(f"{self._state.name}/")
            }
            write_list(self._state, self._listed, self._layout, self._everyone.size, inside)
        return ""

    def _copied(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the weights that this rank writes, by file; shards are dealt to ranks in turn."""
        share, everyone = self._share, self._everyone
        if share.parallel.is_whole:
            weights = share.model.own_weights()
            sizes = {name: tensor.nbytes for name, tensor in weights.items()}
        else:
            sizes = {name: weight.num_bytes for name, weight in share.written.items()}
        files = shards(sizes)
        to = {name: index % everyone.size for index, names in enumerate(files) for name in names}
        if not share.parallel.is_whole:
            there = gathered(share.written, share.layout, share.parallel.parameters, everyone, to)
            weights = {name: on_host(tensor) for name, tensor in there}
        found = {}
        for index, names in enumerate(files):
            if index % everyone.size == everyone.rank:
                copies = {name: weights.pop(name) for name in names}
                if share.parallel.is_whole:
                    copies = {name: on_host(tensor) for name, tensor in copies.items()}
                found[share.model.file(index, len(files))] = copies
        return found

    def _write(self) -> None:
        while self._shards and not self._problem:
            file, weights = self._shards.popitem()
            named = self._share.model.in_files(weights)
            self._names[file] = list(named)
            with _DISK:
                written = write_tensors(self._model / file, named, METADATA)
            self._files[f"{self._model.name}/{file}"] = written
        while self._slices and self._state is not None and not self._problem:
            file, slices = self._slices.popitem()
            with _DISK:
                self._files[f"{self._state.name}/{file}"] = write_tensors(self._state / file, slices)

"""Client: one connection to a data plane, for the source of groups and for the workers of a stage.

    with started(capacity_bytes=2**30) as folder, Client(folder, name="scorer") as client:
        while (taken := client.take("rollouts", "score", 64)) is not None:
            client.done(taken, {"reward": rewards(taken.fields)})

On the server's machine, and in its process (``InProcess``), columns are copied into the store once and read
in place. The views in a ``Taken`` are valid until it is done; clone them to keep them longer. On other
machines, columns travel in the frames. Every wait has a limit, and its error names what it waited for.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from rillflow.data_plane.schema import SOURCE, ColumnType, Schema
from rillflow.errors import StreamError
from rillflow.records.batch import Field
from rillflow.records.ragged import Ragged
from rillflow.workers.wire import Arrays, Message, packed
from rillflow_service.plane import DONE_WAITS_S, SEGMENT
from rillflow_service.requests import CELLS, IDS, LENGTHS, ROWS, TOKENS, Kind
from rillflow_service.segments import STORED, gathered, mapped
from rillflow_service.server import HOME
from rillflow_service.transport import START_S, InProcess, Socket

FETCH_WITHIN_S = 60.0
_MAPPINGS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Taken:
    """Leased groups, and the columns that the stage reads."""

    stream: str
    """Name of the stream."""
    stage: str
    """Name of the stage."""
    lease: int
    """Number of the lease."""
    ids: Tensor
    """[N] int64 group numbers, in begin order."""
    rows: Tensor
    """[N] int64 rows of each group."""
    tokens: Tensor
    """[N] int64 tokens of each group, as reported by writers."""
    fields: Mapping[str, Field]
    """Entries of each column in group order: one per row, or for a column per group, one per group."""

    def by_row(self, name: str) -> Field:
        """Return a per-group column, repeated for each row of the group."""
        field = self.fields[name]
        index = torch.repeat_interleave(torch.arange(len(self.rows)), self.rows)
        return field.select(index) if isinstance(field, Ragged) else field[index]


class Client:
    """A connection, for one thread at a time.

    Args:
        plane: folder of a server on this machine, or a plane in this process.
        address: ``host:port`` of a remote server, with its ``token``.
        name: name of this client in stories and errors.

    Raises:
        StreamError: no server serves this folder.
    """

    def __init__(
        self, plane: Path | InProcess | None = None, *, address: str = "", token: str = "", name: str
    ) -> None:
        self._schemas: dict[str, Schema] = {}
        self._mappings: dict[int, memoryview] = {}
        self._name = name
        self._fetching: dict[str, Socket] = {}
        self._near = self._tables = Socket(plane or address, token, name)
        """Connections for written columns and for requests."""
        if self._near.tables:  # the machine's store has joined remote tables
            self._tables = Socket(self._near.tables, self._near.token, name, self._near)

    def create(self, stream: str, schema: Schema, *, capacity: int) -> None:
        """Create a stream of at most ``capacity`` groups at once; several clients may create the same one."""
        self._ask(Kind.CREATE, {"stream": stream, "capacity": capacity, **asdict(schema)})

    def begin(
        self,
        stream: str,
        columns: Mapping[str, Field],
        *,
        rows: Sequence[int] | Tensor,
        tokens: Sequence[int] | Tensor | None = None,
        version: int = 0,
        key: str = "",
        wait_s: float = 60.0,
    ) -> Tensor:
        """Begin groups of ``rows`` [N] rows with these source columns; return their numbers [N].

        After an unclear failure, call it again with the same ``key``: the groups begin only once.

        Raises:
            StreamError: there was no room in time, or the columns do not match the stream.
        """
        arrays = self._written(stream, SOURCE, columns, rows)
        segment, arrays = self._put(arrays, wait_s)
        request = {"stream": stream, "version": version, "key": key, "segment": segment, "wait_s": wait_s}
        found = self._ask(Kind.BEGIN, request, arrays | _given(TOKENS, tokens), wait_s)
        return torch.from_numpy(found.arrays[IDS])

    def take(
        self,
        stream: str,
        stage: str,
        groups: int,
        *,
        least: int = 1,
        tokens: int | None = None,
        least_version: int | None = None,
        lease_s: float = 600.0,
        wait_s: float = 60.0,
    ) -> Taken | None:
        """Return up to ``groups`` ready groups with the columns that the stage reads; None at the end.

        Raises:
            StreamError: there were too few in time; the message names the stages that the stage waits for.
        """
        limits = {"least": least, "tokens": tokens, "least_version": least_version, "lease_s": lease_s}
        request = {"stream": stream, "stage": stage, "count": groups, "wait_s": wait_s, **limits}
        found = self._ask(Kind.TAKE, request, wait_s=wait_s)
        if found.says["lease"] is None:
            return None
        schema = self.schema(stream)
        try:
            arrays = {**found.arrays, **self._read(schema, found)}
        except StreamError:
            with suppress(StreamError):
                self._ask(Kind.RETURN, {"stream": stream, "lease": found.says["lease"]})
            raise
        return Taken(
            stream=stream,
            stage=stage,
            lease=found.says["lease"],
            ids=torch.from_numpy(arrays[IDS]),
            rows=torch.from_numpy(arrays[ROWS]),
            tokens=torch.from_numpy(arrays[TOKENS]),
            fields={name: _field(arrays, name, schema.columns[name]) for name in schema.stage(stage).reads},
        )

    def done(
        self,
        taken: Taken,
        columns: Mapping[str, Field] | None = None,
        *,
        index: Sequence[int] | Tensor | None = None,
        tokens: Sequence[int] | Tensor | None = None,
        version: int | None = None,
    ) -> None:
        """Complete these groups, or those at ``index`` of them, and write the stage's columns of them.

        Raises:
            StreamError: the lease had ended, or the columns do not match the stage.
        """
        ids, rows = taken.ids, taken.rows
        if index is not None:
            chosen = torch.as_tensor(index, dtype=torch.int64)
            ids, rows = ids[chosen], rows[chosen]
        arrays = self._written(taken.stream, taken.stage, columns, rows) if columns else {}
        segment, arrays = self._put(arrays, DONE_WAITS_S)
        request = {"stream": taken.stream, "lease": taken.lease, "version": version, "segment": segment}
        self._ask(Kind.DONE, request, arrays | _given(IDS, ids) | _given(TOKENS, tokens))

    def give_back(self, taken: Taken) -> None:
        """Release the unfinished groups, so that other workers can take them."""
        self._ask(Kind.RETURN, {"stream": taken.stream, "lease": taken.lease})

    def drop(self, stream: str, ids: Sequence[int] | Tensor, reason: str) -> None:
        """Remove groups from the stream."""
        self._ask(Kind.DROP, {"stream": stream, "reason": reason}, _given(IDS, ids))

    def finish(self, stream: str) -> None:
        """Close the stream: no more groups begin, and takers finish with the existing ones."""
        self._ask(Kind.LOOK, {"stream": stream, "action": "close"})

    def status(self, stream: str) -> dict[str, Any]:
        """Return counts by stage, what each waits for, and the usage of table and store."""
        return self._ask(Kind.LOOK, {"stream": stream}).says

    def schema(self, stream: str) -> Schema:
        """Return a stream's columns and stages."""
        if stream not in self._schemas:
            found = self._ask(Kind.LOOK, {"stream": stream, "action": "schema"}).says["schema"]
            self._schemas[stream] = TypeAdapter(Schema).validate_python(found)
        return self._schemas[stream]

    def close(self) -> None:
        """End the connection; unfinished groups become ready again."""
        for each in {self._tables, self._near, *self._fetching.values()}:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _written(
        self, stream: str, writer: str, columns: Mapping[str, Field], rows: Sequence[int] | Tensor
    ) -> dict[str, NDArray[Any]]:
        known = self.schema(stream).columns
        arrays = {ROWS: np.asarray(rows, dtype=np.int64)}
        for name, field in columns.items():
            if name not in known:
                why = f"{writer} writes other columns"
                raise StreamError(f"stream {stream} has no column {name!r} for {writer}", why=why)
            if isinstance(field, Ragged):
                arrays[name + LENGTHS] = field.lengths.numpy()
            values = field.values if isinstance(field, Ragged) else field
            values = values.detach().cpu()
            arrays[name] = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
        return arrays

    def _put(
        self, arrays: dict[str, NDArray[Any]], wait_s: float
    ) -> tuple[int | None, dict[str, NDArray[Any]]]:
        """Copy columns into shared memory, if available; return the segment and the arrays left to send."""
        if (segments := self._near.segments) is None or not arrays:
            return None, arrays
        gone = [each for each in self._mappings if not segments.has(each)]
        for each in gone or list(self._mappings)[: max(0, len(self._mappings) - _MAPPINGS)]:
            del self._mappings[each]
        frame = packed(SEGMENT, {}, arrays)
        reserve = {"nbytes": frame.nbytes, "wait_s": wait_s}
        number = int(self._near.ask(Kind.RESERVE, reserve, {}, wait_s).says["segment"])
        if number not in self._mappings:
            self._mappings[number] = segments.opened(number, is_shared=True)
        frame.write_into(self._mappings[number])
        return number, {}

    def _read(self, schema: Schema, found: Message) -> Arrays:
        """Return the columns of a lease: views of shared memory, or copies fetched from remote stores."""
        own = self._near.address if self._near.tables else ""
        read: dict[str, NDArray[Any]] = {}
        for writer, names in enumerate(found.says["columns"]):
            stores, numbers, places = found.arrays[f"{CELLS}{writer}"].T.copy()
            frames: dict[int, Arrays] = {}
            for store, address in found.says["stores"]:
                at = stores == store
                if address == own and (segments := self._near.segments) is not None:
                    frames |= {number: mapped(segments, number) for number in np.unique(numbers[at]).tolist()}
                elif at.any():
                    cells = {CELLS: np.stack([numbers[at], places[at]], axis=1)}
                    fetched = self._at(address).ask(Kind.FETCH, {"columns": names}, cells, FETCH_WITHIN_S)
                    frames[-1 - store] = fetched.arrays
                    numbers[at], places[at] = -1 - store, np.arange(at.sum())
            read |= gathered(frames, numbers, places, {name: schema.columns[name] for name in names})
        return read

    def _at(self, address: str) -> Socket:
        if not address:
            return self._tables
        if address not in self._fetching:
            self._fetching[address] = Socket(address, self._near.token, self._name)
        return self._fetching[address]

    def _ask(
        self, kind: Kind, request: Mapping[str, Any], arrays: Arrays | None = None, wait_s: float = 60.0
    ) -> Message:
        return self._tables.ask(kind, request, arrays or {}, wait_s)


def _given(name: str, numbers: Sequence[int] | Tensor | None) -> dict[str, NDArray[Any]]:
    return {} if numbers is None else {name: np.asarray(numbers, dtype=np.int64)}


def _field(arrays: Arrays, name: str, column: ColumnType) -> Field:
    values = torch.from_numpy(arrays[name])
    values = values.view(torch.bfloat16) if column.dtype in STORED else values
    return (
        Ragged(values=values, lengths=torch.from_numpy(arrays[name + LENGTHS])) if column.ragged else values
    )


@contextmanager
def started(
    *,
    capacity_bytes: int,
    home: Path = HOME,
    listen: str = "",
    joins: str = "",
    token_file: Path | None = None,
) -> Iterator[Path]:
    """Start a server on this machine; yield the folder where clients find it.

    Args:
        capacity_bytes: size of the shared memory.
        home: parent of the folder.
        listen: ``host:port`` for clients on other machines.
        joins: ``host:port`` of remote tables; this server then stores the columns of this machine's workers.
        token_file: file with the token of those tables.
    """
    host, _, port = listen.rpartition(":")
    command = [sys.executable, "-m", "rillflow_service.server", str(capacity_bytes), "--home", str(home)]
    command += ["--host", host, "--port", port or "0", "--join", joins]
    command += ["--token-file", str(token_file)] if token_file else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline() if wait([process.stdout.fileno()], START_S) else ""
        if not said:
            process.kill()
            raise StreamError(
                "the data plane's server did not start", why=f"it printed nothing in {START_S:g} s"
            )
        yield Path(said.strip())
    finally:
        process.communicate()

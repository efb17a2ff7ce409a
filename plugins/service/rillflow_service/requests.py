"""Requests: the requests of workers, and of external engines, to a data plane."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rillflow.data_plane.schema import MAX_COLUMNS, ColumnType, StageColumns
from rillflow.errors import RillflowError, StreamError
from rillflow.workers.wire import Message

IDS, ROWS, TOKENS = ".ids", ".rows", ".tokens"
"""Arrays beside the columns: groups [N], the rows of each, the tokens of each."""
LENGTHS = ".lengths"
"""Suffix of the lengths of a ragged column: ``x`` comes with ``x.lengths``."""
CELLS = ".cells"
"""Array of a writer's cell locations: ``.cells0``, ... [N, 3] store, segment, place; of a fetch [N, 2]."""
SEGMENTS = ".segments"
"""Array of the segments in which cells are deleted."""
LEAST_NUMBER, MOST_NUMBER = -1, 2**53
"""Bounds of versions, segments and leases, which every client can write exactly."""
Version = Annotated[int, Field(ge=LEAST_NUMBER, le=MOST_NUMBER)]
"""A version of the weights."""
Place = Annotated[int, Field(ge=0, le=MOST_NUMBER)]
"""Number of a segment or of a lease."""
LongName = Annotated[str, Field(max_length=100)]
"""Name of a column or a holder."""
Columns = Annotated[dict[LongName, ColumnType], Field(max_length=MAX_COLUMNS)]
"""Column types by name; the schema checks names and types."""
Count = Annotated[int, Field(ge=1, le=2**31)]
Number = Annotated[int, Field(ge=0, lt=2**53, strict=True)]
Token = Annotated[int, Field(ge=-(2**53), le=2**53, strict=True)]
"""A sampled token; ``RowRules`` names one that the vocabulary lacks."""
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
LeaseSeconds = Annotated[float, Field(ge=0, le=3_600, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hello(_Request):
    """The first request of a connection."""

    token: str = Field(max_length=200, description="token of the data plane")
    name: Name = Field(description="name of the client in stories and errors")
    store: str = Field(default="", max_length=64, description="address of the client's joined store")
    there: str = Field(default="", max_length=100, description="holder name of the client at that store")


class Create(_Request):
    """Create a stream; creating it again with the same columns, stages and capacity has no effect."""

    stream: Name = Field(description="name of the stream")
    columns: Columns = Field(description="column types by name")
    stages: list[StageColumns] = Field(
        max_length=MAX_COLUMNS, fail_fast=True, description="stages that read and write columns"
    )
    capacity: Annotated[int, Field(ge=1, le=2**22)] = Field(description="largest number of groups at once")


class Reserve(_Request):
    """Reserve a segment to write a frame into."""

    nbytes: Count = Field(description="size of the frame in bytes")
    wait_s: Seconds = Field(default=60.0, description="seconds to wait for room")


class Begin(_Request):
    """Begin groups, with their source columns."""

    stream: Name = Field(description="stream to begin groups in")
    key: str = Field(default="", max_length=64, description="idempotency key: a repeat returns the same ids")
    version: Version = Field(default=0, description="version of the policy that sampled the columns")
    segment: Place | None = Field(default=None, description="segment with the columns")
    wait_s: Seconds = Field(default=60.0, description="seconds to wait for room")


class Take(_Request):
    """Lease ready groups, and read their columns."""

    stream: Name = Field(description="stream to take groups from")
    stage: str = Field(max_length=64, description="stage that takes the groups")
    count: Count = Field(description="largest number of groups")
    least: Count = Field(default=1, description="smallest number of groups")
    tokens: Count | None = Field(default=None, description="largest number of tokens of all groups")
    least_version: Version | None = Field(
        default=None, description="oldest policy version that is not dropped"
    )
    lease_s: Seconds = Field(default=600.0, description="seconds until unfinished groups go back")
    wait_s: Seconds = Field(default=60.0, description="seconds to wait for groups")


class Done(_Request):
    """Complete groups of a lease, with the stage's columns written."""

    stream: Name = Field(description="stream of the groups")
    lease: Place = Field(description="lease of the groups")
    version: Version | None = Field(
        default=None, description="version of the policy that sampled the columns"
    )
    segment: Place | None = Field(default=None, description="segment with the columns")


class TakeRows(_Request):
    """Lease rows of a run, to sample them."""

    count: Annotated[int, Field(ge=1, le=4_096)] = Field(default=64, description="largest number of rows")
    lease_s: LeaseSeconds = Field(default=60.0, description="seconds until rows that are not put go back")
    wait_s: Seconds = Field(default=20.0, description="seconds to wait for rows")


class OfLease(_Request):
    """Renew a lease of rows, or return its rows."""

    lease: str = Field(max_length=40, description="lease of the rows")
    lease_s: LeaseSeconds = Field(default=60.0, description="seconds from now until the rows go back")


class SampledRow(_Request):
    """A sampled row."""

    row: Number = Field(description="number of the row in the answer of take")
    version: Number = Field(description="version of the weights that sampled every token")
    tokens: list[Token] = Field(
        max_length=2**20, fail_fast=True, description="sampled tokens, without the prompt"
    )
    logprobs: list[float | None] = Field(
        max_length=2**20,
        fail_fast=True,
        description="log probability of each sampled token in the whole vocabulary, after temperature",
    )
    finish: Literal["stop", "length"] = Field(description="whether a stop or max_tokens ended the row")


class PutRows(_Request):
    """Put sampled rows of a lease; all of them are accepted, or none."""

    lease: str = Field(max_length=40, description="lease of the rows")
    rows: Annotated[list[SampledRow], Field(min_length=1, max_length=4_096, fail_fast=True)] = Field(
        description="the rows"
    )


class Return(_Request):
    """Release a lease's groups without completing them."""

    stream: Name = Field(description="stream of the groups")
    lease: Place = Field(description="lease to end")


class Drop(_Request):
    """Remove groups from a stream."""

    stream: Name = Field(description="stream of the groups")
    reason: str = Field(min_length=1, max_length=500, description="reason in the group's story")


class Look(_Request):
    """Return the status or the schema of a stream, or close it."""

    stream: Name = Field(description="name of the stream")
    action: Literal["status", "close", "schema"] = Field(
        default="status", description="action; after close no groups begin"
    )


class Publish(_Request):
    """Publish the files of the next version of the weights."""

    files: list[Annotated[str, Field(max_length=120)]] = Field(
        min_length=1, max_length=4_096, fail_fast=True, description="names of the files that were put"
    )


class Fetch(_Request):
    """Fetch columns of cells in this process's store."""

    columns: list[LongName] = Field(
        max_length=MAX_COLUMNS, fail_fast=True, description="columns that one writer has written"
    )


class Join(_Request):
    """Join a store of another machine to these tables: from then on they request, and it answers."""

    address: str = Field(max_length=64, description="host:port where readers fetch from the store")


class Keep(_Request):
    """From a table: keep the groups in a segment, which have begun or are done."""

    segment: Place | None = Field(description="segment with the columns")
    holder: str = Field(max_length=100, description="holder that wrote the columns")
    columns: Columns = Field(description="required columns")


class Clear(_Request):
    """From a table: delete cells, or free the reservations of a holder."""

    is_unread: bool = Field(default=True, description="whether no reader may still read the cells")
    holder: str = Field(default="", max_length=100, description="holder whose reservations end")


OF_STREAMS: tuple[type[BaseModel], ...] = (Create, Begin, Take, Done, Return, Drop, Look)
"""Requests about streams, also available over HTTP."""
OF_ENGINES: tuple[type[BaseModel], ...] = (TakeRows, OfLease, SampledRow, PutRows, Publish)
"""Requests of programs that sample a run's rows or publish weights, over HTTP."""
OF_STORES: tuple[type[BaseModel], ...] = (Hello, Reserve, Fetch, Join, Keep, Clear)
"""Requests about a connection, and about its store."""


class Kind(IntEnum):
    """Type of a message."""

    HELLO = 1
    CREATE = 2
    RESERVE = 3
    BEGIN = 4
    TAKE = 5
    DONE = 6
    RETURN = 7
    DROP = 8
    LOOK = 9
    FETCH = 10
    JOIN = 11
    KEEP = 12
    CLEAR = 13
    OK = 100
    ERROR = 101


REQUESTS = {int(Kind[model.__name__.upper()]): model for model in (*OF_STREAMS, *OF_STORES)}


def sentences(error: RillflowError) -> dict[str, str]:
    """Return an error as JSON."""
    return {"what": error.what, "why": error.why, "fix": error.fix}


def raised(answer: Message) -> Message:
    """Return an answer that is no error.

    Raises:
        StreamError: it is one.
    """
    if answer.kind == Kind.ERROR:
        raise StreamError(**answer.says)
    return answer

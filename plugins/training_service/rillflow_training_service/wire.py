"""Wire: the protobuf messages of the Tinker API, with the field numbers that its clients use.

    bytes ─ decoded(PASS) ─> message ─ tensor_of ─> torch tensors      answers ─ encoded ─> bytes

The messages are declared here as a table of field numbers and made by protobuf's own runtime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from torch import Tensor

from rillflow.errors import DataError

CONTENT_TYPE = "application/x-protobuf"
MOST_DATA, MOST_FIELDS = 2**12, 2**18
"""Most rows and protobuf fields of a pass; a client sends at most 1,024 rows, of some 30 fields each."""
MOST_NUMBERS = 2**24
"""Most numbers of a tensor, and zeros of a sparse one: a million targets with 16 candidates each."""
FLOAT32, INT64, INT32 = 1, 2, 3
"""Numbers of the types of tensors."""
_DTYPES = {FLOAT32: torch.float32, INT64: torch.int64, INT32: torch.int32}
_PACKAGE = "rillflow_training_service"
_KINDS: dict[str, Any] = {"string": 9, "bytes": 12, "int32": 5, "int64": 3, "double": 1, "bool": 8}
"""Protobuf's numbers of field types. An enum travels as an int32."""
_MESSAGES: Mapping[str, Mapping[int, str]] = {
    "SparseCsr": {1: "values bytes", 2: "rows bytes", 3: "columns bytes"},
    "Tensor": {1: "dense bytes", 2: "sparse SparseCsr", 3: "dtype int32", 4: "shape int64*"},
    "Named": {1: "key string", 2: "value Tensor"},
    "Number": {1: "key string", 2: "value double"},
    "Setting": {1: "number double", 2: "text string"},
    "NamedSetting": {1: "key string", 2: "value Setting"},
    "Text": {1: "tokens bytes"},
    "Chunk": {1: "text Text", 2: "image bytes", 3: "audio bytes"},
    "Datum": {1: "chunks Chunk*", 2: "inputs Named*"},
    "Pass": {
        1: "model_id string",
        2: "seq_id int32",
        3: "data Datum*",
        4: "loss string",
        5: "options Number*",
        6: "is_forward bool",
        7: "settings NamedSetting*",
    },
    "Column": {1: "data bytes", 2: "offsets bytes", 3: "dtype int32", 4: "trailing int64*"},
    "NamedColumn": {1: "key string", 2: "value Column"},
    "Record": {1: "tag string", 2: "columns NamedColumn*", 3: "count int64"},
    "PassOutput": {1: "kind string", 2: "records Record*", 3: "metrics Number*"},
    "Sampled": {1: "stop int32", 2: "tokens bytes", 3: "logprobs bytes"},
    "SampleOutput": {1: "sequences Sampled*", 2: "prompt_logprobs bytes"},
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE)
    for kind_of, fields in _MESSAGES.items():
        made = file.message_type.add(name=kind_of)
        for number, told in fields.items():
            name, kind = told.split()
            field = made.field.add(name=name, number=number, label=3 if kind.endswith("*") else 1)
            kind = kind.removesuffix("*")
            field.type = _KINDS.get(kind, 11)
            if kind not in _KINDS:
                field.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES}
    return {name: message_factory.GetMessageClass(each) for name, each in found.items()}


_CLASSES = _classes()


def message(kind: str, /, **fields: Any) -> Any:
    """Return a message of this kind, such as ``Datum``."""
    return _CLASSES[kind](**fields)


def read_message(kind: str, body: bytes) -> Any:
    """Return a message of this kind from its bytes.

    Raises:
        DecodeError: the bytes are not one.
    """
    found = _CLASSES[kind]()
    found.ParseFromString(body)
    return found


def decoded_pass(body: bytes) -> Any:
    """Return the message of a ``forward_backward`` request.

    Raises:
        DataError: the bytes are not such a message, or have too many parts.
    """
    _require_few_fields(body)
    try:
        return read_message("Pass", body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"the body of {len(body)} bytes is not a forward_backward request",
            why=str(error),
            fix="use the tinker client, version 0.38",
        ) from None


def _require_few_fields(body: bytes) -> None:
    """Refuse a body of many small parts, before each of them becomes an object.

    Raises:
        DataError: it has more than ``MOST_DATA`` rows, or more than ``MOST_FIELDS`` fields in all.
    """
    counts = {"Datum": 0, "": 0}
    parts = [("Pass", 0, len(body))]
    while parts:
        kind, at, end = parts.pop()
        fields = _MESSAGES[kind]
        while at < end:
            key, at = _varint(body, at, end)
            wire, inner = key & 7, fields.get(key >> 3, "").removesuffix("*").rpartition(" ")[2]
            size = {1: 8, 5: 4}.get(wire, 0)
            if wire in (0, 2):
                number, at = _varint(body, at, end)
                size = number if wire == 2 else 0
            if wire == 2 and inner in _MESSAGES:
                parts.append((inner, at, min(at + size, end)))
            for counted, most in ((inner, MOST_DATA), ("", MOST_FIELDS)):
                if counted in counts:
                    counts[counted] += 1
                    if counts[counted] > most:
                        what = f"the request has more than {most:,} {'rows' if counted else 'fields'}"
                        raise DataError(what, why="each takes memory and time", fix="send several requests")
            at += size


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number and the place after it; ``end`` if it is cut, which the parser refuses later."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        code = body[at]
        at += 1
        number |= (code & 127) << shift
        if code < 128:
            break
    return number, at


def tokens_of(chunk: Any, place: str) -> Tensor:
    """Return [T] int64 the tokens of a chunk.

    Raises:
        DataError: the chunk is an image or audio, or its bytes are no tokens.
    """
    if not chunk.HasField("text"):
        raise DataError(
            f"{place} has a chunk that is not text",
            why="the served model reads tokens only",
            fix="send encoded text",
        )
    return _numbers(chunk.text.tokens, INT32, place).long()


def tensor_of(told: Any, place: str) -> Tensor:
    """Return a tensor, dense, of float32 or int64; what a sparse one leaves out is 0.

    Raises:
        DataError: type, shape and bytes do not fit together.
    """
    dtype, shape = told.dtype, list(told.shape)
    if not told.HasField("sparse"):
        values = _numbers(told.dense, dtype, place)
        shape = shape or [len(values)]
        if min(shape) < 0 or len(shape) > 2 or math.prod(shape) != len(values):
            raise DataError(
                f"{place} has the shape {shape} and {len(values)} numbers",
                why="a tensor has one number for each place of its shape",
            )
        return values.view(shape)
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > MOST_NUMBERS:
        why = f"a sparse tensor has two dimensions, and at most {MOST_NUMBERS:,} places"
        raise DataError(f"{place} has the shape {shape[:8]}", why=why)
    values, columns = _numbers(told.sparse.values, dtype, place), told.sparse.columns
    try:
        rows, where = _numbers(told.sparse.rows, INT64, place), _numbers(columns, INT64, place)
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            return torch.sparse_csr_tensor(rows, where, values, shape).to_dense()
    except RuntimeError as error:
        raise DataError(
            f"{place} is not a sparse tensor of shape {shape}", why=str(error).splitlines()[0]
        ) from None


def _numbers(data: bytes, dtype: int, place: str) -> Tensor:
    if dtype not in (FLOAT32, INT64, INT32):
        raise DataError(f"{place} has the type {dtype}", why="a tensor is float32 (1) or int64 (2)")
    kind = _DTYPES[dtype]
    if len(data) % kind.itemsize:
        raise DataError(f"{place} has {len(data)} bytes", why=f"a number of it has {kind.itemsize}")
    return torch.frombuffer(bytearray(data), dtype=kind) if data else torch.zeros(0, dtype=kind)


def encoded_pass(logprobs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Return the answer of a pass: log probabilities [T] or [T, K] of each datum, and metrics."""
    output = message("PassOutput", kind="ArrayRecord")
    by_width: list[tuple[tuple[int, ...], list[Tensor]]] = []
    for each in logprobs:
        if not by_width or by_width[-1][0] != tuple(each.shape[1:]):
            by_width.append((tuple(each.shape[1:]), []))
        by_width[-1][1].append(each)
    for trailing, alike in by_width:
        record = output.records.add(tag="ArrayRecord", count=len(alike))
        column = record.columns.add(key="logprobs").value
        column.data = b"".join(_raw(each.float()) for each in alike)
        ends = torch.tensor([0, *(4 * each.numel() for each in alike)]).cumsum(0)
        column.offsets, column.dtype = _raw(ends), FLOAT32
        column.trailing.extend(trailing)
    for name, value in metrics.items():
        output.metrics.add(key=name, value=value)
    return bytes(output.SerializeToString())


def encoded_samples(
    sequences: Sequence[tuple[bool, Sequence[int], Sequence[float]]], prompt: Tensor | None
) -> bytes:
    """Return the answer of a sampling request.

    Args:
        sequences: for each sample whether it was stopped, its tokens, and their log probabilities.
        prompt: [T] float32 log probabilities of the prompt's tokens, NaN where there is none; or None.
    """
    output = message("SampleOutput")
    for is_stopped, tokens, logprobs in sequences:
        output.sequences.add(
            stop=0 if is_stopped else 1,
            tokens=_raw(torch.tensor(tokens, dtype=torch.int32)),
            logprobs=_raw(torch.tensor(logprobs, dtype=torch.float32)),
        )
    if prompt is not None:
        output.prompt_logprobs = _raw(prompt.float())
    return bytes(output.SerializeToString())


def _raw(tensor: Tensor) -> bytes:
    data: bytes = tensor.contiguous().numpy().tobytes()
    return data

"""Attacks: bytes that a client with a token may send. Each is drawn from a generator, so a seed repeats it.

Every attack is bounded: at most 32 MiB, and a few seconds.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 20.0
"""Longest wait for an answer."""
NUMBERS = (
    -1,
    0,
    1,
    1.5,
    True,
    "1",
    -0.0,
    1e308,
    -1e308,
    10**9,
    2**31,
    2**63,
    10**400,
    float("nan"),
    None,
    [],
    {},
)
"""Values for numeric fields."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server, as attacks see it."""

    port: int
    """Port on the loopback device."""
    token: str
    """Its token."""
    path: str
    """Path of a request with a JSON body."""
    body: Mapping[str, Any]
    """An ordinary body."""
    lists: tuple[str, ...]
    """Fields that may be lists."""
    numbers: tuple[str, ...]
    """Fields that are numbers."""


def head(target: Target, length: int | None, path: str = "", more: str = "") -> bytes:
    """Return the head of a request; without a length its body is chunked."""
    size = f"Content-Length: {length}" if length is not None else "Transfer-Encoding: chunked"
    token = f"Authorization: Bearer {target.token}"
    return f"POST {path or target.path} HTTP/1.1\r\nHost: a\r\n{token}\r\n{size}\r\n{more}\r\n".encode()


def sent(target: Target, *parts: bytes, pause_s: float = 0.0, wait_s: float = PATIENCE_S) -> bytes:
    """Send parts with pauses, and return the beginning of what is answered."""
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1", target.port), timeout=wait_s) as connection,
    ):
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)
        return connection.recv(2**16)
    return b""


def posted(target: Target, body: bytes, path: str = "", more: str = "") -> None:
    """Send a whole body."""
    sent(target, head(target, len(body), path, more), body)


def said(target: Target, path: str = "", /, **more: Any) -> None:
    """Send an ordinary body with other fields."""
    posted(target, json.dumps({**target.body, **more}).encode(), path)


def list_of(target: Target, draw: random.Random) -> None:
    """A long list of one value, often a wrong one, as a field that may be a list."""
    item = draw.choice(
        [b"0.5", b"1", b'"a"', b"[]", b"{}", b"null", b"[0.5]", b'{"a":1}', b"1e999", b"9" * 4000]
    )
    count = min(draw.choice([10**5, 10**6, 5 * 10**6]), 15 * 2**20 // (len(item) + 1))
    field = draw.choice([*target.lists, *target.numbers, "unknown"])
    rest = json.dumps({name: each for name, each in target.body.items() if name != field})[1:]
    posted(target, b'{"' + field.encode() + b'": [' + b",".join([item] * count) + b"], " + rest.encode())


def number(target: Target, draw: random.Random) -> None:
    """An odd value for a number."""
    said(target, **{draw.choice(target.numbers): draw.choice(NUMBERS)})


def keys(target: Target, draw: random.Random) -> None:
    """Many keys, or one key many times."""
    count = draw.choice([10**4, 5 * 10**5])
    names = (f"k{place}" for place in range(count)) if draw.random() < 0.5 else ["a"] * count
    posted(target, b"{" + ",".join(f'"{name}": 1' for name in names).encode() + b"}")


def text(target: Target, draw: random.Random) -> None:
    """A long text for any field."""
    letter = draw.choice(["a", ",", "[", '\\"', "\\u00e9", "\U0001f600", "\\ud800", "1+"])
    field = draw.choice([*target.body, *target.lists, *target.numbers])
    body = f'{{"{field}": "{letter * draw.choice([10**4, 10**6, 3 * 10**6])}"}}'.encode()[: 15 * 2**20]
    posted(target, body)


def depth(target: Target, draw: random.Random) -> None:
    """Deep nesting."""
    posted(target, b'{"a":' * draw.choice([100, 10**5, 10**6]))


def packed(target: Target, draw: random.Random) -> None:
    """A compressed body."""
    posted(target, gzip.compress(b" " * draw.choice([10**6, 10**8])), more="Content-Encoding: gzip\r\n")


def slow(target: Target, draw: random.Random) -> None:
    """A body or a head that arrives a byte at a time."""
    whole = head(target, 10**6) + b" " * 9 if draw.random() < 0.5 else head(target, 10)
    sent(target, *(bytes([each]) for each in whole[-8:]), pause_s=0.5, wait_s=1.0)


def endless(target: Target, draw: random.Random) -> None:
    """A chunked body without an announced size."""
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    sent(target, head(target, None), *[chunk] * draw.choice([4, 32]))


def heads(target: Target, draw: random.Random) -> None:
    """A long URL, many headers, or many requests at once."""
    kind = draw.choice(["url", "headers", "pipelined", "garbage"])
    if kind == "url":
        sent(target, head(target, 0, target.path + "?" + "a" * 10**6))
    elif kind == "headers":
        sent(target, head(target, 0, more="X: y\r\n" * 10**5))
    elif kind == "pipelined":
        one = json.dumps(target.body).encode()
        sent(target, (head(target, len(one)) + one) * 50)
    else:
        sent(target, draw.randbytes(10**5))


def connections(target: Target, draw: random.Random) -> None:
    """Many connections, with half a head or none."""
    opened = []
    with suppress(OSError):
        for _ in range(draw.choice([100, 400])):
            opened.append(socket.create_connection(("127.0.0.1", target.port), timeout=5.0))
            if draw.random() < 0.5:
                opened[-1].sendall(head(target, 10)[:-9])
    time.sleep(1.0)
    for each in opened:
        each.close()


def rows(target: Target, draw: random.Random) -> None:
    """Many long rows of one request."""
    said(target, n=draw.choice([8, 128]), max_tokens=10**6, prompt=["1+2="] * draw.choice([1, 8]))


def samples(target: Target, draw: random.Random) -> None:
    """Odd sampling requests of the training service."""
    params = draw.choice(
        [{"stop": "a" * 10**6}, {"stop": ["a"] * 10**5}, {"max_tokens": 10**9}, {"top_k": 10**30}]
    )
    said(target, num_samples=draw.choice([1, 1024, 10**9]), sampling_params=params)


def passes(target: Target, draw: random.Random) -> None:
    """A protobuf body of many small parts."""
    part = draw.choice([b"\x1a\x00", b"\x1a\x02\x0a\x00", b"\x1a\x06\x12\x04\x0a\x02aa", b"\x0a\x01a"])
    posted(target, part * (draw.choice([2**20, 2**24]) // len(part)), "/api/v1/forward_backward")


def lifetimes(target: Target, draw: random.Random) -> None:
    """Numbers and texts of the other endpoints of the training service."""
    name = draw.choice(["save_weights", "create_model", "optim_step", "create_session", "weights_info"])
    value = draw.choice([*NUMBERS, "a" * 50_000, ["a"] * 10_000])
    field = draw.choice(
        ["ttl_seconds", "seq_id", "model_id", "path", "user_metadata", "session_id", "lora_config"]
    )
    said(target, f"/api/v1/{name}", **{field: value})


Attack = Callable[[Target, random.Random], None]
EVERYWHERE: tuple[Attack, ...] = (
    list_of,
    number,
    keys,
    text,
    depth,
    packed,
    slow,
    endless,
    heads,
    connections,
)
"""Attacks on every server."""
ATTACKS: Mapping[str, tuple[Attack, ...]] = {
    "door": (*EVERYWHERE, rows),
    "training": (*EVERYWHERE, samples, passes, lifetimes),
    "streams": EVERYWHERE,
}
"""Attacks by server."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """An attack that was sent."""

    name: str
    """Its name."""
    begin_s: float
    """When it began, on the machine's clock."""
    end_s: float
    """When it ended."""


def sent_until(until_s: float, attacks: tuple[Attack, ...], target: Target, seed: str) -> list[Sent]:
    """Send attacks that a seed draws until the time is over; return them."""
    draw, log = random.Random(seed), []
    while (begin_s := time.monotonic()) < until_s:
        attack = draw.choice(attacks)
        attack(target, draw)
        log.append(Sent(name=attack.__name__, begin_s=begin_s, end_s=time.monotonic()))
    return log

"""Streams over TCP, between machines: the trainer's process has a hub that every worker knows.

    actor ── DEALER ── fragments, questions ──> ROUTER hub ── weights, stop, credit, addresses ──> everyone
    actor ── DEALER ── observations ──> ROUTER policy worker          (its address: from the hub)

A message is a token, a head in JSON, and one frame for each array, as it is in memory; both ends know the
shapes. A message with another token or other sizes is dropped. Nothing is pickled. A sink sends a lane's
fragment only while fewer than ``depth`` of them are not released, which the hub reports; so the streams have
the bounds that they have in memory.

Loop of the hub's thread
    consumes      fragments; questions of readers, which name what they have seen
    waits for     a message, or a change in this process
    unblocked by  a worker; ``publish``, ``control`` and ``release``
    produces      answers to the readers that have not seen the newest
    shuts down    ``close``
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import zmq

from rillflow.errors import StreamError
from rillflow_classic.fragment import Array, FinishedEpisode, Fragment
from rillflow_classic.policy import Acted, Weights
from rillflow_classic.streams.stream import RETRY_S, UNLIMITED, ActingRequests, Received, StreamSpec
from rillflow_classic.workers.recording import (
    ActingLayout,
    Arrays,
    ArraySpec,
    acted_of,
    arrays_of,
    arrays_of_acted,
    fragment_of,
)


class SocketTransport:
    """Streams over TCP.

    Args:
        spec: the sizes.
        host: address of this machine that the others reach.
    """

    def __init__(self, spec: StreamSpec, *, host: str = "127.0.0.1") -> None:
        self.spec, self.host = spec, host
        self.token = secrets.token_bytes(16)
        """Every message of the run begins with it."""
        self._hub: _Hub | None = _Hub(self)
        self.address = self._hub.address

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hub": None}

    def acting_client(self, policy: str, actor: int) -> SocketClient:
        """See Transport."""
        return SocketClient(self, policy, actor)

    def acting_server(self, policy: str, worker: int) -> SocketServer:
        """See Transport."""
        return SocketServer(self, policy, worker)

    def sink(self, actor: int) -> SocketSink:
        """See Transport."""
        return SocketSink(self, actor)

    def source(self) -> _Hub:
        """See Transport."""
        return self._here()

    def reader(self) -> SocketReader:
        """See Transport."""
        return SocketReader(self, dict.fromkeys(self.spec.weights, -1))

    def writer(self) -> _Hub:
        """See Transport."""
        return self._here()

    def close(self) -> None:
        """See Transport."""
        if self._hub is not None:
            self._hub.close()

    def _here(self) -> _Hub:
        if self._hub is None:
            raise StreamError(
                "a worker asks for the trainer's end of a stream",
                why="it is in the process that made the transport",
            )
        return self._hub


class _Hub:
    """The trainer's socket; see ParameterWriter and FragmentSource."""

    def __init__(self, transport: SocketTransport) -> None:
        self._spec, self._token = transport.spec, transport.token
        self._layouts = {n: layout.of_fragment(self._spec.steps) for n, layout in self._spec.layouts.items()}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port(f"tcp://{transport.host}")
        self.address = f"tcp://{transport.host}:{port}"
        self._changed, self._wake, self._is_closed = threading.Condition(), os.pipe(), False
        self._known: dict[str, Any] = {"state": 1, "is_stopped": False, "limit": UNLIMITED, "workers": {}}
        self._weights: dict[str, tuple[int, dict[str, Array]]] = {}
        self._released: defaultdict[bytes, Counter[str]] = defaultdict(Counter)
        self._numbers: Counter[tuple[int, int]] = Counter()
        self._arrived: deque[Received] = deque()
        self._waiting: dict[bytes, dict[str, Any]] = {}
        self._thread = threading.Thread(target=self._run, name="stream-hub", daemon=True)
        self._thread.start()

    def publish(self, policy: str, version: int, weights: Weights) -> None:
        """See ParameterWriter."""
        copies = {name: np.array(array) for name, array in weights.items()}
        with self._change(state=True):
            self._weights[policy] = version, copies

    def control(self, *, is_stopped: bool, limit: int = UNLIMITED) -> None:
        """See ParameterWriter."""
        with self._change(state=True):
            self._known |= {"is_stopped": is_stopped, "limit": limit}

    def take(self, wait_s: float) -> list[Received]:
        """See FragmentSource."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived, wait_s)
            return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def close(self) -> None:
        """End the thread and the socket."""
        with self._change(state=False):
            self._is_closed = True
        self._thread.join()
        self._context.destroy(linger=0)
        for end in self._wake:
            os.close(end)

    @contextlib.contextmanager
    def _change(self, *, state: bool) -> Iterator[None]:
        """Change what readers see; ``state``: for all of them."""
        with self._changed:
            yield
            self._known["state"] += state
            os.write(self._wake[1], b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake[0], zmq.POLLIN)
        while not self._is_closed:
            ready = dict(poller.poll())
            if self._wake[0] in ready:
                os.read(self._wake[0], 65536)
            for name, token, said, *frames in received(self._socket, least=3):
                if secrets.compare_digest(bytes(token.buffer), self._token):
                    self._heard(bytes(name.buffer), json.loads(bytes(said.buffer)), frames)
            for waiting in list(self._waiting):
                self._answer(waiting)

    def _heard(self, name: bytes, said: dict[str, Any], frames: Sequence[zmq.Frame]) -> None:
        if "worker" in said:
            with self._changed:
                self._known["workers"][said["worker"]] = said["address"]
                self._known["state"] += 1
        elif "lane" in said:
            self._keep(name, said, frames)
        else:
            self._waiting[name] = said

    def _keep(self, name: bytes, said: dict[str, Any], frames: Sequence[zmq.Frame]) -> None:
        """Keep a fragment for ``take``."""
        arrays = unpacked(frames, [spec for layout in self._layouts.values() for spec in layout.values()])
        if arrays is None:
            return
        rest, actor, lane, fragments = iter(arrays), said["actor"], said["lane"], {}
        for policy, layout in self._layouts.items():
            episodes = [
                FinishedEpisode(total_reward=reward, length=length, slot=slot)
                for reward, length, slot in said["episodes"][policy]
            ]
            own = {field: next(rest) for field in layout}
            fragments[policy] = fragment_of(own, episodes=episodes, policy=policy, actor=actor)
        release = iter([partial(self._release, name, str(lane))])
        with self._changed:
            self._arrived.append(
                Received(
                    actor=actor,
                    lane=lane,
                    number=self._numbers[actor, lane],
                    fragments=fragments,
                    release=lambda: next(release, _nothing)(),
                )
            )
            self._numbers[actor, lane] += 1
            self._changed.notify_all()

    def _release(self, name: bytes, lane: str) -> None:
        with self._change(state=False):
            self._released[name][lane] += 1

    def _answer(self, name: bytes) -> None:
        question = self._waiting[name]
        with self._changed:
            credit = dict(self._released[name]) if name in self._released else {}
            if question["state"] == self._known["state"] and question["released"] == credit:
                return
            newer = {
                policy: self._weights[policy]
                for policy, version in question["versions"].items()
                if policy in self._weights and self._weights[policy][0] > version
            }
            versions = {policy: version for policy, (version, _) in newer.items()}
            said = json.dumps({**self._known, "released": credit, "versions": versions})
        del self._waiting[name]
        frames: list[Any] = [name, said.encode()]
        frames += [array for _, weights in newer.values() for array in weights.values()]
        self._socket.send_multipart(frames, copy=False)


class SocketReader:
    """Asks the hub for changes, with one question under way; see ParameterReader.

    Args:
        transport: the streams.
        versions: newest version of the weights it has, by policy; empty: it wants none.
    """

    def __init__(self, transport: SocketTransport, versions: Mapping[str, int]) -> None:
        self.transport, self._versions = transport, dict(versions)
        self.socket = opened(zmq.DEALER)
        self.socket.connect(transport.address)
        self._known: dict[str, Any] = {
            "state": 0,
            "is_stopped": False,
            "limit": 0,
            "workers": {},
            "released": {},
        }
        self._newest: dict[str, tuple[int, Weights]] = {}
        self._ask()

    @property
    def is_stopped(self) -> bool:
        """See ParameterReader."""
        return bool(self.look()["is_stopped"])

    @property
    def limit(self) -> int:
        """See ParameterReader."""
        return int(self.look()["limit"])

    def newest(self, policy: str, version: int) -> tuple[int, Weights] | None:
        """See ParameterReader."""
        self.look()
        found = self._newest.get(policy)
        return found if found is not None and found[0] > version else None

    def tell(self, said: Mapping[str, Any], arrays: Iterable[Array] = ()) -> None:
        """Send a message."""
        frames: list[Any] = [self.transport.token, json.dumps(said).encode(), *arrays]
        self.socket.send_multipart(frames, copy=False)

    def look(self) -> dict[str, Any]:
        """Return the hub's newest answer."""
        for said, *frames in received(self.socket):
            self._known = json.loads(bytes(said.buffer))
            for policy, version in self._known["versions"].items():
                specs = self.transport.spec.weights[policy]
                own, frames = frames[: len(specs)], frames[len(specs) :]
                arrays = unpacked(own, specs.values())
                if arrays is not None:
                    weights = {name: array.copy() for name, array in zip(specs, arrays, strict=True)}
                    self._newest[policy] = version, weights
                    self._versions[policy] = version
            self._ask()
        return self._known

    def _ask(self) -> None:
        known = {name: self._known[name] for name in ("state", "released")}
        self.tell({**known, "versions": self._versions})


class SocketSink:
    """Sends fragments to the trainer; see FragmentSink."""

    def __init__(self, transport: SocketTransport, actor: int) -> None:
        self._spec, self._actor = transport.spec, actor
        self._reader = SocketReader(transport, {})
        self._sent: Counter[int] = Counter()

    def reserve(self, lane: int) -> Mapping[str, Arrays] | None:
        """See FragmentSink."""
        if self._sent[lane] - self._reader.look()["released"].get(str(lane), 0) >= self._spec.depth:
            return None
        return {
            policy: {name: spec.empty() for name, spec in layout.of_fragment(self._spec.steps).items()}
            for policy, layout in self._spec.layouts.items()
        }

    def put(self, lane: int, fragments: Mapping[str, Fragment]) -> None:
        """See FragmentSink."""
        ordered = {policy: fragments[policy] for policy in self._spec.layouts}
        episodes = {
            policy: [[each.total_reward, each.length, each.slot] for each in fragment.episodes]
            for policy, fragment in ordered.items()
        }
        self._reader.tell(
            {"actor": self._actor, "lane": lane, "episodes": episodes},
            [array for fragment in ordered.values() for array in arrays_of(fragment).values()],
        )
        self._sent[lane] += 1

    def sent(self, lane: int) -> int:
        """See FragmentSink; counts what this process sent."""
        return self._sent[lane]

    def wait(self, seconds: float) -> None:
        """See FragmentSink."""
        self._reader.socket.poll(int(seconds * 1000))


class SocketClient:
    """Asks policy workers for the actions of one actor's lanes; see ActingClient."""

    def __init__(self, transport: SocketTransport, policy: str, actor: int) -> None:
        self._policy, self._layout = policy, transport.spec.layouts[policy]
        self._first, self._token = actor * transport.spec.ring, transport.token
        self._reader = SocketReader(transport, {})
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._reader.socket, zmq.POLLIN)
        self._number = 0
        self._open: dict[int, tuple[list[Any], float]] = {}
        """Frames of the request that a lane waits for, and when it was asked."""
        self._tries = Counter({lane: self._first + lane for lane in range(transport.spec.ring)})
        self._answers: dict[int, tuple[Acted, int]] = {}

    def layout(self, *_: object) -> ActingLayout:
        """See ActingClient."""
        return self._layout

    def post(self, lane: int, observations: Array, state: Array | None) -> None:
        """See ActingClient."""
        self._number += 1
        arrays = [np.ascontiguousarray(each) for each in (observations, state) if each is not None]
        head = json.dumps([self._number, self._first + lane]).encode()
        self._ask(lane, [self._token, head, *arrays])

    def take(self, lane: int) -> tuple[Acted, int] | None:
        """See ActingClient."""
        for each in self._sockets.values():
            for head, *frames in received(each):
                self._hear(bytes(head.buffer), frames)
        if lane in self._open and time.monotonic() - self._open[lane][1] > RETRY_S:
            self._tries[lane] += 1
            self._ask(lane, self._open[lane][0])
        return self._answers.pop(lane, None)

    def wait(self, seconds: float) -> None:
        """See ActingClient."""
        self._poller.poll(int(max(0.0, seconds) * 1000))

    def _hear(self, head: bytes, frames: Sequence[zmq.Frame]) -> None:
        question, version = json.loads(head)
        lane = question[1] - self._first
        specs = self._layout.of_answer()
        arrays = unpacked(frames, specs.values())
        if arrays is not None and lane in self._open and json.loads(self._open[lane][0][1]) == question:
            del self._open[lane]
            self._answers[lane] = acted_of(dict(zip(specs, arrays, strict=True))), version

    def _ask(self, lane: int, frames: list[Any]) -> None:
        workers = self._reader.look()["workers"]
        addresses = [workers[name] for name in sorted(workers) if name.startswith(f"{self._policy}/")]
        if not addresses:  # none has said where it is: asked again at the next look
            self._open[lane] = frames, -RETRY_S
            return
        address = addresses[self._tries[lane] % len(addresses)]
        if address not in self._sockets:
            self._sockets[address] = opened(zmq.DEALER)
            self._sockets[address].connect(address)
            self._poller.register(self._sockets[address], zmq.POLLIN)
        self._open[lane] = frames, time.monotonic()
        with contextlib.suppress(zmq.Again):  # a dead worker's queue is full
            self._sockets[address].send_multipart(frames, zmq.NOBLOCK)


class SocketServer:
    """Answers the requests that a policy worker receives; see ActingServer."""

    def __init__(self, transport: SocketTransport, policy: str, worker: int) -> None:
        self._layout, self._token = transport.spec.layouts[policy], transport.token
        self._socket = opened(zmq.ROUTER)
        host = own_address(transport.host)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._reader = SocketReader(transport, {})
        self._reader.tell({"worker": f"{policy}/{worker}", "address": f"tcp://{host}:{port}"})
        self._names: dict[tuple[int, int], bytes] = {}

    def requests(self) -> ActingRequests | None:
        """See ActingServer."""
        specs = self._layout.of_request()
        found: dict[tuple[int, int], list[Array]] = {}
        for name, token, head, *frames in received(self._socket, least=3):
            arrays = unpacked(frames, specs.values())
            if arrays is not None and secrets.compare_digest(bytes(token.buffer), self._token):
                number, lane = json.loads(bytes(head.buffer))
                found[number, lane] = arrays
                self._names[number, lane] = bytes(name.buffer)
        if not found:
            return None
        columns = [np.concatenate(each) for each in zip(*found.values(), strict=True)]
        numbers, lanes = np.array(list(found)).T
        return ActingRequests(
            observations=columns[0],
            state=columns[1] if len(columns) > 1 else None,
            numbers=numbers,
            lanes=lanes,
        )

    def answer(self, requests: ActingRequests, acted: Acted, version: int) -> None:
        """See ActingServer."""
        arrays, slots = arrays_of_acted(acted), self._layout.observations.shape[0]
        for place, key in enumerate(zip(requests.numbers.tolist(), requests.lanes.tolist(), strict=True)):
            part = slice(place * slots, (place + 1) * slots)
            frames: list[Any] = [self._names.pop(key), json.dumps([key, version]).encode()]
            frames += [np.ascontiguousarray(arrays[name][part]) for name in self._layout.of_answer()]
            self._socket.send_multipart(frames)

    def wait(self, seconds: float) -> None:
        """See ActingServer."""
        self._socket.poll(int(max(0.0, seconds) * 1000))


def received(source: zmq.Socket[bytes], least: int = 1) -> Iterator[list[zmq.Frame]]:
    """Yield the messages that have arrived, if they have so many frames."""
    with contextlib.suppress(zmq.Again):
        while True:
            frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
            if len(frames) >= least:
                yield frames


def unpacked(frames: Sequence[zmq.Frame], specs: Iterable[ArraySpec]) -> list[Array] | None:
    """View frames as arrays of given shapes; None if their number or sizes differ."""
    wanted = list(specs)
    if [len(frame.buffer) for frame in frames] != [spec.nbytes for spec in wanted]:
        return None
    pairs = zip(frames, wanted, strict=True)
    return [np.frombuffer(frame.buffer, spec.dtype).reshape(spec.shape) for frame, spec in pairs]


def own_address(host: str) -> str:
    """Return this machine's address on the way to another one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((host, 1))
        return str(asked.getsockname()[0])


def opened(kind: int) -> zmq.Socket[bytes]:
    """Return a new socket that holds no message back when it is closed."""
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    return made


def _nothing() -> None:
    """Do nothing: it was released before."""

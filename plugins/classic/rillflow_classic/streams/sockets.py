"""Streams over TCP, between machines: the trainer's process has a hub that everyone knows.

    actor ── PUSH ── fragments ──> PULL  hub  ROUTER ── newest weights, stop, addresses ──> DEALER ── everyone
    actor ── DEALER ── observations ──> ROUTER policy worker          (its address: from the hub)

A message is a token, a head, and one frame for each array, as it is in memory; both ends know the shapes. A
message with another token or other sizes is dropped. Nothing is pickled. A sink sends a lane's fragment only
while fewer than ``depth`` of them are not released, which the hub reports; so the streams have the bounds
that they have in memory.

Loop of the hub's thread
    consumes      questions of readers: each names what it has seen
    waits for     a question, or a change in this process
    unblocked by  a reader; ``publish``, ``control`` and ``release``
    produces      answers to the readers that have not seen the newest
    shuts down    ``close``
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    arrays_of,
    fragment_of,
    spec_of,
)

_HEAD = struct.Struct("<qqq")
"""Number of the request, lane among those of all actors, version."""
_LONGEST_MS = 1000


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
        self.questions, self.samples = self._hub.addresses

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

    def source(self) -> SocketSource:
        """See Transport."""
        return SocketSource(self, self._here())

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
    """The trainer's sockets; see ParameterWriter."""

    def __init__(self, transport: SocketTransport) -> None:
        self._token = transport.token
        self._context = zmq.Context()
        self._questions, self.samples = self._context.socket(zmq.ROUTER), self._context.socket(zmq.PULL)
        self.samples.setsockopt(zmq.RCVHWM, 0)  # the sinks' credit bounds it
        ports = [
            each.bind_to_random_port(f"tcp://{transport.host}") for each in (self._questions, self.samples)
        ]
        self.addresses = [f"tcp://{transport.host}:{port}" for port in ports]
        self._lock, self._wake, self._is_closed = threading.Lock(), os.pipe(), False
        self._state, self._is_stopped, self._limit = 1, False, UNLIMITED
        self._weights: dict[str, tuple[int, dict[str, Array]]] = {}
        self._workers: dict[str, str] = {}
        self._released: Counter[tuple[str, int]] = Counter()
        self._waiting: dict[bytes, dict[str, Any]] = {}
        self._thread = threading.Thread(target=self._run, name="stream-hub", daemon=True)
        self._thread.start()

    def publish(self, policy: str, version: int, weights: Weights) -> None:
        """See ParameterWriter."""
        copies = {name: np.array(array) for name, array in weights.items()}
        with self._changed():
            self._weights[policy] = version, copies

    def control(self, *, is_stopped: bool, limit: int = UNLIMITED) -> None:
        """See ParameterWriter."""
        with self._changed():
            self._is_stopped, self._limit = is_stopped, limit

    def release(self, sink: str, lane: int) -> None:
        """Allow a sink one more fragment of a lane."""
        with self._changed(is_for_all=False):
            self._released[sink, lane] += 1

    def close(self) -> None:
        """End the thread and the sockets."""
        with self._changed():
            self._is_closed = True
        self._thread.join()
        self._context.destroy(linger=0)
        for end in self._wake:
            os.close(end)

    @contextlib.contextmanager
    def _changed(self, *, is_for_all: bool = True) -> Any:
        with self._lock:
            yield
            self._state += is_for_all
        os.write(self._wake[1], b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._questions, zmq.POLLIN)
        poller.register(self._wake[0], zmq.POLLIN)
        while not self._is_closed:
            ready = dict(poller.poll(_LONGEST_MS))
            if self._wake[0] in ready:
                os.read(self._wake[0], 65536)
            while self._questions in ready and self._questions.poll(0):
                name, token, said = self._questions.recv_multipart()
                if secrets.compare_digest(token, self._token):
                    self._heard(name, json.loads(said))
            for name in list(self._waiting):
                self._answer(name)

    def _heard(self, name: bytes, question: dict[str, Any]) -> None:
        if "worker" in question:
            with self._lock:
                self._workers[question["worker"]] = question["address"]
                self._state += 1
        else:
            self._waiting[name] = question

    def _answer(self, name: bytes) -> None:
        question = self._waiting[name]
        with self._lock:
            released = [self._released[question["sink"], lane] for lane in range(question["ring"])]
            if question["state"] == self._state and question["released"] == released:
                return
            newer = {
                policy: self._weights[policy]
                for policy, version in question["versions"].items()
                if policy in self._weights and self._weights[policy][0] > version
            }
            said = {
                "state": self._state,
                "is_stopped": self._is_stopped,
                "limit": self._limit,
                "workers": self._workers,
                "released": released,
                "versions": {policy: version for policy, (version, _) in newer.items()},
            }
        del self._waiting[name]
        arrays = [array for _, weights in newer.values() for array in weights.values()]
        frames: list[Any] = [name, json.dumps(said).encode(), *arrays]
        self._questions.send_multipart(frames, copy=False)


class SocketReader:
    """Asks the hub for changes, with one question under way; see ParameterReader.

    Args:
        transport: the streams.
        versions: newest version of the weights it has, by policy; empty: it wants none.
        sink: name of the sink that it reads the credit of.
    """

    def __init__(self, transport: SocketTransport, versions: Mapping[str, int], sink: str = "") -> None:
        self._transport = transport
        self.socket = _socket(zmq.DEALER)
        self.socket.connect(transport.questions)
        self._ring = transport.spec.ring if sink else 0
        self._sink, self._versions = sink, dict(versions)
        self._known: dict[str, Any] = {
            "state": 0,
            "is_stopped": False,
            "limit": 0,
            "workers": {},
            "released": [0] * self._ring,
        }
        self._newest: dict[str, tuple[int, Weights]] = {}
        self._ask()

    @property
    def is_stopped(self) -> bool:
        """See ParameterReader."""
        return bool(self._look()["is_stopped"])

    @property
    def limit(self) -> int:
        """See ParameterReader."""
        return int(self._look()["limit"])

    @property
    def released(self) -> Sequence[int]:
        """Fragments of the sink that were released, by lane."""
        return list(self._look()["released"])

    @property
    def workers(self) -> dict[str, str]:
        """Addresses of the policy workers, by ``policy/worker``."""
        return dict(self._look()["workers"])

    def newest(self, policy: str, version: int) -> tuple[int, Weights] | None:
        """See ParameterReader."""
        self._look()
        found = self._newest.get(policy)
        return found if found is not None and found[0] > version else None

    def wait(self, seconds: float) -> None:
        """Wait until the hub has answered, at most this long."""
        self.socket.poll(int(seconds * 1000))

    def tell(self, said: Mapping[str, Any]) -> None:
        """Send a message that has no answer."""
        self.socket.send_multipart([self._transport.token, json.dumps(said).encode()])

    def _look(self) -> dict[str, Any]:
        while True:
            try:
                said, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return self._known
            self._known = json.loads(bytes(said.buffer))
            for policy, version in self._known["versions"].items():
                specs = self._transport.spec.weights[policy]
                own, frames = frames[: len(specs)], frames[len(specs) :]
                arrays = unpacked(own, specs.values())
                if arrays is not None:
                    weights = {name: array.copy() for name, array in zip(specs, arrays, strict=True)}
                    self._newest[policy] = version, weights
                    self._versions[policy] = version
            self._ask()

    def _ask(self) -> None:
        self.tell(
            {
                "state": self._known["state"],
                "released": self._known["released"],
                "versions": self._versions,
                "sink": self._sink,
                "ring": self._ring,
            }
        )


class SocketSink:
    """Sends fragments to the trainer; see FragmentSink."""

    def __init__(self, transport: SocketTransport, actor: int) -> None:
        self._spec, self._token, self._actor = transport.spec, transport.token, actor
        self._name = secrets.token_hex(8)
        self._reader = SocketReader(transport, {}, self._name)
        self._socket = _socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # the credit bounds it
        self._socket.connect(transport.samples)
        self._sent = [0] * self._spec.ring

    def reserve(self, lane: int) -> Mapping[str, Arrays] | None:
        """See FragmentSink."""
        if self._sent[lane] - self._reader.released[lane] >= self._spec.depth:
            return None
        return {
            policy: {name: spec.empty() for name, spec in layout.of_fragment(self._spec.steps).items()}
            for policy, layout in self._spec.layouts.items()
        }

    def put(self, lane: int, fragments: Mapping[str, Fragment]) -> None:
        """See FragmentSink."""
        episodes = {
            policy: [[each.total_reward, each.length, each.slot] for each in fragments[policy].episodes]
            for policy in self._spec.layouts
        }
        said = {"actor": self._actor, "lane": lane, "sink": self._name, "episodes": episodes}
        frames: list[Any] = [self._token, json.dumps(said).encode()]
        for policy in self._spec.layouts:
            frames += arrays_of(fragments[policy]).values()
        self._socket.send_multipart(frames, copy=False)
        self._sent[lane] += 1

    def sent(self, lane: int) -> int:
        """See FragmentSink; counts what this process sent."""
        return self._sent[lane]

    def wait(self, seconds: float) -> None:
        """See FragmentSink."""
        self._reader.wait(seconds)


class SocketSource:
    """Receives fragments; see FragmentSource."""

    def __init__(self, transport: SocketTransport, hub: _Hub) -> None:
        self._spec, self._token, self._hub = transport.spec, transport.token, hub
        self._numbers: Counter[tuple[int, int]] = Counter()
        self._layouts = {n: layout.of_fragment(self._spec.steps) for n, layout in self._spec.layouts.items()}

    def take(self, wait_s: float) -> list[Received]:
        """See FragmentSource."""
        found: list[Received] = []
        if self._hub.samples.poll(int(wait_s * 1000)):
            with contextlib.suppress(zmq.Again):
                while True:
                    frames = self._hub.samples.recv_multipart(zmq.NOBLOCK, copy=False)
                    if (received := self._received(frames)) is not None:
                        found.append(received)
        return found

    def _received(self, frames: Sequence[zmq.Frame]) -> Received | None:
        specs = [spec for layout in self._layouts.values() for spec in layout.values()]
        arrays = unpacked(frames[2:], specs)
        if arrays is None or not secrets.compare_digest(bytes(frames[0].buffer), self._token):
            return None
        said = json.loads(bytes(frames[1].buffer))
        actor, lane = said["actor"], said["lane"]
        fragments, rest = {}, iter(arrays)
        for policy, layout in self._layouts.items():
            episodes = [
                FinishedEpisode(total_reward=reward, length=length, slot=slot)
                for reward, length, slot in said["episodes"][policy]
            ]
            own = {name: next(rest) for name in layout}
            fragments[policy] = fragment_of(own, episodes=episodes, policy=policy, actor=actor)
        number = self._numbers[actor, lane]
        self._numbers[actor, lane] += 1
        return Received(
            actor=actor,
            lane=lane,
            number=number,
            fragments=fragments,
            release=_Once(partial(self._hub.release, said["sink"], lane)),
        )


class _Once:
    """A release that a repeated call does not repeat."""

    def __init__(self, release: Any) -> None:
        self._release = release

    def __call__(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


class SocketClient:
    """Asks policy workers for the actions of one actor's lanes; see ActingClient."""

    def __init__(self, transport: SocketTransport, policy: str, actor: int) -> None:
        self._spec, self._token, self._policy = transport.spec, transport.token, policy
        self._layout = self._spec.layouts[policy]
        self._first = actor * self._spec.ring
        self._reader = SocketReader(transport, {})
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._reader.socket, zmq.POLLIN)
        self._number = 0
        self._open: dict[int, tuple[int, list[Any], float]] = {}
        self._tries = {lane: self._first + lane for lane in range(self._spec.ring)}
        self._answers: dict[int, tuple[Acted, int]] = {}

    def layout(self, *_: object) -> ActingLayout:
        """See ActingClient."""
        return self._layout

    def post(self, lane: int, observations: Array, state: Array | None) -> None:
        """See ActingClient."""
        self._number += 1
        frames = [np.ascontiguousarray(each) for each in (observations, state) if each is not None]
        self._open[lane] = self._number, frames, time.monotonic()
        self._answers.pop(lane, None)
        self._ask(lane)

    def take(self, lane: int) -> tuple[Acted, int] | None:
        """See ActingClient."""
        self._receive()
        if lane in self._open:
            number, frames, asked_at = self._open[lane]
            if time.monotonic() - asked_at > RETRY_S:
                self._tries[lane] += 1
                self._open[lane] = number, frames, time.monotonic()
                self._ask(lane)
        return self._answers.pop(lane, None)

    def wait(self, seconds: float) -> None:
        """See ActingClient."""
        self._poller.poll(int(max(0.0, seconds) * 1000))

    def _ask(self, lane: int) -> None:
        addresses = {n: a for n, a in self._reader.workers.items() if n.startswith(f"{self._policy}/")}
        number, frames, _ = self._open[lane]
        if not addresses:
            self._open[lane] = number, frames, -RETRY_S  # asked again at the next look
            return
        address = addresses[sorted(addresses)[self._tries[lane] % len(addresses)]]
        if address not in self._sockets:
            made = _socket(zmq.DEALER)
            made.connect(address)
            self._sockets[address] = made
            self._poller.register(made, zmq.POLLIN)
        head = _HEAD.pack(number, self._first + lane, 0)
        with contextlib.suppress(zmq.Again):  # a dead worker's queue is full: asked again later
            self._sockets[address].send_multipart([self._token, head, *frames], zmq.NOBLOCK)

    def _receive(self) -> None:
        specs = [self._layout.actions, *self._layout.outputs.values()]
        specs += [spec_of(self._layout.initial)] if self._layout.initial is not None else []
        for each in self._sockets.values():
            with contextlib.suppress(zmq.Again):
                while True:
                    head, *frames = each.recv_multipart(zmq.NOBLOCK, copy=False)
                    number, lane, version = _HEAD.unpack(head.buffer)
                    lane -= self._first
                    arrays = unpacked(frames, specs)
                    if arrays is None or lane not in self._open or self._open[lane][0] != number:
                        continue
                    del self._open[lane]
                    outputs = dict(zip(self._layout.outputs, arrays[1:], strict=False))
                    state = None if self._layout.initial is None else arrays[-1]
                    self._answers[lane] = Acted(actions=arrays[0], outputs=outputs, state=state), version


class SocketServer:
    """Answers the requests that a policy worker receives; see ActingServer."""

    def __init__(self, transport: SocketTransport, policy: str, worker: int) -> None:
        self._layout, self._token = transport.spec.layouts[policy], transport.token
        self._socket = _socket(zmq.ROUTER)
        host = own_address(transport.host)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._teller = SocketReader(transport, {})
        self._teller.tell({"worker": f"{policy}/{worker}", "address": f"tcp://{host}:{port}"})
        self._names: dict[tuple[int, int], bytes] = {}

    def requests(self) -> ActingRequests | None:
        """See ActingServer."""
        specs = [self._layout.observations]
        specs += [spec_of(self._layout.initial)] if self._layout.initial is not None else []
        found: dict[tuple[int, int], list[Array]] = {}
        with contextlib.suppress(zmq.Again):
            while True:
                name, token, head, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                arrays = unpacked(frames, specs)
                if arrays is not None and secrets.compare_digest(bytes(token.buffer), self._token):
                    number, lane, _ = _HEAD.unpack(head.buffer)
                    found[number, lane] = arrays
                    self._names[number, lane] = bytes(name.buffer)
        if not found:
            return None
        has_state = self._layout.initial is not None
        return ActingRequests(
            observations=np.concatenate([arrays[0] for arrays in found.values()]),
            state=np.concatenate([arrays[1] for arrays in found.values()]) if has_state else None,
            numbers=np.array([number for number, _ in found]),
            lanes=np.array([lane for _, lane in found]),
        )

    def answer(self, requests: ActingRequests, acted: Acted, version: int) -> None:
        """See ActingServer."""
        arrays = [acted.actions, *(acted.outputs[name] for name in self._layout.outputs)]
        arrays += [acted.state] if acted.state is not None else []
        slots = self._layout.observations.shape[0]
        for place, key in enumerate(zip(requests.numbers.tolist(), requests.lanes.tolist(), strict=True)):
            part = slice(place * slots, (place + 1) * slots)
            frames: list[Any] = [self._names.pop(key), _HEAD.pack(*key, version)]
            frames += [np.ascontiguousarray(array[part]) for array in arrays]
            self._socket.send_multipart(frames)

    def wait(self, seconds: float) -> None:
        """See ActingServer."""
        self._socket.poll(int(max(0.0, seconds) * 1000))


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


def _socket(kind: int) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    return made

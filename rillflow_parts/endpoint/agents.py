"""AgentEngine: an engine whose rows are written by agents, functions that call it over HTTP.

    rows ─> a child each: solve(prompt, base_url, api_key, **columns) ── HTTP ─> Door ─> EngineQueue ─> engine
    row  <─ tokens sampled under its key <── it returned, raised, or timed out ──┘

Loop (``step``, in the thread of the sampler's rank)
    consumes      added rows; requests of agents; the ends of their calls
    waits for     if no row is being sampled: a request, a child's pipe, the next deadline of a child
    unblocked by  any of them; a child has ``timeout_s`` from its last answer, unless an answer is in progress
    produces      each row once: its conversation, with the return value or the agent's failure
    shuts down    ``close``: children and door end; the driver's death ends the children, kill -9 included
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rillflow.isolation.sandbox import Level
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rewards.child import START_LIMIT_S, Answer, Child, State, next_answers
from rillflow.rewards.function import FunctionPath, choose
from rillflow.rewards.outcome import FAILED, LOGGED, RETURNED, Outcome, Score
from rillflow.rewards.text_execution import is_shut_in
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine_wrapper import LONGEST_WAIT_S, EngineWrapper
from rillflow.serving.server import LoopbackServer, bound
from rillflow.tasks.encoded import Encoder
from rillflow_parts.endpoint.config import AgentConfig
from rillflow_parts.endpoint.conversation import Conversation
from rillflow_parts.endpoint.engine_queue import EngineQueue
from rillflow_parts.endpoint.openai_server import Door
from rillflow_parts.endpoint.tool_calls import tool_format

POLICY = "policy"
"""Model name at an agent's door."""


class AgentEngine(EngineWrapper):
    """An engine, and the agents that write its rows.

    Args: see EngineWrapper; and
        agent: its settings.
        function: the agent, called for every row.
        encoder: encodes the messages of requests.
    """

    def __init__(
        self,
        module: nn.Module,
        config: RolloutConfig,
        *,
        agent: AgentConfig,
        function: FunctionPath,
        encoder: Encoder,
        **given: Any,
    ) -> None:
        super().__init__(module, config, **given)
        self._agent, self._function, self._encoder = agent, function, encoder
        self._tools = tool_format(config.tool_format, encoder.tokenizer)
        self._queue = EngineQueue(self._inner, encoder.tokenizer, max_rows=config.max_rows)
        self._running: dict[Child, Conversation] = {}
        self._children: dict[Child, str] = {}  # with the URL of its door
        self._keys: dict[str, Conversation] = {}
        self._is_shut_in = is_shut_in(function, self._agent.sandbox, unless_harmless=False)
        self._door = Door(self._queue, model=POLICY, visitor=self._keys.get, tools=self._tools)
        self._shared_url = ""
        self._stack.callback(self.close)

    @property
    def has_work(self) -> bool:
        """See Engine."""
        return bool(self._waiting or self._running)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """See Engine."""
        self._queue.load(version, weights)

    def _clear(self) -> None:
        self._waiting.clear()
        for child in [*self._running]:
            self._leave(child)

    def step(self) -> list[Rollout]:
        """See Engine; run one pass, or wait for an agent."""
        self._begin()
        is_sampling = self._queue.turn()
        return [self._row(child, answer) for child, answer in self._ended(waits=not is_sampling)]

    def _taken_out(self, row: RowId) -> Rollout:
        child = next(child for child, talk in self._running.items() if talk.start.row == row)
        return self._leave(child).start

    def close(self) -> None:
        """End the children."""
        self._keys.clear()
        for child in self._children:
            child.stop()

    def _begin(self) -> None:
        """Give waiting rows to idle children."""
        alive = [child for child in self._children if child.state is not State.ENDED]
        self._children = {child: self._children[child] for child in alive}
        wanted = min(self._agent.workers, len(self._waiting) + len(self._running))
        while len(self._children) < wanted:
            self._start()
        for child in self._children:
            if self._waiting and child.state is State.IDLE:
                self._call(child, *self._waiting.popleft())

    def _start(self) -> None:
        """Start a child that reaches the door over its sandbox's network, or over this machine's."""
        room = self._agent.memory_bytes
        if not self._is_shut_in:
            self._shared_url = self._shared_url or self._serve(bound(0))
            self._children[Child(self._function, memory_bytes=room, level=Level.NONE)] = self._shared_url
            return
        ours, theirs = socket.socketpair()
        with ours, theirs:
            child = Child(self._function, memory_bytes=room, level=Level.FULL, door=theirs.fileno())
            self._children[child] = ""  # a child without a door has ended, and reports why
            theirs.close()
            ours.settimeout(START_LIMIT_S)
            descriptors = socket.recv_fds(ours, 16, 1)[1]
        if descriptors:
            self._children[child] = self._serve(socket.socket(fileno=descriptors[0]))

    def _serve(self, listening: socket.socket) -> str:
        return self._stack.enter_context(LoopbackServer(self._door.app(), listening)).url

    def _call(self, child: Child, start: Rollout, sampling: SamplingConfig) -> None:
        assert child.parameters is not None, "an idle child has reported its parameters"
        talk = Conversation(start, sampling, self._encoder, self._tools)
        given = {**json.loads(start.columns), "base_url": self._children[child], "api_key": talk.key}
        chosen = choose(given, child.parameters, self._function)
        self._keys[talk.key], self._running[child] = talk, talk
        child.send({"type": "run", "rows": 1, "columns": chosen}, limit_s=self._agent.timeout_s)

    def _ended(self, *, waits: bool) -> list[tuple[Child, Answer]]:
        """Return the calls that have ended; with ``waits``, wait for an event first."""
        for child, talk in self._running.items():
            child.deadline = math.inf if talk.is_asking else talk.since + self._agent.timeout_s
        until = time.monotonic() + (LONGEST_WAIT_S if waits and self._children else 0.0)
        ended = next_answers([*self._children], until, self._queue.woken)
        return [(child, answer) for child, answer in ended if child in self._running]

    def _row(self, child: Child, answer: Answer) -> Rollout:
        """Return the row of an agent that has ended."""
        talk = self._leave(child, is_over=True)
        row, columns = talk.row, {**json.loads(talk.start.columns), RETURNED: None}
        if isinstance(answer, Score):
            columns[FAILED] = (answer.outcome, f"the agent {answer.message}")
        elif not talk.is_begun:
            columns[FAILED] = (Outcome.ERROR, "the agent returned without a request to the policy")
        else:
            columns[RETURNED] = json.loads(answer[0].message)
            columns |= {LOGGED: answer[0].logged} if answer[0].logged else {}
        finish = Finish.LENGTH if FAILED in columns else row.finish
        return replace(row, columns=json.dumps(columns), finish=finish)

    def _leave(self, child: Child, *, is_over: bool = False) -> Conversation:
        """Stop writing a row and release its child's state."""
        talk = self._running.pop(child)
        del self._keys[talk.key]
        talk.is_left = True
        self._queue.wake()
        if not is_over:
            child.stop()
        return talk

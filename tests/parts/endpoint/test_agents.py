"""Agents: a function's samples under its key become one row; failures of agents are reported."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the door is the extra `service`")

from rillflow.models.language_model import LanguageModel
from rillflow.records.rollout import starts
from rillflow.rewards.function import parse_function
from rillflow.rewards.outcome import FAILED, RETURNED
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Engine
from rillflow.rollout.native.engine import NativeEngine
from rillflow_parts.endpoint.agents import AgentEngine
from rillflow_parts.endpoint.config import AgentConfig
from tests.parts.endpoint.conftest import around, check_sampled_once, columns_of, prompts

AGENT = """
import json, os, time
from http.client import HTTPConnection
from urllib.parse import urlsplit

def ask(base_url, key, path, **says):
    at = urlsplit(base_url)
    connection = HTTPConnection(at.hostname, at.port)
    connection.request("POST", at.path + path, json.dumps(says), {"Authorization": "Bearer " + key})
    answer = json.load(connection.getresponse())
    if "error" in answer:
        raise ValueError(answer["error"]["message"])
    return answer["choices"][0]

def talk(base_url, api_key, turns, **more):
    answer = ask(base_url, api_key, "/chat/completions", messages=turns, **more)
    return [*turns, answer["message"]]

async def solve(prompt, kind, base_url, api_key):
    turns = [{"role": "user", "content": prompt}]
    if kind == "raises":
        talk(base_url, api_key, turns, max_tokens=2)
        raise KeyError("oh")
    if kind == "hangs":
        talk(base_url, api_key, turns, max_tokens=2)
        time.sleep(60)
    if kind == "exits":
        os._exit(3)
    if kind == "silent":
        return 1
    if kind == "forgets":
        talk(base_url, api_key, turns, max_tokens=2)
        talk(base_url, api_key, [{"role": "user", "content": "9"}], max_tokens=2)
    if kind == "warm":
        talk(base_url, api_key, turns, temperature=0.25)
    if kind == "text":
        first = ask(base_url, api_key, "/completions", prompt=prompt, max_tokens=3, return_token_ids=True)
        ids = first["prompt_token_ids"] + first["token_ids"]
        ask(base_url, api_key, "/completions", prompt=ids + ids[:2], max_tokens=3)
        return "text"
    for said in ("1+1", "2+2"):
        turns = talk(base_url, api_key, turns, max_tokens=4, stop=["="])
        turns.append({"role": "tool", "content": said})
    turns = talk(base_url, api_key, turns)
    return [each["content"] for each in turns]
"""


class Sleeper(NativeEngine):
    """Tracks whether it sleeps."""

    is_asleep = False

    def sleep(self) -> None:
        self.is_asleep = True

    def wake(self) -> None:
        self.is_asleep = False


Agents = Callable[..., AgentEngine]


@pytest.fixture(scope="module")
def agents(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agent.py").write_text(AGENT)
    with ExitStack() as stack:

        def make(
            workers: int, timeout_s: float = 30.0, inner: Callable[..., Engine] = NativeEngine
        ) -> AgentEngine:
            agent = AgentConfig(function="agent.py:solve", workers=workers, timeout_s=timeout_s)
            return AgentEngine(
                model.module,
                RolloutConfig(max_tokens=12, max_rows=8, deterministic=True),
                agent=agent,
                function=parse_function(agent.function, folder, "agent"),
                stack=stack,
                stop_tokens=model.tokenizer.stop_tokens,
                **around(model, inner),
            )

        yield make


def test_several_turns_are_one_row_sampled_once_and_the_same_again(
    agents: Agents, model: LanguageModel
) -> None:
    for columns, pieces, mask in check_sampled_once(agents(workers=3), model, ["talks", "text", "talks"]):
        assert FAILED not in columns and 0 < sum(mask) <= 12
        if columns["kind"] == "talks":
            inserted = "".join(piece for piece, is_own in zip(pieces, mask, strict=True) if not is_own)
            assert inserted.count("<|end|> t:1+1<|end|> a:") + inserted.count(" t:1+1<|end|> a:") >= 1
            assert "".join(pieces).count("<|end|> t:") == 2, "an end is there once, sampled or inserted"
            spoken = columns[RETURNED][1::2]
            rest = "".join(piece for piece, is_own in zip(pieces, mask, strict=True) if is_own)
            assert rest.replace("=", "").replace("<|end|>", "") == "".join(spoken).replace("=", "")


FAILURES = {
    "raises": ("error", "the agent raised KeyError: 'oh' (agent.py, line 23, in solve: raise", 2),
    "hangs": ("timeout", "the agent gave no answer within 4 s", 2),
    "exits": ("error", "the agent exited with status 3", 0),
    "silent": ("error", "the agent returned without a request to the policy", 0),
    "forgets": ("error", 'message 1 is {"role": "user", "content": "9"}, but was {"role": "user", "con', 2),
    "warm": ("error", "temperature is 0.25, but this row's is 1.0; why: the recipe sets how", 0),
}
"""The message for an agent that fails this way, and the number of its sampled tokens."""


def test_an_agent_that_fails_is_told_and_the_others_go_on(agents: Agents, model: LanguageModel) -> None:
    engine = agents(workers=2, timeout_s=4.0)
    engine.load(0, {})
    found = engine.generate(prompts(model, [*FAILURES, "text"]))
    *failed, last = columns_of(found)
    *sampled, six = found.ragged("loss_mask").sums().tolist()
    for told, count, (outcome, message, tokens) in zip(failed, sampled, FAILURES.values(), strict=True):
        assert told[FAILED][0] == outcome and message in told[FAILED][1]
        assert told[RETURNED] is None and count == tokens
    assert last[RETURNED] == "text" and FAILED not in last and six == 6


def test_rows_are_taken_out_and_begun_again(agents: Agents, model: LanguageModel) -> None:
    engine = agents(workers=1)
    engine.load(0, {})
    alone = engine.generate(prompts(model, ["talks", "text"]), sampling=SamplingConfig(max_tokens=6))
    rows = starts(prompts(model, ["talks", "text"]), 1)
    for row in rows:
        engine.add(row, SamplingConfig(max_tokens=6))
    while not engine._running:
        engine.step()
    out = [engine.abort(each.row) for each in rows]
    assert out == rows and not engine.has_work
    for each in out:
        engine.add(each, SamplingConfig(max_tokens=6))
    ended: dict[Any, Any] = {}
    while engine.has_work:
        ended |= {each.row: each for each in engine.step()}
    assert [list(ended[each.row].tokens) for each in rows] == alone.ragged("tokens").lists()


def test_the_engine_that_agents_sample_with_sleeps_and_wakes(agents: Agents) -> None:
    engine = agents(workers=1, inner=Sleeper)
    inner = engine._inner
    assert isinstance(inner, Sleeper)
    engine.sleep()
    assert inner.is_asleep
    engine.wake()
    assert not inner.is_asleep


SHUT_IN = """
import json, os, socket, subprocess, sys
from http.client import HTTPConnection
from urllib.parse import urlsplit
from rillflow.rewards.programs import run_python

def solve(prompt, kind, base_url, api_key):
    at = urlsplit(base_url)
    connection = HTTPConnection(at.hostname, at.port)
    says = json.dumps({"messages": [{"role": "user", "content": prompt}], "max_tokens": 2})
    connection.request("POST", at.path + "/chat/completions", says, {"Authorization": "Bearer " + api_key})
    assert "choices" in json.load(connection.getresponse())
    try:
        socket.create_connection(("127.0.0.1", int(kind)), 1)
        return "reached the machine"
    except OSError:
        pass
    reach = f"import socket; socket.create_connection(({at.hostname!r}, {at.port}), 1); print('in')"
    kill = "import os; os.kill(os.getppid(), 9); open(f'/proc/{os.getppid()}/mem', 'r+b')"
    subprocess.run([sys.executable, "-c", kill], capture_output=True)
    return [run_python(reach).stdout, os.listdir(".")]
"""


def test_a_sandboxed_agent_reaches_its_door_and_nothing_else(model: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(SHUT_IN)
    (tmp_path / "prompts.jsonl").write_text("secret")
    agent = AgentConfig(function="agent.py:solve", workers=2, timeout_s=60.0)
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as machine:
        engine = AgentEngine(
            model.module,
            RolloutConfig(max_tokens=12, max_rows=8, deterministic=True),
            agent=agent,
            function=parse_function(agent.function, tmp_path, "agent"),
            stack=stack,
            stop_tokens=model.tokenizer.stop_tokens,
            **around(model),
        )
        port = str(machine.getsockname()[1])
        rows = engine.generate(prompts(model, [port, port, port]), samples=1)
    for columns in columns_of(rows):
        assert FAILED not in columns, columns[FAILED]
        assert columns[RETURNED] == ["", ["agent.py"]]

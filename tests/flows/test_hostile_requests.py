"""Hostile requests: each is refused with an error that names the value, and a normal client keeps its tokens.

The server is ``rillflow serve`` in its own process. Every case sends its request while a normal one runs.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("uvicorn", reason="the door is the extra `service`")

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from tests.flows.warm import Command

NEW = NewModel(hidden=32, layers=1, heads=2, kv_heads=1, context=128, alphabet="0123456789+=:asut ")
MORE_BYTES = 2**30
"""Largest growth of the server's peak over all cases, while it parses a request of 10 MiB."""
START_S = ANSWER_S = 60.0
POLITE = {"prompt": "1+2=", "max_tokens": 24, "temperature": 0, "return_token_ids": True}
P = {"prompt": "1"}
DEEP = "[" * 200 + "]" * 200
COMPLETIONS: list[tuple[str, Any, str]] = [
    *(
        (f"temperature {value}", {**P, "temperature": value}, f"temperature is {value}")
        for value in (1e-300, 1e-45, 1e-9, 0.0009, -1, 101, 1e308)
    ),
    ("temperature text", {**P, "temperature": "1"}, "temperature is 1"),
    ("temperature list", {**P, "temperature": [1]}, "temperature is [1]"),
    ("temperature true", {**P, "temperature": True}, "temperature is True"),
    *((f"top_p {value}", {**P, "top_p": value}, f"top_p is {value}") for value in (0, -0.5, 1.5, 1e300)),
    *((f"min_p {value}", {**P, "min_p": value}, f"min_p is {value}") for value in (0, -1, 2)),
    *(
        (f"top_k {value}", {**P, "top_k": value}, f"top_k is {value}")
        for value in (-1, 2**31, 2**63, 10**30, 0.5)
    ),
    *(
        (f"repetition {value}", {**P, "repetition_penalty": value}, f"repetition_penalty is {value}")
        for value in (0, -1, 1e-300, 1e5, 1e308)
    ),
    *(
        (f"presence {value}", {**P, "presence_penalty": value}, f"presence_penalty is {value}")
        for value in (1e5, -1e5, 1e308)
    ),
    *(
        (f"frequency {value}", {**P, "frequency_penalty": value}, f"frequency_penalty is {value}")
        for value in (1e5, -1e5, 1e308)
    ),
    *(
        (f"max_tokens {value}", {**P, "max_tokens": value}, f"max_tokens is {value}")
        for value in (0, -1, 1.5)
    ),
    *((f"n {value}", {**P, "n": value}, f"n is {value}") for value in (0, -1, 129, 10**9, 2.5)),
    ("too many rows", {"prompt": ["1"] * 600, "n": 2}, "600 prompts with n = 2 are 1,200 rows"),
    ("a million prompts", {"prompt": ["1"] * 10**6}, "1000000 prompts"),
    ("no prompt", {}, "prompt is"),
    ("prompt null", {"prompt": None}, "prompt is"),
    ("no prompts", {"prompt": []}, "prompt is []"),
    ("empty text", {"prompt": ""}, "the request has an empty prompt"),
    ("empty tokens", {"prompt": [[]]}, "the request has an empty prompt"),
    ("prompt number", {"prompt": 7}, "prompt"),
    ("prompt object", {"prompt": {"a": 1}}, "prompt"),
    ("mixed prompts", {"prompt": ["1", 2]}, "prompt"),
    ("token -1", {"prompt": [-1]}, "the request has token -1"),
    ("token 10^6", {"prompt": [10**6]}, "the request has token 1000000"),
    ("token 2^70", {"prompt": [2**70]}, f"the request has token {2**70}"),
    ("token 1.5", {"prompt": [1.5]}, "prompt"),
    ("second prompt", {"prompt": [[1], [10**6]]}, "prompt 2 of the request has token 1000000"),
    ("long tokens", {"prompt": [1] * 1000}, "the request has 1000 tokens"),
    ("a million tokens", {"prompt": [1] * 10**6}, "the request has 1000000 tokens"),
    ("long text", {"prompt": "1" * 200}, "the request has 200 tokens"),
    ("ten megabytes", {"prompt": "1+" * 5 * 10**6}, "has 10,000,000 characters"),
    ("unknown character", {"prompt": "#"}, "no character '#'"),
    ("U+202E", {"prompt": "\u202e"}, "no character"),
    ("NUL", {"prompt": "1\0"}, "no character"),
    *(
        (f"surrogate {place}", {**P, **says}, "has U+D800 at index")
        for place, says in {
            "prompt": {"prompt": "1\ud800"},
            "stop": {"stop": "\ud800"},
            "user": {"user": "\ud800"},
            "model": {"model": "\ud800"},
            "key": {"\ud800": 1},
            "prompts": {"prompt": ["1", "\ud800"]},
        }.items()
    ),
    ("low surrogate", {"prompt": "\udfff"}, "has U+DFFF at index 0"),
    ("17 stops", {**P, "stop": ["1"] * 17}, "at most 16 texts"),
    ("a million stops", {**P, "stop": ["1"] * 10**6}, "at most 16 texts"),
    ("long stop", {**P, "stop": "1" * 1001}, "at most 16 texts of at most 1,000 characters"),
    ("stop number", {**P, "stop": 1}, "stop"),
    ("stop objects", {**P, "stop": [{}]}, "stop"),
    ("model", {**P, "model": "x" * 10**5}, "there is no model 'xxxx"),
    ("logprobs", {**P, "logprobs": 5}, "logprobs is 5"),
    ("stream text", {**P, "stream": "yes"}, "stream is yes"),
    ("stream_options", {**P, "stream_options": [1]}, "stream_options is [1]"),
    ("unknown", {**P, "temprature": 1}, "did you mean 'temperature'?"),
    ("long name", {**P, "x" * 10**5: 1}, "there is no parameter 'xxxx"),
    *(
        (name, {**P, name: {"a": "1" * 10**5}}, f"{name} is not supported")
        for name in ("logit_bias", "best_of", "suffix", "top_logprobs", "response_format", "min_tokens")
    ),
    ("seed text", {**P, "seed": "1"}, "seed is 1"),
    ("seed 2^70", {**P, "seed": 2**70}, "seed is"),
    ("echo number", {**P, "echo": 1}, "echo is 1"),
    ("echo stream", {**P, "echo": True, "logprobs": 1, "stream": True}, "stream is True"),
    ("metadata list", {**P, "metadata": [1]}, "metadata is [1]"),
    ("store text", {**P, "store": "yes"}, "store is yes"),
]
CHATS: list[tuple[str, Any, str]] = [
    ("no messages", {}, "messages is"),
    ("messages []", {"messages": []}, "the prompt is []"),
    ("messages text", {"messages": "hi"}, "messages is hi"),
    ("message text", {"messages": ["hi"]}, "messages.0 is hi"),
    ("role", {"messages": [{"role": "usr", "content": "1"}]}, "did you mean 'user'?"),
    ("role list", {"messages": [{"role": [], "content": "1"}]}, "has the role []"),
    ("content number", {"messages": [{"role": "user", "content": 5}]}, "has the content 5"),
    ("image", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "has the content"),
    ("last is the assistant's", {"messages": [{"role": "assistant", "content": "1"}]}, "last message"),
    ("another key", {"messages": [{"role": "user", "content": "1", "x": 1}]}, "message 1 of the prompt"),
    ("tools", {"messages": [{"role": "user", "content": "1"}], "tools": [1]}, "tools"),
    *(
        (f"{name} {value}", {"messages": [{"role": "user", "content": "1"}], name: value}, name)
        for name, value in {
            "tool_choice": "required",
            "parallel_tool_calls": "no",
            "chat_template_kwargs": {"tokenize": 1},
            "reasoning_effort": [1],
            "tools": [{"type": "function", "function": {"name": 1}}],
        }.items()
    ),
    ("calls text", {"messages": [{"role": "assistant", "tool_calls": "x"}] * 2}, "tool_calls is a list"),
    ("calls of 1", {"messages": [{"role": "assistant", "tool_calls": [1]}] * 2}, "tool_calls is a list"),
    (
        "deep arguments",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}],
                },
                {"role": "user", "content": "1"},
            ]
        },
        "has 100,119 characters",
    ),
    ("special token", {"messages": [{"role": "user", "content": "<|end|>"}]}, "no chat template"),
    ("surrogate", {"messages": [{"role": "user", "content": "\ud800"}]}, "has U+D800"),
    ("long", {"messages": [{"role": "user", "content": "1" * 10**6}]}, "characters"),
    (
        "deep tools",
        {"messages": [{"role": "user", "content": "1"}], "tools": [{"a": json.loads(DEEP)}]},
        "nested deeper than 64 levels",
    ),
]
RESPONSES: list[tuple[str, Any, str]] = [
    ("no input", {}, "input is"),
    ("input number", {"input": 1}, "input"),
    ("input of 1", {"input": [1]}, "input"),
    ("item", {"input": [{"type": "x" * 10**5}]}, "has the type"),
    ("call of nothing", {"input": [{"type": "function_call"}, {"role": "user", "content": "1"}]}, "template"),
    ("output of nothing", {"input": [{"type": "function_call_output"}]}, "message 1 of the prompt"),
    ("part", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "has the content"),
    ("earlier", {"input": "1", "previous_response_id": "x"}, "previous_response_id is not supported"),
    ("format", {"input": "1", "text": {"format": {"type": "json_object"}}}, "the format is text"),
    ("tool", {"input": "1", "tools": [{"type": "mcp"}]}, "a tool is"),
]
RAW: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "not JSON"),
    ("text", b"hello", "not JSON"),
    ("half", b'{"prompt": ', "not JSON"),
    ("list", b"[]", "the request is not a JSON object"),
    ("number", b"1", "the request is not a JSON object"),
    ("NaN", b'{"prompt": "1", "temperature": NaN}', "temperature is nan"),
    ("Infinity", b'{"prompt": "1", "presence_penalty": Infinity}', "presence_penalty is inf"),
    ("1e999", b'{"prompt": "1", "temperature": 1e999}', "temperature is inf"),
    ("digits", b'{"prompt": "1", "top_k": ' + b"9" * 5000 + b"}", "not JSON"),
    ("deep", b"[" * 10**5 + b"]" * 10**5, "not JSON"),
    ("deep prompt", b'{"prompt": ' + DEEP.encode() + b"}", "nested deeper than 64 levels"),
    ("deeper object", b'{"a":' * 900 + b"1" + b"}" * 900, "nested deeper than 64 levels"),
    ("not UTF-8", b'{"prompt": "\xff"}', "not JSON"),
    ("raw surrogate", b'{"prompt": "\xed\xa0\x80"}', "has U+D800 at index 0"),
    ("zeros", b"\0" * 1000, "not JSON"),
    ("17 MiB", b" " * (17 * 2**20), "a body of 17825792 bytes"),
]
CASES = {
    **{
        f"completions: {name}": ("/completions", json.dumps(says).encode(), told)
        for name, says, told in COMPLETIONS
    },
    **{f"chat: {name}": ("/chat/completions", json.dumps(says).encode(), told) for name, says, told in CHATS},
    **{
        f"responses: {name}": ("/responses", json.dumps(says).encode(), told)
        for name, says, told in RESPONSES
    },
    **{f"raw: {name}": ("/completions", body, told) for name, body, told in RAW},
}
EVERY_DAY = (
    "completions: temperature 1e-300",
    "completions: repetition 1e+308",
    "completions: n 1000000000",
    "completions: a million tokens",
    "completions: surrogate stop",
    "chat: deep tools",
    "chat: special token",
    "raw: digits",
    "raw: deep",
    "raw: NaN",
)
PARAMETERS = [
    pytest.param(*case, marks=() if name in EVERY_DAY else pytest.mark.slow, id=name)
    for name, case in CASES.items()
]


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server in its own process."""

    url: str
    """Its address."""
    token: str
    """The client's bearer token."""
    pid: int
    """Its process id."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of its process so far."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


@contextmanager
def serving(model: Path) -> Iterator[Server]:
    """Run ``rillflow serve`` on a model's directory; it must still run at the end."""
    token = model.parent / "token"
    words = ["serve", str(model), "--port", "0", "--token-file", str(token)]
    command = Command(words, model.parent / "said.txt")
    try:
        until = time.monotonic() + START_S
        while "token: written to" not in command.said:
            assert command.poll() is None and time.monotonic() < until, command.said
            time.sleep(0.02)
        found = re.search(r"http://\S+", command.said)
        assert found is not None, command.said
        yield Server(url=found[0], token=token.read_text(), pid=command.pid)
        assert command.poll() is None, "the door has ended"
    finally:
        command.kill()


def saved(folder: Path) -> Path:
    model = load_model(ModelConfig(new=NEW), seed=3, device=torch.device("cpu"), base=Path())
    save_model(model, folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(saved(tmp_path_factory.mktemp("hostile"))) as server:
        yield server


def answered(door: Server, path: str, body: bytes) -> tuple[int, Any]:
    at = urlsplit(door.url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=ANSWER_S)
    connection.request("POST", f"{at.path}{path}", body, {"Authorization": f"Bearer {door.token}"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def polite(door: Server) -> list[int]:
    status, found = answered(door, "/completions", json.dumps(POLITE).encode())
    assert status == 200
    tokens: list[int] = found["choices"][0]["token_ids"]
    return tokens


@dataclass(frozen=True, kw_only=True)
class Before:
    """Results of a normal client before any hostile request."""

    tokens: list[int]
    """Its tokens."""
    peak_bytes: int
    """The server's peak at that time."""


@pytest.fixture(scope="module")
def before(door: Server) -> Before:
    return Before(tokens=polite(door), peak_bytes=door.peak_bytes)


def test_there_are_a_hundred() -> None:
    assert len(CASES) >= 100 and set(EVERY_DAY) <= set(CASES)


@pytest.mark.parametrize(("path", "body", "told"), PARAMETERS)
def test_a_hostile_request_is_refused_and_reaches_no_other_client(
    door: Server, before: Before, path: str, body: bytes, told: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(polite, door)
        status, found = answered(door, path, body)
        assert other.result() == before.tokens
    message = found["error"]["message"]
    assert status in (400, 404, 413) and told in message, (status, message[:300])
    assert "epoch" not in message and len(message) < 2_000
    assert door.peak_bytes < before.peak_bytes + MORE_BYTES


def overflowing(model: Path, token: int) -> None:
    """Make the logits of each row with a token overflow, and leave all other rows unchanged.

    Only that token's embedding writes a hidden state's first number, which the head multiplies.
    """
    file = model / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone()
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    embedding[:, 0] = 0.0
    embedding[token] = 0.0
    embedding[token, 0] = 1.0
    weights["lm_head.weight"][:, 0] = 3e38
    save_file(weights, file, {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


@pytest.mark.slow
def test_logits_that_are_not_finite_end_their_own_request_alone(tmp_path: Path) -> None:
    model = saved(tmp_path)
    overflowing(model, NEW.alphabet.index("9") + 1)
    with serving(model) as door, ThreadPoolExecutor(4) as pool:
        tokens = polite(door)
        others = [pool.submit(polite, door) for _ in range(8)]
        for _ in range(3):
            hostile = {"prompt": "1+9", "max_tokens": 24}
            status, found = answered(door, "/completions", json.dumps(hostile).encode())
            assert status >= 400 and "not finite" in found["error"]["message"]
            others.append(pool.submit(polite, door))
        assert [each.result() for each in others] == [tokens] * len(others)

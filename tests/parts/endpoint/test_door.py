"""The door: OpenAI's protocol, with token ids and log probabilities as sampled."""

from __future__ import annotations

import http.client
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

pytest.importorskip("uvicorn", reason="the door is the extra `service`")

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.records.rollout import Rollout
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Capability, Stops
from rillflow.rollout.native.engine import NativeEngine
from rillflow.serving.server import LoopbackServer, bound
from rillflow.tasks.encoded import Encoder
from rillflow_parts.endpoint.engine_queue import EngineQueue
from rillflow_parts.endpoint.openai_server import Door, NewRows
from rillflow_parts.endpoint.text_scores import text_scores
from rillflow_parts.endpoint.tool_calls import Tags

KEY = secrets.token_urlsafe(16)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
NEW = NewModel(hidden=32, layers=1, heads=2, kv_heads=1, context=1024, alphabet="0123456789+=:asut ")


class Passes(NativeEngine):
    """Counts passes and the largest number of rows; fails at the prompt that it must refuse."""

    count = most = 0
    refused: Sequence[int] = ()

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        if rollout.tokens == self.refused:
            raise KeyError(rollout.tokens)
        super().add(rollout, sampling)

    def step(self) -> list[Any]:
        self.count += 1
        self.most = max(self.most, sum(len(worker._scheduler.running) for worker in self._workers))
        return super().step()


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = load_model(ModelConfig(new=NEW), seed=3, device=torch.device("cpu"), base=Path())
    with torch.no_grad():
        for name, weight in made.module.named_parameters():
            if "layers" in name and weight.ndim == 2:
                weight.mul_(30)  # a fresh model repeats its last token, whatever precedes it
    made.tokenizer._library.chat_template = TEMPLATE
    yield made
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def door(model: LanguageModel) -> Iterator[tuple[str, Passes]]:
    usual = RolloutConfig(max_tokens=12, max_rows=16)
    stops = Stops((), model.tokenizer)
    engine = Passes(
        model.module,
        usual,
        stop_tokens=stops.tokens,
        seed=5,
        context=model.context,
        workers=1,
        record_after=1e9,
    )
    queue = EngineQueue(engine, model.tokenizer, max_rows=usual.max_rows)
    queue.load(7, {})
    visitor = NewRows(Encoder(tokenizer=model.tokenizer, context=model.context), usual)
    app = Door(
        queue,
        model="tiny",
        visitor=lambda key: visitor if key == KEY else None,
        tools=Tags(has_xml=True),
        scores=partial(text_scores, model.module),
    ).app()
    going = True

    def passes() -> None:
        while going:
            if not queue.turn():
                time.sleep(0.002)

    thread = Thread(target=passes)
    thread.start()
    with LoopbackServer(app, bound(0)) as server:
        yield server.url, engine
    going = False
    thread.join()
    queue.close()


def asked(url: str, path: str, says: Any = None, key: str = KEY) -> tuple[int, Any]:
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=30)
    headers = {"Authorization": f"Bearer {key}"}
    body = None if says is None else json.dumps(says)
    connection.request("GET" if says is None else "POST", f"{at.path}{path}", body, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return answer.status, [json.loads(each) for each in events[:-1]] if len(events) > 1 else json.loads(text)


def test_tokens_and_log_probabilities_are_those_that_were_sampled(
    door: tuple[str, Passes], model: LanguageModel
) -> None:
    says = {"prompt": "1+2=", "n": 3, "logprobs": 0, "return_token_ids": True, "temperature": 0.7}
    status, found = asked(door[0], "/completions", says)
    assert (status, found["system_fingerprint"], found["model"]) == (200, "version 7", "tiny")
    assert [each["index"] for each in found["choices"]] == [0, 1, 2]
    assert found["usage"]["prompt_tokens"] == 4
    for choice in found["choices"]:
        tokens = choice["prompt_token_ids"] + choice["token_ids"]
        assert choice["prompt_token_ids"] == model.tokenizer.encode("1+2=")
        assert choice["text"] == model.tokenizer.decode(choice["token_ids"])
        assert set(choice["versions"]) == {7} and len(choice["token_ids"]) <= 12
        with torch.inference_mode():
            logits = model.module(torch.tensor([tokens]), use_cache=False).logits[0, 3:-1]
        own = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(own.tolist(), abs=1e-4)


def test_prompts_may_be_several_and_tokens(door: tuple[str, Passes], model: LanguageModel) -> None:
    tokens = [model.tokenizer.encode(text) for text in ("1+2=", "3+4=")]
    says = {"prompt": tokens, "temperature": 0, "max_tokens": 5}
    _, by_tokens = asked(door[0], "/completions", says)
    _, by_text = asked(door[0], "/completions", {**says, "prompt": ["1+2=", "3+4="]})
    assert [each["text"] for each in by_tokens["choices"]] == [each["text"] for each in by_text["choices"]]
    assert by_text["usage"] == {"prompt_tokens": 8, "completion_tokens": 10, "total_tokens": 18}


def test_a_text_is_scored_as_the_module_scores_it(door: tuple[str, Passes], model: LanguageModel) -> None:
    """Two prompts with one new token each, as lm-eval asks for the likelihood of a text."""
    texts = ["1+2=3", "4+4=8+1"]
    says = {"prompt": texts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    status, found = asked(door[0], "/completions", {**says, "return_token_ids": True})
    assert status == 200
    for text, choice in zip(texts, found["choices"], strict=True):
        told, tokens = choice["logprobs"], choice["prompt_token_ids"] + choice["token_ids"]
        assert choice["text"].startswith(text) and told["tokens"] == model.tokenizer.pieces(tokens)
        with torch.inference_mode():
            logits = model.module(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
        read = logits.log_softmax(-1)
        own = read.gather(1, torch.tensor(tokens)[1:, None])[:, 0].tolist()
        assert told["token_logprobs"] == [None, *(pytest.approx(each, abs=1e-4) for each in own)]
        top = [max(each.values()) for each in told["top_logprobs"][1:]]
        assert top == pytest.approx(read.amax(-1).tolist(), abs=1e-4)
        likeliest = (read.argmax(-1) == torch.tensor(tokens)[1:]).tolist()
        own_is_top = [a == b for a, b in zip(told["token_logprobs"][1:], top, strict=True)]
        assert own_is_top == likeliest and own_is_top[-1], "the new token is greedy"
        assert told["text_offset"][:3] == [0, 1, 2]
    _, nothing = asked(door[0], "/completions", {**says, "max_tokens": 0})
    for before, after in zip(found["choices"], nothing["choices"], strict=True):
        assert after["text"] == before["text"][: len(after["text"])]
        scores, expected = (each["logprobs"]["token_logprobs"][1:] for each in (after, before))
        assert scores == pytest.approx(expected[:-1], abs=1e-5), "passes may round differently"


def test_a_seed_chooses_the_answer(door: tuple[str, Passes]) -> None:
    says = {"prompt": "1+2=", "max_tokens": 8, "temperature": 2.0, "n": 2}
    with ThreadPoolExecutor(4) as pool:
        seeds = [7, 7, 8, 7]
        found = list(pool.map(lambda seed: asked(door[0], "/completions", {**says, "seed": seed})[1], seeds))
    texts = [[choice["text"] for choice in each["choices"]] for each in found]
    assert texts[0] == texts[1] == texts[3] != texts[2] and texts[0][0] != texts[0][1]


def test_what_is_unlikely_may_be_left_out_and_what_was_said_made_unlikelier(door: tuple[str, Passes]) -> None:
    says = {"prompt": "1+2=", "max_tokens": 8, "return_token_ids": True}
    _, greedy = asked(door[0], "/completions", {**says, "temperature": 0})
    _, likely = asked(door[0], "/completions", {**says, "min_p": 1})
    assert likely["choices"][0]["token_ids"] == greedy["choices"][0]["token_ids"]
    for name, value in (("presence_penalty", 1e4), ("frequency_penalty", 1e4), ("repetition_penalty", 1e4)):
        _, found = asked(door[0], "/completions", {**says, "temperature": 0, name: value})
        tokens = found["choices"][0]["token_ids"]
        assert len(set(tokens)) == len(tokens) > 1, name
    assert len(set(greedy["choices"][0]["token_ids"])) < len(greedy["choices"][0]["token_ids"])


def test_values_that_switch_a_rule_off_are_accepted(door: tuple[str, Passes]) -> None:
    says = {"prompt": "1+2=", "max_tokens": 8, "temperature": 2.0, "seed": 7}
    code, plain = asked(door[0], "/completions", says)
    assert code == 200
    for off in ({"min_p": 0}, {"min_p": 0.0}, {"top_k": -1}, {"top_k": 0}, {"top_p": 1, "min_p": 0}):
        code, found = asked(door[0], "/completions", {**says, **off})
        assert code == 200 and found["choices"][0]["text"] == plain["choices"][0]["text"], off
    for wrong in ({"top_k": -2}, {"top_k": True}, {"min_p": -0.1}):
        assert asked(door[0], "/completions", {**says, **wrong})[0] == 400, wrong


@pytest.mark.parametrize(
    ("says", "lacks"),
    [({"temperature": 0}, "GREEDY"), ({"min_p": 0.1}, "CUT"), ({"presence_penalty": 1}, "PENALTIES")],
)
def test_an_engine_that_cannot_draw_so_says_what_it_can(
    door: tuple[str, Passes], monkeypatch: pytest.MonkeyPatch, says: Any, lacks: str
) -> None:
    lacking = Capability[lacks]
    monkeypatch.setattr(door[1], "can", NativeEngine.can - {lacking})
    code, found = asked(door[0], "/completions", {"prompt": "1", **says})
    assert code == 400 and f"cannot {lacking}; why: it can" in found["error"]["message"]


def test_a_chat_goes_through_the_template_and_a_stream_says_the_same(
    door: tuple[str, Passes], model: LanguageModel
) -> None:
    says = {"messages": [{"role": "user", "content": "1+2"}], "max_tokens": 40, "temperature": 0}
    says |= {"logprobs": True, "return_token_ids": True}
    _, found = asked(door[0], "/chat/completions", says)
    (choice,) = found["choices"]
    prompt = model.tokenizer._encode(["u:1+2<|end|>a:"], begin=False, is_rendered=True)[0]
    assert choice["prompt_token_ids"] == prompt
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    pieces = [each["token"] for each in choice["logprobs"]["content"]]
    assert pieces == model.tokenizer.pieces(choice["token_ids"])
    streamed = {**says, "stream": True, "stream_options": {"include_usage": True}}
    _, events = asked(door[0], "/chat/completions", streamed)
    parts = [each["choices"][0] for each in events[:-1]]
    assert len(parts) > 2 and {each["object"] for each in events} == {"chat.completion.chunk"}
    assert "".join(each["delta"]["content"] for each in parts) == choice["message"]["content"]
    assert [token for each in parts for token in each["token_ids"]] == choice["token_ids"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert all(each["finish_reason"] is None for each in parts[:-1])
    assert events[-1]["usage"] == found["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_ends_an_answer_at_its_token_and_is_no_part_of_its_text(
    door: tuple[str, Passes], model: LanguageModel, stream: bool
) -> None:
    says = {"prompt": "1+2=", "temperature": 0, "max_tokens": 60, "return_token_ids": True}
    _, found = asked(door[0], "/completions", says)
    text = found["choices"][0]["text"]
    stop = text[19:22]
    _, ended = asked(door[0], "/completions", {**says, "stop": ["never", stop], "stream": stream})
    parts = [each["choices"][0] for each in ended] if stream else ended["choices"]
    assert "".join(each["text"] for each in parts) == text[: text.index(stop)]
    assert parts[-1]["finish_reason"] == "stop"
    tokens = [token for each in parts for token in each["token_ids"]]
    assert model.tokenizer.decode(tokens) == text[: text.index(stop) + 3]


def test_many_clients_run_side_by_side(door: tuple[str, Passes]) -> None:
    url, engine = door
    engine.count = engine.most = 0
    says = {"prompt": "1+2=", "max_tokens": 400, "temperature": 5.0}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: asked(url, "/completions", says)[1], range(8)))
    tokens = sum(each["usage"]["completion_tokens"] for each in found)
    assert engine.most >= 3 and engine.count < tokens / 2


def test_a_client_that_goes_away_takes_its_rows_along(door: tuple[str, Passes]) -> None:
    url, engine = door
    at = urlsplit(url)
    says = {"prompt": "1+2=", "max_tokens": 1000, "temperature": 5.0, "n": 16}
    connection = http.client.HTTPConnection(at.hostname or "", at.port)
    connection.request("POST", "/v1/completions", json.dumps(says), {"Authorization": f"Bearer {KEY}"})
    until = time.monotonic() + 20
    while not engine.has_work and time.monotonic() < until:
        time.sleep(0.002)
    before = engine.count
    connection.close()
    while engine.has_work and time.monotonic() < until:
        time.sleep(0.01)
    assert not engine.has_work and engine.count - before < 900


@pytest.mark.parametrize(
    ("path", "says", "status", "told"),
    [
        ("/completions", {"prompt": "1", "temprature": 1}, 400, "did you mean 'temperature'?"),
        ("/completions", {"prompt": "1", "suffix": "2"}, 400, "suffix is not supported; why: it belongs to"),
        ("/completions", {"prompt": "1", "n": 0}, 400, "n is 0; why: Input should be greater"),
        ("/completions", {"prompt": "#"}, 400, "the tokeniser has no character '#'"),
        ("/completions", {"prompt": []}, 400, "prompt is []"),
        (
            "/completions",
            {"prompt": [[1000]]},
            400,
            "has token 1000, at position 0; why: the model's vocabulary",
        ),
        ("/completions", {"prompt": "1" * 2000}, 400, "has 2000 tokens; why: the context is 1024"),
        ("/completions", {"prompt": "1", "model": "tinny"}, 404, "there is no model 'tinny'"),
        ("/chat/completions", {"messages": []}, 400, "the prompt is []"),
        ("/chat/completions", {"messages": [{"role": "usr", "content": "1"}]}, 400, "did you mean 'user'?"),
        ("/embeddings", {"input": "1"}, 404, "there is no endpoint POST /v1/embeddings"),
    ],
)
def test_what_cannot_be_is_told_in_openai_s_form(
    door: tuple[str, Passes], path: str, says: Any, status: int, told: str
) -> None:
    code, found = asked(door[0], path, says)
    assert code == status and set(found) == {"error"}
    assert told in found["error"]["message"] and found["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("prompt", "name"), [("7+7=", "the request"), (["1+1=", "7+7="], "prompt 2 of the request")]
)
def test_the_prompt_that_an_engine_fails_at_is_named(
    door: tuple[str, Passes], model: LanguageModel, monkeypatch: pytest.MonkeyPatch, prompt: Any, name: str
) -> None:
    monkeypatch.setattr(door[1], "refused", tuple(model.tokenizer.encode("7+7=")))
    code, found = asked(door[0], "/completions", {"prompt": prompt, "n": 2, "max_tokens": 4})
    assert (code, found["error"]["type"]) == (500, "server_error")
    assert f"the engine failed on {name};" in found["error"]["message"]


def test_a_body_of_more_than_16_mib_is_refused_by_its_length(door: tuple[str, Passes]) -> None:
    at = urlsplit(door[0])
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=30)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Length": str(2**24 + 1)}
    connection.request("POST", f"{at.path}/completions", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 413
    assert "the limit is 16777216" in json.loads(answer.read())["error"]["message"]
    connection.close()


def test_a_key_is_needed_and_the_model_is_named(door: tuple[str, Passes]) -> None:
    code, found = asked(door[0], "/completions", {"prompt": "1"}, key="wrong")
    assert (code, found["error"]["type"]) == (401, "authentication_error")
    code, found = asked(door[0], "/models")
    assert (code, found["data"][0]["id"], found["data"][0]["version"]) == (200, "tiny", 7)

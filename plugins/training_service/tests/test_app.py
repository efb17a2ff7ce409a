"""App: the endpoints over HTTP, as a client without the Tinker package sees them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rillflow_training_service.checkpoints import CheckpointPath
from rillflow_training_service.datums import Datum
from rillflow_training_service.sessions import HEARTBEAT_S
from rillflow_training_service.wire import CONTENT_TYPE, message, read_message

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Served
from toys import asked, body_of, encoded, weighted

ROWS = [weighted([1, 2, 3, 4], 2), weighted([1, 2, 5], 2)]


def forward_backward(served: Served, body: bytes) -> dict[str, Any]:
    headers = {"content-type": CONTENT_TYPE}
    answer = served.http.post("/api/v1/forward_backward", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def error_of(served: Served, told: dict[str, Any]) -> str:
    found = served.result(told).json()
    assert found["category"] == "user", found
    return str(found["error"])


def test_a_client_trains_saves_and_samples(served: Served) -> None:
    session = served.session()
    model = served.trained(session)
    info = served.post("get_info", model_id=model)
    assert info["lora_rank"] == 4 and info["model_data"]["tokenizer_id"] == str(served.model)
    losses = []
    for seq in (1, 3, 5):
        told = forward_backward(served, body_of(asked(model, ROWS, seq=seq)))
        answer = served.result(told)
        assert answer.headers["content-type"] == CONTENT_TYPE
        found = read_message("PassOutput", answer.content)
        losses.append({each.key: each.value for each in found.metrics}["loss:sum"])
        step = served.post("optim_step", model_id=model, seq_id=seq + 1, adam_params={"learning_rate": 0.05})
        assert served.result(step).json()["metrics"]["grad_norm:mean"] > 0
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    saved = served.result(served.post("save_weights", model_id=model, seq_id=7, path="one")).json()["path"]
    assert saved == f"tinker://{model}/weights/one"
    runs = served.http.get("/api/v1/training_runs").json()["training_runs"]
    assert saved in [each["last_checkpoint"]["tinker_path"] for each in runs if each["last_checkpoint"]]
    assert served.post("weights_info", tinker_path=saved)["lora_rank"] == 4
    archive = served.http.get(f"/api/v1/training_runs/{model}/checkpoints/weights/one/archive")
    assert b"adapter_model.safetensors" in archive.content
    kept = served.post("save_weights_for_sampler", model_id=model, seq_id=8, sampling_session_seq_id=0)
    sampler = served.result(kept).json()["sampling_session_id"]
    samples = read_message("SampleOutput", served.result(sample(served, sampler)).content)
    assert len(samples.sequences) == 2
    assert served.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/one").status_code == 204
    assert served.http.post("/api/v1/weights_info", json={"tinker_path": saved}).status_code == 400


def sample(served: Served, sampler: str, seq: int = 0, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": more.pop("tokens", [1, 2])}]}
    how = {"num_samples": 2, "sampling_params": {"max_tokens": 3}, "prompt": prompt, **more}
    told = served.post("asample", sampling_session_id=sampler, seq_id=seq, **how)
    assert len(told["sample_sequence_ids"]) == how["num_samples"]
    return told


def base_sampler(served: Served) -> str:
    asked_for = {
        "session_id": served.session(),
        "sampling_session_seq_id": 0,
        "base_model": served.model.name,
    }
    found: str = served.post("create_sampling_session", **asked_for)["sampling_session_id"]
    return found


def test_a_retry_is_not_executed_again(served: Served) -> None:
    model = served.trained(served.session())
    body = body_of(asked(model, ROWS))
    first, again = forward_backward(served, body), forward_backward(served, body)
    assert first == again and served.result(first).content == served.result(again).content
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    told = served.post("optim_step", **step)
    norm = served.result(told).json()
    assert served.post("optim_step", **step) == told and served.result(told).json() == norm
    other = served.post("optim_step", **{**step, "adam_params": {"learning_rate": 0.2}})
    assert "two requests" in error_of(served, other)


def test_both_prompts_and_their_order_are_free(served: Served) -> None:
    """Chunks of one batch arrive in any order; the later one waits."""
    model = served.trained(served.session())
    second = forward_backward(served, body_of(asked(model, ROWS[1:], seq=2)))
    first = forward_backward(served, body_of(asked(model, ROWS[:1], seq=1)))
    assert all(served.result(each).headers["content-type"] == CONTENT_TYPE for each in (first, second))


@pytest.mark.parametrize(
    ("tokens", "params", "words"),
    [
        ([1, 99], {}, "token 99"),
        ([], {}, "empty prompt"),
        ([1] * 40, {}, "the context is 32"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_p": 2.0}, "top_p"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"stop": 3}, "stop is 3"),
    ],
)
def test_sampling_requests_that_are_refused(
    served: Served, tokens: list[int], params: dict[str, Any], words: str
) -> None:
    told = sample(served, base_sampler(served), tokens=tokens, sampling_params={"max_tokens": 2, **params})
    assert words in error_of(served, told)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": "magic"}, "there is no loss 'magic'"),
        ({"data": []}, "has no data"),
        (
            {"data": encoded([Datum(tokens=torch.tensor([99]), targets=torch.tensor([1]), inputs={})])},
            "token 99",
        ),
        ({"data": encoded(ROWS, {"weights": torch.full((3,), torch.nan)})}, "weights of datum 0 is nan"),
        ({"data": encoded(ROWS, {"advantages": torch.ones(3)})}, "does not read"),
    ],
)
def test_passes_that_are_refused(served: Served, change: dict[str, Any], words: str) -> None:
    model = served.trained(served.session())
    how: dict[str, Any] = {"model_id": model, "seq_id": 1, "loss": "cross_entropy", "data": encoded(ROWS)}
    told = forward_backward(served, bytes(message("Pass", **{**how, **change}).SerializeToString()))
    assert words in error_of(served, told)
    step = served.post("optim_step", model_id=model, seq_id=2, adam_params={})
    assert "was not applied" in error_of(served, step)


def test_odd_requests_become_errors_in_words(served: Served) -> None:
    session = served.session()
    model = {"session_id": session, "model_seq_id": 0, "base_model": served.model.name}
    lora = {"lora_config": {"rank": 2}}
    for asked_for, words in (
        ({**model, "base_model": "gpt-5", **lora}, "there is no base model 'gpt-5'"),
        (model, "no lora_config"),
        ({**model, "lora_config": {"rank": 0}}, "rank is 0"),
        ({**model, **lora, "optimizer_config": {"type": "dimuon"}}, "there is no optimizer"),
        ({**model, "session_id": "x", **lora}, "there is no session"),
    ):
        answer = served.http.post("/api/v1/create_model", json=asked_for)
        said = answer.text if answer.status_code != 200 else error_of(served, answer.json())
        assert words in said
    told = forward_backward(served, body_of(asked("nobody", ROWS)))
    assert "there is no model 'nobody'" in error_of(served, told)
    load = {"session_id": session, "model_seq_id": 5, "optimizer": True}
    for path, words in (
        ("nowhere", "is not a checkpoint"),
        ("tinker://a/weights/b", "there is no checkpoint"),
    ):
        assert words in error_of(served, served.post("load_weights", **load, path=path))
    null = {"learning_rate": None}
    trained = served.trained(session, 7)
    assert "learning_rate is nan" in error_of(
        served, served.post("optim_step", model_id=trained, seq_id=1, adam_params=null)
    )
    assert "../x" in error_of(served, served.post("save_weights", model_id=trained, seq_id=2, path="../x"))


def test_keys_paths_and_bodies(served: Served) -> None:
    assert served.http.get("/api/v1/healthz").json() == {"status": "ok"}
    assert served.http.get("/api/v1/checkpoints", headers={"X-API-Key": "tml-wrong"}).status_code == 401
    assert served.http.get("/api/v1/nothing").status_code == 404
    assert served.http.post("/api/v1/create_session", content=b"{").status_code == 400
    zstd = served.http.post("/api/v1/forward_backward", content=b"x", headers={"content-encoding": "zstd"})
    assert zstd.status_code == 415
    told = served.http.post("/api/v1/asample", content=b"{").json()
    assert "not JSON" in error_of(served, told) and told["sample_sequence_ids"] == []
    assert "not a forward_backward" in error_of(served, forward_backward(served, b"\xff\xff"))


def test_a_finished_session_is_gone(served: Served) -> None:
    session = served.session()
    model = served.trained(session)
    assert served.http.post(f"/api/v1/sessions/{session}/finish", json={"reason": {}}).status_code == 200
    assert served.http.post("/api/v1/session_heartbeat", json={"session_id": session}).status_code == 410
    assert "its client finished it" in error_of(served, forward_backward(served, body_of(asked(model, ROWS))))


def test_openai_s_paths_sample_the_base(served: Served) -> None:
    key = {"Authorization": "Bearer a-token-of-the-tests"}
    answer = served.http.post("/v1/completions", json={"prompt": "1+", "max_tokens": 2}, headers=key)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] is not None


def test_a_silent_client_loses_its_model_and_keeps_its_checkpoint(served: Served) -> None:
    """The client was last heard long ago; the server looks for silent ones every 5 s."""
    session = served.session()
    model = served.trained(session)
    served.result(forward_backward(served, body_of(asked(model, ROWS))))
    saved = served.result(served.post("save_weights", model_id=model, seq_id=2, path="kept")).json()["path"]
    waits = served.post("optim_step", model_id=model, seq_id=9, adam_params={})
    served.app.sessions.all[session].heard -= 2 * HEARTBEAT_S
    until = time.monotonic() + 60
    while not served.app.sessions.all[session].ended and time.monotonic() < until:
        time.sleep(0.2)
    assert served.http.post("/api/v1/session_heartbeat", json={"session_id": session}).status_code == 410
    assert "no heartbeat for 120 s; its checkpoints remain" in error_of(served, waits)
    step = served.post("optim_step", model_id=model, seq_id=3, adam_params={})
    assert "no heartbeat for 120 s" in error_of(served, step)
    load = {"session_id": served.session(), "model_seq_id": 0, "path": saved, "optimizer": True}
    again = served.result(served.post("load_weights", **load)).json()["model_id"]
    told = forward_backward(served, body_of(asked(again, ROWS)))
    assert served.result(told).headers["content-type"] == CONTENT_TYPE


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("asample", {"num_samples": 10**9}, "num_samples is 1000000000"),
        ("asample", {"num_samples": 0}, "num_samples is 0"),
        ("asample", {"num_samples": True}, "num_samples is True"),
        ("asample", {"num_samples": 1.0}, "num_samples is 1.0"),
        ("asample", {"prompt": {"chunks": [{"tokens": [0.5] * 10**6}]}}, "prompt.chunks.0.tokens.0 is 0.5"),
        ("save_weights", {"ttl_seconds": 10**30}, "ttl_seconds is 1000000000000"),
        ("save_weights", {"ttl_seconds": -1}, "ttl_seconds is -1"),
        ("optim_step", {"adam_params": {"learning_rate": 1e308}}, "adam_params.learning_rate is 1e+308"),
        ("create_model", {"lora_config": {"rank": 10**9}}, "lora_config.rank is 1000000000"),
        ("create_model", {"lora_config": {"rank": 16_000}}, "parameters, and the limit is"),
    ],
)
def test_numbers_beyond_their_bounds_cost_nothing(
    served: Served, name: str, more: dict[str, Any], words: str
) -> None:
    session = served.session()
    model = served.trained(session)
    usual = {
        "asample": {"sampling_session_id": "none", "seq_id": 0, "prompt": {"chunks": []}},
        "save_weights": {"model_id": model, "seq_id": 1, "path": "a"},
        "optim_step": {"model_id": model, "seq_id": 1},
        "create_model": {"session_id": session, "model_seq_id": 9, "base_model": served.model.name},
    }
    assert words in error_of(served, served.post(name, **{**usual[name], **more}))


@pytest.mark.parametrize("stop", ["a" * 10**6, ["a"] * 10**3, [1] * 2000, [-1], [1.5], [""]])
def test_stops_beyond_their_bounds_are_refused(served: Served, stop: Any) -> None:
    told = error_of(served, sample(served, base_sampler(served), sampling_params={"stop": stop}))
    assert ("stop" in told or "values" in told) and len(told) < 1000


DAMAGES: dict[str, bytes] = {
    "cut": b'{"path": "tink',
    "another type": b"[1]",
    "deep": b"[" * 10**5,
    "a time that is none": b"EXPIRES",
    "not text": b"\xff\xfe",
    "empty": b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_hides_no_other(served: Served, damage: str) -> None:
    model = served.trained(served.session())
    for seq, name in ((1, "good"), (2, "bad"), (3, "later")):
        served.result(served.post("save_weights", model_id=model, seq_id=seq, path=name))
    checkpoints = served.app._service.checkpoints
    folder = checkpoints.folder(CheckpointPath.parsed(f"tinker://{model}/weights/bad"))
    file = folder / "checkpoint.json"
    said = DAMAGES[damage]
    if damage == "a time that is none":
        said = json.dumps({**json.loads(file.read_bytes()), "expires_at": "tomorrow"}).encode()
    file.write_bytes(said)
    checkpoints.delete_expired()
    for path in (f"training_runs/{model}/checkpoints", "checkpoints?limit=1000"):
        told = served.http.get(f"/api/v1/{path}").json()["checkpoints"]
        mine = {each["checkpoint_id"]: each for each in told if model in each["tinker_path"]}
        assert [*mine] and {"weights/good", "weights/bad", "weights/later"} == {*mine}
        assert "cannot be read" in mine["weights/bad"]["user_metadata"]["damaged"]
        assert mine["weights/good"]["user_metadata"] is None
    assert served.http.get("/api/v1/training_runs").status_code == 200
    assert served.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/bad").status_code == 204
    assert not folder.exists()


def test_a_lifetime_beyond_the_calendar_is_refused(served: Served) -> None:
    model = served.trained(served.session())
    served.result(served.post("save_weights", model_id=model, seq_id=1, path="one"))
    at = f"/api/v1/training_runs/{model}/checkpoints/weights/one/ttl"
    for seconds in (10**12, 10**30, -1, 0, True, "1"):
        answer = served.http.put(at, json={"ttl_seconds": seconds})
        assert answer.status_code == 400 and "ttl_seconds is" in answer.text, seconds
    assert served.http.put(at, json={"ttl_seconds": 10**9}).status_code == 204

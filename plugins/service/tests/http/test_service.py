"""The service: streams over HTTP as over the wire; whatever else comes is an error that says something."""

from __future__ import annotations

import gc
import http.client
import json
import random
import re
import socket
import string
import threading
import time
import warnings
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rillflow.errors import StreamError
from rillflow_service.http_client import ServiceClient
from rillflow_service.tensors import decoded, encoded

COLUMNS = {
    "prompt": {"dtype": "int64", "ragged": True, "per": "group"},
    "tokens": {"dtype": "int64", "ragged": True},
    "reward": {"dtype": "float32"},
}
STAGES = [
    {"name": "sample", "reads": ["prompt"], "writes": ["tokens", "reward"]},
    {"name": "train", "reads": ["prompt", "tokens", "reward"], "order": "in_order"},
]
NUMBERS = count()
PROMPTS = (np.arange(5), np.array([2, 3]))


def stream(client: ServiceClient) -> str:
    name = f"s{next(NUMBERS)}"
    client.create(name, columns=COLUMNS, stages=STAGES, capacity=16)
    return name


def raw(folder: Path, method: str, path: str, body: Any = b"", **headers: str) -> tuple[int, dict[str, Any]]:
    """A request as anybody may make it."""
    connection = http.client.HTTPConnection("localhost", timeout=20.0)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(folder / "socket"))
    token = {"Authorization": f"Bearer {(folder / 'token').read_text()}"}
    connection.request(
        method, path, body, {**token, **{name.replace("_", "-"): it for name, it in headers.items()}}
    )
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    return answer.status, json.loads(found) if found[:1] == b"{" else {}


def test_a_body_is_a_safetensors_file() -> None:
    arrays = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.zeros((0, 2)), "c": np.array([True])}
    read = safetensors.numpy.load(encoded({"stream": "s"}, arrays))
    assert {name: array.tolist() for name, array in read.items()} == {
        name: a.tolist() for name, a in arrays.items()
    }
    says, found = decoded(safetensors.numpy.save(dict(arrays), {"request": '{"stream": "t"}'}))
    assert says == {"stream": "t"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_groups_go_from_who_begins_them_through_a_sampler_to_a_trainer(folder: Path) -> None:
    task, sampler, trainer = (ServiceClient(folder, name=name) for name in ("task", "sampler", "trainer"))
    name = stream(task)
    assert task.begin(name, {"prompt": PROMPTS}, rows=[1, 2]) == [0, 1]
    taken = sampler.take(name, "sample", 8)
    assert taken is not None and taken.rows.tolist() == [1, 2]
    prompts = taken.columns["prompt"]
    assert isinstance(prompts, tuple) and [each.tolist() for each in prompts] == [[0, 1, 2, 3, 4], [2, 3]]
    own = {"tokens": (np.arange(6), np.array([1, 2, 3])), "reward": np.array([0.5, 1, 2], np.float32)}
    with pytest.raises(StreamError, match="sampler holds it"):
        trainer.done(taken, own)
    with pytest.raises(StreamError, match="'reward' is missing"):
        sampler.done(taken, {"tokens": own["tokens"]})
    with pytest.raises(StreamError, match="rows of version 999"):
        sampler.done(taken, own, version=999)
    sampler.done(taken, own, version=0)
    with pytest.raises(StreamError, match="does not hold group 0"):
        sampler.done(taken, own, version=0)
    batch = trainer.take(name, "train", 8)
    assert batch is not None and isinstance(reward := batch.columns["reward"], np.ndarray)
    assert reward.tolist() == [0.5, 1, 2]
    trainer.done(batch)
    with pytest.raises(StreamError, match="trainer cannot close") as caught:
        trainer.close(name)
    assert caught.value.why == "task created it"
    task.close(name)
    assert trainer.take(name, "train", 8) is None


def test_who_waits_is_told_for_whom_and_a_stage_that_never_takes_is_named(folder: Path) -> None:
    client = ServiceClient(folder, name="trainer")
    name = stream(client)
    client.begin(name, {"prompt": PROMPTS}, rows=[1, 1])
    with pytest.raises(StreamError, match="group 0 is ready for sample: no worker ever took a group"):
        client.take(name, "train", 1, wait_s=0.1)
    assert "no worker ever took" in client.status(name)["waits"]["train"]
    killed = client.take(name, "sample", 2, lease_s=0.3)
    again = ServiceClient(folder, name="heir").take(name, "sample", 2, wait_s=30)
    assert killed is not None and again is not None and again.ids.tolist() == [0, 1]


def test_what_a_client_took_that_has_hung_up_goes_to_another(folder: Path) -> None:
    task = ServiceClient(folder, name="task")
    name = stream(task)
    gone = socket.socket(socket.AF_UNIX)
    gone.connect(str(folder / "socket"))
    body = json.dumps({"stream": name, "stage": "sample", "count": 2}).encode()
    head = f"Authorization: Bearer {(folder / 'token').read_text()}\r\nContent-Length: {len(body)}"
    gone.sendall(f"POST /v1/take HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
    time.sleep(0.3)
    gone.close()
    time.sleep(0.1)
    for _ in range(2):
        assert task.begin(name, {"prompt": PROMPTS}, rows=[1, 1], key="once") == [0, 1]
    taken = ServiceClient(folder, name="heir").take(name, "sample", 2, wait_s=30)
    assert taken is not None and taken.ids.tolist() == [0, 1]


def test_weights_reach_whoever_waits_for_newer_ones_and_never_go_back(folder: Path) -> None:
    trainer, sampler = ServiceClient(folder, name="trainer"), ServiceClient(folder, name="sampler")
    assert sampler.get_weights(wait_s=0) is None
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(sampler.get_weights(newer_than=0, wait_s=30)))
    trainer.put_weights(0, {"w": np.zeros(2, np.float32)})
    waiting.start()
    time.sleep(0.2)
    trainer.put_weights(1, {"w": np.ones(2, np.float32)})
    waiting.join(30.0)
    version, weights = found[0]
    assert version == 1 and weights["w"].tolist() == [1, 1]
    for version in (1, 3, 10**11):
        with pytest.raises(StreamError, match="version 1 is published"):
            trainer.put_weights(version, {"w": np.zeros(2, np.float32)})
    for weights, said in (
        ({"w": np.array([1, np.nan], np.float32)}, "weight 'w' of version 2 is not finite"),
        ({"v": np.zeros(2, np.float32)}, "weight 'v' of version 2 is"),
        ({"w": np.zeros(3, np.float32)}, r"weight 'w' of version 2 is \[.F32., \[3\]\]"),
    ):
        with pytest.raises(StreamError, match=said):
            trainer.put_weights(2, weights)
    trainer.put_weights(2, {"w": np.zeros(2, np.float32)})
    newest = sampler.get_weights(newer_than=1)
    assert newest is not None and newest[0] == 2


@pytest.mark.parametrize("token", ["", "x", "é"])
def test_nobody_without_the_token_is_answered(folder: Path, token: str) -> None:
    for method, path in (("GET", "/openapi.json"), ("POST", "/v1/look"), ("PUT", "/v1/weights?version=9")):
        status, said = raw(
            folder, method, path, Authorization=f"Bearer {token}".encode("latin-1").decode("latin-1")
        )
        assert (status, said["what"]) == (401, "the token is wrong")


def test_a_body_of_4_gb_is_refused_where_it_is_announced(folder: Path) -> None:
    status, said = raw(folder, "POST", "/v1/begin", iter([]), Content_Length=str(4 * 2**30))
    assert status == 413 and "4294967296 bytes" in said["what"]
    status, said = raw(folder, "POST", "/v1/take", b" " * 70_000)
    assert status == 413


@pytest.mark.parametrize(
    ("operation", "body", "said"),
    [
        ("look", b"[]", "is not a JSON object"),
        ("look", b"\xff", "is not JSON"),
        ("look", b'{"stream":"nosuch"}', "no stream 'nosuch'"),
        ("take", b'{"stream":"nosuch","stage":"a","count":0}', "count is 0"),
        ("take", b'{"stream":"nosuch","stage":"a","count":1,"counts":2}', "counts is 2"),
        ("create", b'{"stream":"x","capacity":4,"columns":{"a":{"dtype":"object"}},"stages":[]}', "0 stages"),
        ("begin", b"", "a header of"),
        ("begin", b"\xff" * 64, "a header of"),
        ("begin", encoded({"stream": "nosuch"}, {}), "no stream 'nosuch'"),
        ("begin", encoded({"stream": "nosuch"}, {"x": np.zeros(3)})[:-1], "has wrong offsets"),
        (
            "begin",
            encoded({"stream": "nosuch"}, {"x": np.zeros(3)}) + b"1",
            "1 bytes that belong to no array",
        ),
        ("done", encoded({"stream": "nosuch", "lease": 1}, {".ids": np.zeros(3)}), "ids are float64"),
        ("drop", encoded({"stream": "nosuch"}, {}), "reason is"),
    ],
)
def test_bad_requests_are_answered_with_what_is_wrong(
    folder: Path, operation: str, body: bytes, said: str
) -> None:
    status, found = raw(folder, "POST", f"/v1/{operation}", body)
    assert status == 422 and said in found["what"], found


@pytest.mark.parametrize("rows", [[1, 1, 1], [1, -1], [2]])
def test_columns_of_another_length_than_the_rows_are_refused(folder: Path, rows: list[int]) -> None:
    client = ServiceClient(folder, name="task")
    name = stream(client)
    with pytest.raises(StreamError, match=r"lengths' is int64|groups of"):
        client.begin(name, {"prompt": PROMPTS}, rows=rows)
    assert client.status(name)["begun"] == 0


def test_a_client_of_an_older_version_is_told(folder: Path) -> None:
    status, said = raw(folder, "POST", "/v0/look", b"{}")
    assert status == 404 and "v1" in said["why"]


def value(schema: dict[str, Any], defs: dict[str, Any], draw: random.Random) -> Any:
    """Anything a schema allows, or now and then something that it does not."""
    if draw.random() < 0.1:
        return draw.choice([None, -1, 2**70, 1.5, "", "x" * 100, [], {}, [[]], True])
    if "$ref" in schema:
        return value(defs[schema["$ref"].rpartition("/")[2]], defs, draw)
    if "anyOf" in schema:
        return value(draw.choice(schema["anyOf"]), defs, draw)
    if "enum" in schema:
        return draw.choice(schema["enum"])
    match schema.get("type"):
        case "object":
            named = {
                key: value(it, defs, draw)
                for key, it in schema.get("properties", {}).items()
                if draw.random() < 0.8
            }
            more = schema.get("additionalProperties")
            return named | ({"x": value(more, defs, draw)} if isinstance(more, dict) else {})
        case "array":
            return [value(schema.get("items", {}), defs, draw) for _ in range(draw.randrange(3))]
        case "integer":
            return draw.choice([0, 1, draw.randrange(2**33)])
        case "number":
            return draw.choice([0, 0.01])
        case "string":
            return draw.choice(["s", "x", "sample", "".join(draw.choices(string.printable, k=5))])
        case "boolean":
            return draw.random() < 0.5
    return None


def document(folder: Path) -> dict[str, Any]:
    status, found = raw(folder, "GET", "/openapi.json")
    assert status == 200 and found["openapi"].startswith("3.1")
    return found


def test_whatever_the_document_allows_is_answered_as_it_says_and_the_service_lives(folder: Path) -> None:
    told = document(folder)
    defs, draw, codes = told["components"]["schemas"], random.Random(1), set()
    client = ServiceClient(folder, name="witness")
    name = stream(client)
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            for _ in range(40):
                query = {
                    each["name"]: value(each["schema"], {}, draw) for each in operation.get("parameters", ())
                }
                query |= {"wait_s": 0} if "wait_s" in query else {}
                at = {each: query.pop(each) for each in ("version", "file") if "{" + each + "}" in path}
                where = path.format(**{key: quote(str(found), safe="") for key, found in at.items()})
                query |= (
                    {"version": -1 - draw.randrange(9)} if draw.random() < 0.7 and "version" in query else {}
                )
                body = b""
                for kind, media in operation.get("requestBody", {"content": {}})["content"].items():
                    schema = defs.get(media["schema"].get("$ref", "").rpartition("/")[2], {})
                    says = value(schema, defs, draw) if schema else {}
                    if isinstance(says, dict):
                        says |= {"wait_s": 0} if "wait_s" in schema.get("properties", {}) else {}
                        says |= {"stream": name} if draw.random() < 0.5 else {}
                    ids = {".ids": np.array(draw.choices([-1, 0, 9], k=2)), "prompt": np.zeros(2)}
                    body = json.dumps(says).encode() if kind.endswith("json") else encoded(says, ids)
                status, said = raw(folder, method.upper(), f"{where}?{urlencode(query)}", body)
                codes.add(status)
                assert str(status) in operation["responses"], (method, path, query, body, status)
                assert status < 400 or said["what"]
    assert codes >= {200, 204, 409, 422} and client.status(name)["begun"] == 0


def valid(name: str) -> dict[str, bytes]:
    """A body of every operation that the service would carry out, or refuse for what it says."""
    columns = {"prompt": np.arange(3), "prompt.lengths": np.array([1, 2]), ".rows": np.array([1, 1])}
    says = {"stream": name, "stage": "sample", "count": 1, "wait_s": 0, "lease_s": 0}
    return {
        "create": json.dumps({"stream": name, "columns": COLUMNS, "stages": STAGES, "capacity": 16}).encode(),
        "begin": encoded({"stream": name, "wait_s": 0}, columns),
        "take": json.dumps(says).encode(),
        "done": encoded({"stream": name, "lease": 1}, {".ids": np.array([0]), "x": np.zeros(3)}),
        "return": json.dumps({"stream": name, "lease": 1}).encode(),
        "drop": encoded({"stream": name, "reason": "seen"}, {".ids": np.array([0, 0, 1])}),
        "look": json.dumps({"stream": name}).encode(),
        "weights?version=-1": json.dumps({"files": ["x.safetensors"]}).encode(),
        "weights/99/x.safetensors": encoded({}, {"w": np.zeros(2)}),
    }


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_request_that_is_damaged_anywhere_is_answered_and_the_service_lives(
    folder: Path, data: st.DataObject
) -> None:
    client = ServiceClient(folder, name="witness")
    client.create("damaged", columns=COLUMNS, stages=STAGES, capacity=16)
    path, body = data.draw(st.sampled_from([*valid("damaged").items()]))
    method = data.draw(st.sampled_from(["POST", "PUT", "GET", "PATCH", "DELETE", "OPTIONS", "NOSUCH"]))
    at, patch = data.draw(st.integers(0, len(body))), data.draw(st.binary(max_size=12))
    body = body[:at] + patch + body[at + data.draw(st.integers(0, 12)) :]
    headers = {
        "X_Rillflow_Client": data.draw(st.text("ab/ \xff", max_size=80)).strip() or "x",
        "Content_Type": data.draw(st.sampled_from(["application/json", "text/html", "multipart/form-data"])),
    }
    path = data.draw(st.sampled_from([path, path.upper(), path + "%00", "../" + path]))
    status, said = raw(folder, method, f"/v1/{path}", body, **headers)
    assert status < 500 and (status < 400 or said["what"]), (method, path, body, status)
    assert client.status("damaged")["capacity"] == 16


@pytest.mark.parametrize(
    ("columns", "rows", "said"),
    [
        ({"prompt": (np.arange(3.0), np.array([1, 2]))}, [1, 1], "column 'prompt' is float64"),
        ({"prompt": (np.arange(4), np.array([1, 2]))}, [1, 1], r"column 'prompt' is int64 \[4\]"),
        ({"prompt": (np.arange(3), np.array([4, -1]))}, [1, 1], "prompt.lengths has the length -1"),
        ({"prompt": np.arange(2)}, [1, 1], "'prompt.lengths' is missing"),
        ({"prompt": PROMPTS, "tokens": PROMPTS}, [1, 1], "'tokens' is not for this writer"),
    ],
)
def test_columns_of_another_type_or_length_are_refused(
    folder: Path, columns: dict[str, Any], rows: list[int], said: str
) -> None:
    client = ServiceClient(folder, name="task")
    name = stream(client)
    with pytest.raises(StreamError, match=said):
        client.begin(name, columns, rows=rows)
    assert client.status(name)["begun"] == 0


def test_rows_that_are_said_twice_begin_once_and_are_done_once(folder: Path) -> None:
    client = ServiceClient(folder, name="sampler")
    name = stream(client)
    assert [client.begin(name, {"prompt": PROMPTS}, rows=[1, 1], key="k") for _ in range(2)] == [[0, 1]] * 2
    taken = client.take(name, "sample", 2)
    assert taken is not None
    twice = replace(taken, ids=np.array([0, 0]))
    own = {"tokens": (np.arange(2), np.array([1, 1])), "reward": np.zeros(2, np.float32)}
    with pytest.raises(StreamError, match="one group as done twice"):
        client.done(twice, own)
    client.done(taken, own)
    with pytest.raises(StreamError, match="does not hold group 0"):
        client.done(taken, own)
    assert client.status(name)["stages"]["sample"]["done"] == 2


def half_sent(folder: Path, sent: bytes) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(60.0)
    end.connect(str(folder / "socket"))
    end.sendall(sent)
    return end


def slow_heads(folder: Path) -> list[bytes]:
    token = f"Authorization: Bearer {(folder / 'token').read_text()}\r\n"
    return [
        b"",
        b"POST /v1/look HT",
        f"POST /v1/look HTTP/1.1\r\nHost: x\r\n{token}".encode(),
        f"POST /v1/begin HTTP/1.1\r\nHost: x\r\n{token}Content-Length: 99\r\n\r\n{{".encode(),
    ]


def test_requests_that_never_end_hold_up_nobody(folder: Path) -> None:
    ends = [half_sent(folder, each) for each in slow_heads(folder) for _ in range(20)]
    client = ServiceClient(folder, name="quick")
    began = time.monotonic()
    name = stream(client)
    assert client.status(name)["begun"] == 0 and time.monotonic() - began < 10.0
    for each in ends:
        each.close()
    assert client.status(name)["begun"] == 0


@pytest.mark.slow
def test_requests_that_never_end_are_ended(folder: Path) -> None:
    heads = slow_heads(folder)
    ends = [half_sent(folder, each) for each in heads]
    for end in ends[:3]:
        assert end.recv(1000) == b""
    answer = b""
    while b"body's 99" not in answer and (more := ends[3].recv(4000)):  # its head comes apart from its body
        answer += more
    assert answer.startswith(b"HTTP/1.1 408") and b"only 1 of the body's 99 bytes" in answer


def test_every_schema_that_the_document_names_is_in_it_once(folder: Path) -> None:
    told = document(folder)
    text = json.dumps(told)
    assert "$defs" not in text
    named = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert named == set(told["components"]["schemas"]) > {"ColumnType", "StageColumns", "Take", "Publish"}
    names = ("create", "begin", "take", "done", "return", "drop", "look", "weights")
    assert {f"/v1/{name}" for name in names} <= set(told["paths"])


def test_a_request_leaves_no_connection_open(folder: Path) -> None:
    client = ServiceClient(folder, name="tidy")
    gc.collect()  # what earlier tests have left
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        name = stream(client)
        with pytest.raises(StreamError):
            client.create("not a name", columns=COLUMNS, stages=STAGES, capacity=1)
        gc.collect()
    assert name and [str(each.message) for each in said] == []

"""The rollout engine whose rows other programs sample: what it takes, refuses, and hands out."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("starlette", reason="the service is the extra `service`")

from rillflow.app.engine_sources import engine_source
from rillflow.errors import RolloutError, StreamError, WeightError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Stops, engine_class
from rillflow.workers.backend import Place, Site
from rillflow.workers.collectives import SingleRank
from rillflow_service import engine
from rillflow_service.config import ServiceConfig
from rillflow_service.engine import ServiceEngine

PROMPTS = ([1, 2, 3], [4, 5], [6])
MOST = 4


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    new = NewModel(
        hidden=16, layers=1, heads=2, kv_heads=1, context=16, alphabet="0123456789+=", init_std=0.5
    )
    return load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())


class Run:
    """An engine, as a sampler drives it, and requests that a client makes meanwhile."""

    def __init__(self, model: LanguageModel, folder: Path, stack: ExitStack, **settings: Any) -> None:
        service = ServiceConfig(**settings.pop("service", {}))
        config = RolloutConfig(**{"max_tokens": MOST, **settings}, engine="service")
        self.model, self.folder, stops = model, folder / "service", Stops(config.stop, model.tokenizer)
        self.engine = ServiceEngine(
            model.module,
            config,
            stop_tokens=stops.tokens,
            seed=7,
            context=model.context,
            tp=SingleRank(),
            stops=stops,
            service=service,
            site=Site(place=Place("main", 0), ranks=SingleRank(), fetch=lambda *_: [], stack=stack),
            base=folder,
            folder=self.folder,
        )
        self.address = json.loads((self.folder / "main-0.json").read_text())
        self._pool = stack.enter_context(ThreadPoolExecutor())
        self.load(0)

    def load(self, version: int) -> None:
        self.engine.load(version, dict(self.model.module.named_parameters()))

    def add(self, *prompts: Sequence[int], **sampling: Any) -> None:
        chosen = SamplingConfig(**{"max_tokens": MOST, **sampling}) if sampling else None
        for index, prompt in enumerate(prompts):
            self.engine.add(Rollout.start(RowId(0, index, 0), prompt), chosen)

    def ask(self, method: str, path: str, body: Any = None, client: str = "theirs", **headers: str) -> Any:
        """The status and the JSON of an answer."""
        status, found = self.raw(method, path, body, client, **headers)
        return status, json.loads(found) if found else None

    def raw(self, method: str, path: str, body: Any = None, client: str = "theirs", **headers: str) -> Any:
        host = self.address["url"].removeprefix("http://").removesuffix("/v1")
        connection = http.client.HTTPConnection(host, timeout=60)
        given = {"authorization": f"Bearer {self.address['token']}", "x-rillflow-client": client, **headers}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, f"/v1/{path}", data, given)
        answer = connection.getresponse()
        found = answer.read()
        connection.close()
        return answer.status, found

    def take(self, count: int = 64, client: str = "theirs", **limits: Any) -> dict[str, Any]:
        status, found = self.ask("POST", "rows/take", {"count": count, "wait_s": 5, **limits}, client)
        assert status == 200, found
        return dict(found)

    def put(self, lease: str, rows: list[Any], client: str = "theirs") -> tuple[int, Any, list[Rollout]]:
        """Put rows while the engine steps; return the answer, and the rows that the run got."""
        return self.stepped("rows/put", {"lease": lease, "rows": rows}, client)

    def stepped(self, path: str, body: Any, client: str = "theirs") -> tuple[int, Any, list[Rollout]]:
        """A request while the engine steps; return the answer, and the rows that the run got."""
        asked: Future[Any] = self._pool.submit(self.ask, "POST", path, body, client)
        got: list[Rollout] = []
        while not asked.done():
            got += self.engine.step()
        got += self.engine.step()
        return *asked.result(), got

    @torch.inference_mode()
    def sampled(self, row: dict[str, Any], version: int = 0) -> dict[str, Any]:
        """A right answer to a row: the likeliest tokens that are no stop."""
        tokens, logprobs = list(row["tokens"]), []
        while len(logprobs) < row["max_tokens"]:
            told = self.model.module(torch.tensor([tokens])).logits[0, -1] / (row["temperature"] or 1)
            told = told.log_softmax(-1)
            token = int(told[1:].argmax()) + 1 if row["temperature"] else int(told.argmax())
            tokens.append(token)
            logprobs.append(float(told[token]))
        own = tokens[len(row["tokens"]) :]
        return {
            "row": row["row"],
            "version": version,
            "tokens": own,
            "logprobs": logprobs,
            "finish": "length",
        }


@pytest.fixture
def start(model: LanguageModel, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with ExitStack() as stack:
        yield lambda **settings: Run(model, tmp_path, stack, **settings)
    assert not (tmp_path / "service").exists()


def test_the_engine_is_found_by_its_name() -> None:
    assert engine_class(engine_source("service").path) is ServiceEngine


def test_rows_are_taken_sampled_and_put(start: Callable[..., Run]) -> None:
    run = start(temperature=0.5, service={"check_share": 1.0})
    assert stat.S_IMODE((run.folder / "main-0.json").stat().st_mode) == 0o600
    run.add(*PROMPTS)
    taken = run.take()
    assert [row["tokens"] for row in taken["rows"]] == [list(each) for each in PROMPTS]
    assert {row["max_tokens"] for row in taken["rows"]} == {MOST} and taken["version"] == 0
    assert len({row["seed"] for row in taken["rows"]}) == 3
    rows = [run.sampled(row) for row in taken["rows"]]
    status, said, got = run.put(taken["lease"], rows[:2])
    assert (status, said) == (200, {"accepted": 2})
    assert [each.tokens[len(prompt) :] for each, prompt in zip(got, PROMPTS, strict=False)] == [
        tuple(row["tokens"]) for row in rows[:2]
    ]
    assert all(each.finish is Finish.LENGTH and set(each.versions) == {-1, 0} for each in got)
    assert run.engine.has_work
    assert len(run.put(taken["lease"], rows[2:])[2]) == 1 and not run.engine.has_work
    assert run.engine._check.checked == 3


def broken(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A row with a field that another function changes."""
    return lambda row: {**row, **{name: change(row[name]) for name, change in changes.items()}}


BAD = {
    "a token below the vocabulary": ("tokens", broken(tokens=lambda own: [-1, *own[1:]]), "has token -1"),
    "a token above it": ("tokens", broken(tokens=lambda own: [*own[:-1], 99]), "has token 99 at position 3"),
    "no token": ("length", broken(tokens=lambda _: [], logprobs=lambda _: []), "has 0 sampled tokens"),
    "too many": (
        "length",
        broken(tokens=lambda own: [*own, 1], logprobs=lambda own: [*own, -1.0]),
        "has 5 sampled tokens",
    ),
    "fewer log probabilities": (
        "aligned",
        broken(logprobs=lambda own: own[1:]),
        "has 3 log probabilities and 4 tokens",
    ),
    "NaN": ("finite", broken(logprobs=lambda own: [*own[:2], float("nan"), own[3]]), "nan at position 2"),
    "minus infinity": (
        "finite",
        broken(logprobs=lambda own: [float("-inf"), *own[1:]]),
        "-inf at position 0",
    ),
    "null": ("finite", broken(logprobs=lambda own: [None, *own[1:]]), "None at position 0"),
    "above 0": ("positive", broken(logprobs=lambda own: [3.0, *own[1:]]), "log probability 3 at position 0"),
    "a version of the future": ("version", broken(version=lambda _: 999), "has version 999"),
    "a stop before the end": ("finish", broken(tokens=lambda own: [0, *own[1:]]), "goes on after position 0"),
    "an early end": (
        "finish",
        broken(tokens=lambda own: own[:2], logprobs=lambda own: own[:2]),
        "'length' with 2 of 4",
    ),
    "a stop that is none": ("finish", broken(finish=lambda _: "stop"), "has finish 'stop' with 4 of 4"),
    "another distribution": (
        "logprobs",
        broken(logprobs=lambda own: [own[0], own[1] - 0.01, *own[2:]]),
        "at position 1",
    ),
    "a negative version": ("request", broken(version=lambda _: -5), "rows.0.version is -5"),
    "half a token": ("request", broken(tokens=lambda own: [0.5, *own[1:]]), "rows.0.tokens.0 is 0.5"),
    "true as a token": ("request", broken(tokens=lambda own: [True, *own[1:]]), "rows.0.tokens.0 is True"),
    "a text for log probabilities": ("request", broken(logprobs=lambda _: "none"), "rows.0.logprobs is none"),
    "another finish": ("request", broken(finish=lambda _: "abort"), "rows.0.finish is abort"),
    "a row of nobody": ("lease", broken(row=lambda _: 2**52), "does not hold row"),
}


def test_bad_rows_are_refused_by_name_and_can_be_put_again(start: Callable[..., Run]) -> None:
    """Also beside a good one: a put is accepted whole, or not at all."""
    run, refused = start(), Counter[str]()
    run.add(*PROMPTS[:2])
    taken = run.take()
    good = [run.sampled(row) for row in taken["rows"]]
    for name, (rule, change, what) in BAD.items():
        status, said, got = run.put(taken["lease"], [change(good[0]), good[1]])
        refused[rule] += 1
        assert status == (409 if rule == "lease" else 422) and said["why"], name
        assert what in said["what"], (name, said)
        told = run.ask("GET", "status")[1]
        assert told["refused"] == refused and told["leased"] == 2 and what in told["last_refusal"], name
        assert got == [] and run.engine.has_work
    assert run.put(taken["lease"], good)[0] == 200 and not run.engine.has_work


def test_the_first_row_of_each_client_and_version_is_compared(start: Callable[..., Run]) -> None:
    """With a share of 0 too: a client with other weights is found at once."""
    run = start(service={"check_share": 0.0})
    run.add(*PROMPTS)
    for client, status in (("good", 200), ("good", 200), ("bad", 422)):
        taken = run.take(1, client)
        (row,) = (run.sampled(each) for each in taken["rows"])
        if client == "bad":
            row["logprobs"] = [each - 1 for each in row["logprobs"]]
        assert run.put(taken["lease"], [row], client)[0] == status
    assert run.engine._check.checked == 2


def test_greedy_rows_have_the_likeliest_tokens(start: Callable[..., Run]) -> None:
    run = start()
    run.add(PROMPTS[0], temperature=0.0, max_tokens=1)
    taken = run.take()
    best = run.sampled(taken["rows"][0])
    told = torch.tensor(run.engine.score([[*PROMPTS[0], token] for token in range(1, 13)]))[:, -1]
    worst = int(told.argmin()) + 1
    other = {**best, "tokens": [worst], "logprobs": [float(told.min())]}
    status, said, _ = run.put(taken["lease"], [other])
    assert status == 422 and "not the likeliest" in said["what"]
    finish = "stop" if best["tokens"] == [0] else "length"
    assert run.put(taken["lease"], [{**best, "finish": finish}])[0] == 200


def test_a_text_of_several_tokens_ends_a_row(start: Callable[..., Run]) -> None:
    run = start(stop=("12",), service={"check_share": 0.0})
    run.engine._check._seen.add("theirs")
    run.add(PROMPTS[0])
    taken, one, two = run.take(), *run.model.tokenizer.encode("12")
    row = {"row": taken["rows"][0]["row"], "version": 0}
    long = {**row, "tokens": [one, two, one], "logprobs": [-1.0] * 3, "finish": "length"}
    status, said, _ = run.put(taken["lease"], [long])
    assert status == 422 and "goes on after position 1" in said["what"]
    whole = {**row, "tokens": [one, two], "logprobs": [-1.0] * 2, "finish": "stop"}
    status, _, got = run.put(taken["lease"], [whole])
    assert status == 200 and got[0].finish is Finish.STOP


def test_rows_of_a_client_that_has_died_go_to_another(start: Callable[..., Run]) -> None:
    run = start()
    run.add(*PROMPTS)
    killed = run.take(client="killed", lease_s=0.3)
    kept = run.ask("POST", "rows/renew", {"lease": killed["lease"], "lease_s": 0.3}, "killed")
    assert kept == (200, {"lease_s": 0.3})
    heir = run.take(client="heir")
    assert [row["id"] for row in heir["rows"]] == [row["id"] for row in killed["rows"]]
    assert [row["seed"] for row in heir["rows"]] == [row["seed"] for row in killed["rows"]]
    rows = [run.sampled(row) for row in killed["rows"]]
    status, said, got = run.put(killed["lease"], rows, "killed")
    assert status == 409 and got == [] and "for killed passed its deadline" in said["why"]
    status, said, _ = run.put(heir["lease"], rows, "killed")
    assert status == 409 and "heir holds it" in said["why"]
    assert run.ask("POST", "rows/renew", {"lease": killed["lease"]}, "killed")[0] == 409
    assert len(run.put(heir["lease"], rows, "heir")[2]) == 3
    assert run.put(heir["lease"], rows, "heir")[0] == 409, "nobody puts a row twice"


def test_a_row_that_the_run_takes_back_is_refused_with_the_reason(start: Callable[..., Run]) -> None:
    run = start()
    run.add(*PROMPTS)
    taken = run.take(2)
    for index, prompt in enumerate(PROMPTS):
        back = run.engine.abort(RowId(0, index, 0))
        assert back == Rollout.start(RowId(0, index, 0), prompt)
    status, said, got = run.put(taken["lease"], [run.sampled(taken["rows"][0])])
    assert status == 409 and got == [] and "the run took the row back" in said["why"]
    with pytest.raises(RolloutError, match="is not in the engine"):
        run.engine.abort(RowId(0, 0, 0))
    run.add(PROMPTS[0])
    with pytest.raises(RolloutError, match="in the engine already"):
        run.add(PROMPTS[0])
    assert run.take()["rows"][0]["id"] == [0, 0, 0]


def test_returned_rows_and_those_of_an_earlier_run(start: Callable[..., Run]) -> None:
    run = start()
    run.add(*PROMPTS)
    taken = run.take()
    assert run.ask("POST", "rows/return", {"lease": taken["lease"]}) == (200, {})
    assert len(run.take(client="other")["rows"]) == 3
    status, said, _ = run.put("0badc0de.1", [run.sampled(taken["rows"][0])])
    assert status == 409 and "there is no lease" in said["what"]


def test_a_row_may_end_with_the_weights_it_began_with_or_with_newer_ones(start: Callable[..., Run]) -> None:
    """Every token has the version that sampled it; one older than the row's beginning is refused."""
    run = start(service={"check_share": 1.0})
    run.add(*PROMPTS[:2])
    taken = run.take()
    run.load(1)
    status, _, got = run.put(taken["lease"], [run.sampled(taken["rows"][0], 0)])
    assert status == 200 and got[0].versions[-1] == 0 and run.engine._check.checked == 0
    assert len(run.put(taken["lease"], [run.sampled(taken["rows"][1], 1)])[2]) == 1
    run.add(PROMPTS[2])
    later = run.take()
    assert later["version"] == later["rows"][0]["oldest_version"] == 1
    status, said, _ = run.put(later["lease"], [run.sampled(later["rows"][0], 0)])
    assert status == 422 and "versions 1 to 1 may sample it" in said["why"]


def test_weights_are_files_of_safetensors_of_the_two_newest_versions(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the trainer has the memory of the rank, and has changed it."""
    run = start()
    monkeypatch.setattr(engine, "SHARD_BYTES", 4_000)
    own = {name: weight.clone() for name, weight in run.model.module.named_parameters()}
    run.load(1)
    _, manifest = run.ask("GET", "weights?newer_than=0")
    assert manifest["version"] == 1 and len(manifest["files"]) > 1
    run.engine.sleep()
    weight = run.model.module.get_input_embeddings().weight
    with torch.no_grad():
        weight[3, 3] += 1
    found: dict[str, torch.Tensor] = {}
    for file in manifest["files"]:
        status, data = run.raw("GET", f"weights/1/{file['name']}")
        assert status == 200 and hashlib.sha256(data).hexdigest() == file["sha256"]
        assert len(data) == file["bytes"] and file["weights"] == sorted(safetensors.torch.load(data))
        found |= safetensors.torch.load(data)
    assert found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own)
    with torch.no_grad():
        weight[3, 3] -= 1
    assert run.ask("GET", "weights?newer_than=1&wait_s=0") == (204, None)
    assert run.ask("GET", "weights/1/../../etc/passwd")[0] == 404
    old = "weights/0/model.safetensors"
    assert run.raw("GET", old)[0] == 200
    run.load(2)
    status, said = run.ask("GET", old)
    assert status == 410 and "version 2 is the newest" in said["why"]
    assert run.raw("GET", f"weights/1/{manifest['files'][0]['name']}")[0] == 200
    assert {each.name for each in (run.folder / "main-0").iterdir()} == {
        "1",
        "2",
        "arriving",
        "manifest.json",
    }
    about = run.ask("GET", "model")[1]
    assert about["config"]["model_type"] == "qwen2" and about["vocabulary"] == 13


def test_a_client_that_waits_for_weights_is_woken_by_the_next_version(start: Callable[..., Run]) -> None:
    run = start()
    waiting = run._pool.submit(run.ask, "GET", "weights?newer_than=0&wait_s=30")
    assert not waiting.done()
    run.load(1)
    assert waiting.result(20.0)[1]["version"] == 1


def test_weights_that_are_not_finite_are_not_published(start: Callable[..., Run]) -> None:
    run = start()
    weight = run.model.module.get_input_embeddings().weight
    before = float(weight[3, 3].detach())
    with torch.no_grad():
        weight[3, 3] = torch.nan
    with pytest.raises(WeightError, match="version 1 is not finite"):
        run.load(1)
    with torch.no_grad():
        weight[3, 3] = before
    assert run.ask("GET", "weights")[1]["version"] == 0


def test_weights_that_a_killed_run_left_are_not_served(start: Callable[..., Run], tmp_path: Path) -> None:
    left = tmp_path / "service" / "main-0" / "7"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"old")
    run = start()
    assert run.ask("GET", "weights")[1]["version"] == 0 and not left.exists()


def test_a_run_whose_rows_do_not_come_back_ends_and_says_who_was_there(start: Callable[..., Run]) -> None:
    run = start(service={"timeout_s": 0.5})
    run.add(*PROMPTS)
    taken = run.take(client="slow")
    run.put(taken["lease"], [broken(version=lambda _: 9)(run.sampled(taken["rows"][0]))], "slow")
    with pytest.raises(RolloutError, match="0 rows wait, 3 are leased") as caught:
        while True:
            run.engine.step()
    assert "slow" in caught.value.why and "has version 9" in caught.value.why


def test_requests_need_the_token_and_unknown_paths_are_named(start: Callable[..., Run]) -> None:
    run = start()
    assert run.ask("GET", "status", authorization="Bearer wrong")[0] == 401
    status, said = run.ask("GET", "nothing")
    assert status == 404 and "/v1/rows/take" in said["why"]
    for body in ([], {"count": 0}, {"count": 1, "odd": 2}, {"count": 10**30}):
        assert run.ask("POST", "rows/take", body)[0] == 422
    assert run.ask("POST", "rows/take", {"lease_s": 86_400})[0] == 422
    assert run.ask("POST", "rows/take", {"wait_s": 0})[0] == 204


def test_a_request_that_is_damaged_anywhere_is_answered_and_the_engine_goes_on(
    start: Callable[..., Run],
) -> None:
    run, draw = start(service={"check_share": 0.0}), random.Random(1)
    run.add(*PROMPTS)
    taken = run.take()
    rows = [run.sampled(row) for row in taken["rows"]]
    bodies = {
        "rows/put": json.dumps({"lease": taken["lease"], "rows": rows[:1]}).encode(),
        "rows/take": json.dumps({"count": 3, "lease_s": 0, "wait_s": 0}).encode(),
        "rows/renew": json.dumps({"lease": taken["lease"], "lease_s": 600}).encode(),
    }
    told = set()
    for _ in range(60):
        path = draw.choice([*bodies])
        at, body = draw.randrange(len(bodies[path])), bodies[path]
        patch = draw.choice([b"", b"\xff", b'"', b"}", b"[", b"1e999", b"-", b"null", b"9" * 20, b"\\ud800"])
        status, said, _ = run.stepped(path, body[:at] + patch + body[at + draw.randrange(4) :])
        told.add(status)
        assert status < 500 and (status < 400 or said["what"])
    assert {200, 409, 422} <= told
    run.engine._clear()
    run.add(*PROMPTS)
    again = run.take()
    assert run.put(again["lease"], [run.sampled(row) for row in again["rows"]])[0] == 200


@pytest.mark.parametrize(
    ("service", "match"),
    [
        ({"host": "0.0.0.0"}, "can be reached from other machines"),
        ({"token_file": "missing"}, "cannot be read"),
        ({"token_file": "short"}, "the token has 5 characters"),
        ({"host": "203.0.113.1", "token_file": "long"}, "cannot listen on 203.0.113.1"),
    ],
)
def test_where_it_listens(
    service: dict[str, str], match: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "short").write_text("short")
    (tmp_path / "long").write_text("a token of enough characters\n")
    with pytest.raises(StreamError, match=match):
        start(service=service)


def test_later_requests_are_told_that_the_run_has_ended(start: Callable[..., Run]) -> None:
    run = start()
    run.add(*PROMPTS)
    taken = run.take()
    run.engine.close()
    for path, body in (
        ("take", {}),
        ("put", {"lease": taken["lease"], "rows": [run.sampled(taken["rows"][0])]}),
    ):
        status, said = run.ask("POST", f"rows/{path}", body)
        assert status == 410 and said["why"] == "the run has ended"

"""Tenants: adapters on one base have the bits that each has alone, whatever runs in between."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen2ForCausalLM

from rillflow.errors import DataError, RillflowError
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import load_model
from rillflow.records.rollout import Rollout
from rillflow_training_service.checkpoints import About, CheckpointPath, now
from rillflow_training_service.losses import LOSSES
from rillflow_training_service.requests import SamplingParams
from rillflow_training_service.sampling import SampleRequest, sampling_of, stop_of
from rillflow_training_service.service import KEPT, Service
from rillflow_training_service.shared_base import Shape, SharedBase
from rillflow_training_service.tenant import AdamParams

sys.path.insert(0, str(Path(__file__).parent))
from toys import SMALL, asked, datum, saved_model, toy_model, toy_service, weighted

SHAPES = (SMALL, SMALL, Shape(rank=2), Shape(rank=3, mlp=False))
STEP = AdamParams(learning_rate=0.05)


class Client:
    """A client with a fixed program: train, keep weights, sample, train on the samples."""

    def __init__(self, service: Service, index: int) -> None:
        self.service, self.index, self.name = service, index, f"m{index}"
        self.samples, self.results = list[Rollout](), list[bytes]()
        self.program: list[Callable[[], None]] = [
            self.create,
            *(self.learn, self.keep, self.sample, self.reinforce) * 2,
        ]

    def create(self) -> None:
        self.service.create(self.name, SHAPES[self.index], seed=self.index)

    def learn(self) -> None:
        rows = [weighted([self.index, 3, 4, 5 + self.index, 1], 2), weighted([self.index, 3, 4, 9], 2)]
        self.results.append(self.service.forward_backward(asked(self.name, rows)))
        self.service.optim_step(self.name, STEP)

    def keep(self) -> None:
        self.service.snapshot(self.name, "k")

    def sample(self) -> None:
        self.samples = []
        request = sample_request(self.told, f"{self.name}", count=3, prompt=[self.index, 3])
        self.service.sample(self.service.snapshot_of(self.name, "k"), request)

    def told(self, found: list[Rollout] | RillflowError) -> None:
        assert isinstance(found, list), found
        self.samples = found

    def reinforce(self) -> None:
        while not self.samples:
            for key in self.service.sampler.busy:
                self.service.sampler.turn(key)
        rows = [
            datum(
                each.tokens,
                advantages=[0.0, *[1.0 - at] * (len(each.tokens) - 2)],
                logprobs=each.logprobs[1:],
            )
            for at, each in enumerate(self.samples)
        ]
        self.results.append(self.service.forward_backward(asked(self.name, rows, "importance_sampling")))
        self.service.optim_step(self.name, STEP)

    @property
    def state(self) -> tuple[list[bytes], dict[str, Tensor]]:
        tenant = self.service._tenants[self.name]
        return self.results, {name: each.detach().clone() for name, each in tenant.weights.items()}


def sample_request(tell: Callable[[Any], None], key: str, **how: Any) -> SampleRequest:
    params = SamplingParams(**how.pop("params", {"max_tokens": 4}))
    return SampleRequest(
        name="the request",
        sampling=sampling_of(params, 10),
        stop=stop_of(params),
        wants_prompt=how.pop("wants_prompt", None),
        random_key=key,
        tell=tell,
        **how,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[bytes], dict[str, Tensor]]]:
    """Return the state of each client that ran alone on a service of its own."""
    found = []
    for index in range(len(SHAPES)):
        client = Client(toy_service(tmp_path_factory.mktemp("alone")), index)
        for part in client.program:
            part()
        found.append(client.state)
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return toy_service(tmp_path_factory.mktemp("shared"))


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(order=st.permutations([index for index in range(len(SHAPES)) for _ in range(9)]))
def test_four_clients_have_the_bits_that_each_has_alone(
    alone: list[tuple[list[bytes], dict[str, Tensor]]], shared: Service, order: list[int]
) -> None:
    clients = [Client(shared, index) for index in range(len(SHAPES))]
    programs = [iter(client.program) for client in clients]
    for index in order:
        next(programs[index])()
    for client, (results, weights) in zip(clients, alone, strict=True):
        own_results, own_weights = client.state
        assert own_results == results
        assert all(torch.equal(own_weights[name], each) for name, each in weights.items())
        shared.release(client.name)


def test_no_pass_computes_gradients_of_the_base() -> None:
    base = SharedBase(toy_model())
    assert not any(each.requires_grad for each in base.module.parameters())


def test_a_failed_pass_drops_the_whole_gradient(shared: Service) -> None:
    shared.create("a", SMALL, seed=0)
    before = {name: each.detach().clone() for name, each in shared._tenants["a"].weights.items()}
    good, bad = weighted([1, 2, 3], 1), datum([1, 2, 3], weights=[1.0, float("inf")])
    shared.forward_backward(asked("a", [good]))
    with pytest.raises(RillflowError, match="weights of datum 1 is inf"):
        shared.forward_backward(asked("a", [good, bad]))
    with pytest.raises(RillflowError, match="was not applied"):
        shared.optim_step("a", STEP)
    assert all(torch.equal(each, before[name]) for name, each in shared._tenants["a"].weights.items())
    shared.forward_backward(asked("a", [good]))
    shared.optim_step("a", STEP)
    assert any(not torch.equal(each, before[name]) for name, each in shared._tenants["a"].weights.items())


@pytest.mark.parametrize("name", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_odd_parameters_of_a_step_apply_nothing(shared: Service, name: str, value: float) -> None:
    shared.create("a", SMALL, seed=0)
    shared.forward_backward(asked("a", [weighted([1, 2, 3], 1)]))
    with pytest.raises(DataError, match=f"{name} is {value}"):
        shared.optim_step("a", AdamParams(**{name: value}))
    assert shared._tenants["a"].steps == 0


def test_a_checkpoint_resumes_with_the_same_bits(shared: Service) -> None:
    shared.create("a", SMALL, seed=0)
    rows = [weighted([1, 2, 3, 4], 2)]

    def step(model: str) -> None:
        shared.forward_backward(asked(model, rows))
        shared.optim_step(model, STEP)

    step("a")
    path = CheckpointPath(model="a", kind="weights", name="one")
    about = About(path=str(path), base_model="base", shape=SMALL, seed=0, time=now())
    shared.save("a", path, about, optimizer=True)
    step("a")
    shared.create_from("b", path, optimizer=True)
    step("b")
    left, right = (shared._tenants[name] for name in ("a", "b"))
    assert left.steps == right.steps == 2
    assert all(torch.equal(each, right.weights[name]) for name, each in left.weights.items())
    shared.create_from("c", path, optimizer=False)
    assert not shared._tenants["c"].moments
    shared.create("d", Shape(rank=8), seed=0)
    with pytest.raises(DataError, match="rank 4 on attention, mlp"):
        shared.load("d", path, optimizer=False)
    with pytest.raises(DataError, match="there is a checkpoint"):
        shared.save("a", path, about, optimizer=True)


def test_an_adapter_of_another_base_is_refused(shared: Service, tmp_path: Path) -> None:
    """The directory is that of a service whose base has other sizes."""
    shared.create("a", SMALL, seed=0)
    path = CheckpointPath(model="a", kind="weights", name="other")
    about = About(path=str(path), base_model="other", shape=SMALL, seed=0, time=now())
    shared.save("a", path, about, optimizer=True, overwrite=True)
    file = shared.checkpoints.folder(path) / "checkpoint.json"
    file.write_text(file.read_text().replace('"rank": 4', '"rank": 5'))
    with pytest.raises(DataError, match="serve the base model that it was trained on, other"):
        shared.create_from("b", path, optimizer=True)


def test_the_log_probabilities_of_a_prompt_are_those_of_its_samples(shared: Service) -> None:
    shared.create("a", SMALL, seed=0)
    shared.snapshot("a", "k")
    found: list[Any] = []
    request = sample_request(found.append, "x", count=2, prompt=[1, 2, 3])
    shared.sample(shared.snapshot_of("a", "k"), request)
    run_all(shared)
    for each in found[0]:
        again = sample_request(found.append, "y", count=1, prompt=list(each.tokens), wants_prompt=0)
        scored = shared.sample(shared.snapshot_of("a", "k"), again)
        assert scored is not None and bool(scored[0].isnan())
        own = torch.tensor(each.logprobs[3:])
        torch.testing.assert_close(scored[3:], own, atol=1e-5, rtol=0)
        last = sample_request(found.append, "z", count=1, prompt=list(each.tokens), wants_prompt=1)
        assert int(shared.sample(shared.snapshot_of("a", "k"), last).isnan().sum()) == len(each.tokens) - 1  # type: ignore[union-attr]
    run_all(shared)


def run_all(service: Service) -> None:
    while service.sampler.busy:
        for key in service.sampler.busy:
            service.sampler.turn(key)


def test_a_seed_repeats_and_a_stop_ends(shared: Service) -> None:
    shared.create("a", SMALL, seed=0)
    shared.snapshot("a", "k")
    found: list[Any] = []
    weights = shared.snapshot_of("a", "k")
    for _ in range(2):  # at once: the second waits for the first, whose random numbers it has
        shared.sample(weights, sample_request(found.append, "seed 1", count=2, prompt=[1, 2]))
    run_all(shared)
    assert [each.tokens for each in found[0]] == [each.tokens for each in found[1]]
    first = found[0][0].tokens[2]
    stopped = {"max_tokens": 4, "stop": [first]}
    shared.sample(weights, sample_request(found.append, "seed 1", count=1, prompt=[1, 2], params=stopped))
    run_all(shared)
    assert found[2][0].tokens == (1, 2, first)


def test_a_cancelled_request_leaves_the_engine(shared: Service) -> None:
    shared.create("a", SMALL, seed=0)
    shared.snapshot("a", "k")
    request = sample_request(lambda _: None, "x", count=4, prompt=[1], params={"max_tokens": 30, "stop": []})
    shared.sample(shared.snapshot_of("a", "k"), request)
    request.is_left = True
    shared.sampler.wake()
    run_all(shared)
    assert not request.ended


def test_forgotten_snapshots_are_read_from_files(shared: Service) -> None:
    shared.create("a", SMALL, seed=0)
    for number in range(5):
        shared.snapshot("a", f"k{number}")
    first, last = (shared.snapshot_of("a", key) for key in ("k0", "k4"))
    assert all(torch.equal(each, last.weights[name]) for name, each in first.weights.items())
    shared.release("a")
    with pytest.raises(DataError, match="no longer there"):
        shared.snapshot_of("a", "k0")


def learned(service: Service, model: str) -> None:
    service.forward_backward(asked(model, [weighted([1, 2, 3, 4], 1)]))
    service.optim_step(model, STEP)


def scored(service: Service, model: str, key: str) -> Tensor:
    """Return the log probabilities of a prompt under kept weights."""
    request = sample_request(lambda _: None, key, count=1, prompt=[1, 2, 3, 4], wants_prompt=0)
    found = service.sample(service.snapshot_of(model, key), request)
    run_all(service)
    assert found is not None
    return found[1:]


def kept_in_file(service: Service, model: str, key: str) -> None:
    """Keep weights under a key, and then so many others that they move to a file."""
    service.snapshot(model, key)
    for number in range(KEPT):
        service.snapshot(model, f"other {number}")


def test_sampling_after_a_step_takes_the_weights_that_were_read_from_a_file(shared: Service) -> None:
    """Between the two requests only the trainer uses the base."""
    shared.create("a", SMALL, seed=0)
    kept_in_file(shared, "a", "inflight")
    shared.forward_backward(asked("a", [weighted([1, 2, 3, 4], 1)]))
    before = scored(shared, "a", "inflight")
    shared.optim_step("a", STEP)
    kept_in_file(shared, "a", "inflight")
    newer = scored(shared, "a", "inflight")
    shared.snapshot("a", "in memory")
    assert torch.equal(newer, scored(shared, "a", "in memory")) and not torch.equal(newer, before)
    shared.release("a")


def test_a_batch_that_runs_keeps_its_weights_while_its_key_gets_new_ones(shared: Service) -> None:
    """The same requests, once one after the other and once with the second during the first."""
    told: list[list[list[Rollout]]] = []
    for is_during in (False, True):
        answers: list[list[Rollout]] = []
        shared.create("a", SMALL, seed=0)
        kept_in_file(shared, "a", "inflight")
        for name in ("first", "second"):
            request = sample_request(
                answers.append, name, count=2, prompt=[1, 2], params={"max_tokens": 12, "stop": [0]}
            )
            shared.sample(shared.snapshot_of("a", "inflight"), request)
            if not is_during:
                run_all(shared)
            learned(shared, "a")
            kept_in_file(shared, "a", "inflight")
        run_all(shared)
        told.append(answers)
        shared.release("a")
    one, other = ([[(row.tokens, row.logprobs) for row in rows] for rows in each] for each in told)
    assert sorted(one) == sorted(other) and one[0] != one[1]


def test_a_model_with_the_name_of_an_earlier_one_has_its_own_weights(shared: Service) -> None:
    """The gradient of a new adapter depends on its random half."""
    found = dict[str, list[dict[str, Tensor]]]()
    for names, seeds in ((("a", "a"), (1, 2)), (("b", "c"), (1, 2))):
        for name, seed in zip(names, seeds, strict=True):
            shared.create(name, SMALL, seed=seed)
            shared.forward_backward(asked(name, [weighted([1, 2, 3, 4], 1)]))
            found.setdefault(names[0], []).append(dict(shared._tenants[name].gradient))
            shared.release(name)
    one, other = ([[each[name].tolist() for name in each] for each in found[key]] for key in ("a", "b"))
    assert one == other and one[0] != one[1]


def test_losses_named_here_are_served() -> None:
    assert {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"} == LOSSES.keys()


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in (SMALL, Shape(rank=2, attention=False))]


@pytest.mark.parametrize("shape", [Shape(rank=3), *SLOW])
def test_rillflow_and_peft_load_a_checkpoint(tmp_path: Path, shape: Shape) -> None:
    """The head's adapter is loaded too, though the base's head and embedding are one tensor."""
    base = saved_model(tmp_path / "base")
    service = toy_service(tmp_path / "checkpoints", source=str(base))
    service.create("a", shape, seed=0)
    rows = [weighted([1, 2, 3, 4], 1)]
    for _ in range(2):
        service.forward_backward(asked("a", rows))
        service.optim_step("a", STEP)
    path = CheckpointPath(model="a", kind="sampler_weights", name="one")
    about = About(path=str(path), base_model="base", shape=shape, seed=0, time=now())
    service.save("a", path, about, optimizer=False)
    expected = service._tenants["a"].run(rows, LOSSES["cross_entropy"], {}, learns=False).logprobs[0]
    folder = service.checkpoints.folder(path)
    loaded = load_model(ModelConfig(path=str(folder)), seed=0, device=torch.device("cpu"), base=Path())
    peft = pytest.importorskip("peft")
    whole = Qwen2ForCausalLM.from_pretrained(base)
    for module in (loaded.module, peft.PeftModel.from_pretrained(whole, folder)):
        with torch.no_grad():
            logits = module(input_ids=rows[0].tokens[None], use_cache=False).logits[0]
        found = logits.log_softmax(-1).gather(1, rows[0].targets[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

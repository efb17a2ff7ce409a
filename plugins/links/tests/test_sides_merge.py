"""Merges of sides: the outer step, order and kills change no bit, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rillflow.errors import RillflowError
from rillflow_links.sides.lease import FILE, MergerLease
from rillflow_links.sides.merger import LOG, Merger, read_records
from rillflow_links.sides.outer import OuterSettings, OuterState, outer_step, shares_of
from rillflow_links.sides.packed import contribution_name, pack, read_version, sha256, unpack
from rillflow_links.sides.payload import encoded
from rillflow_links.sides.replay import replay
from rillflow_links.sides.rules import Contribution, MergeRule
from rillflow_links.sides.store import SideError, SideStore

Weights = dict[str, Tensor]
DENSE = {"gradients": "dense", "share": 0.01}
AT_ONCE = MergeRule(grace_s=0)


def weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"b": (5,), "a": (3, 2), "none": (0,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def bits(tensors: Weights) -> str:
    return sha256(pack(tensors, {}))


def begun(folder: Path, *sides: str) -> SideStore:
    """Return a store where sides have claimed their names, and with the first one's start."""
    store = SideStore(str(folder))
    for side in sides:
        store.write_json(f"claims/{side}.json", {"run": side, "joined": 0})
    store.write(f"starts/{sides[0]}.safetensors", pack(weights(0), {"side": sides[0]}))
    return store


def contribute(
    store: SideStore, side: str, local: Weights, base: int = 0, step: int = 20, tokens: int = 100
) -> str:
    facts = {"side": side, "base": base, "step": step, "tokens": tokens, "coding": DENSE}
    name = contribution_name(side, step, base)
    payload = encoded(DENSE, read_version(store, base), local, {})
    store.write(f"contributions/{name}.safetensors", pack(payload, facts))
    return name


def reason(store: SideStore, name: str) -> str:
    return str((store.read_json(f"refused/{name}.json") or {}).get("reason", ""))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=5))
def test_lr_1_without_momentum_is_the_average_of_the_weights(tokens: list[int]) -> None:
    base, locals_ = weights(0)["a"], [weights(seed)["a"] for seed in range(1, len(tokens) + 1)]
    shares = shares_of(tokens)
    assert sum(shares) == pytest.approx(1)
    state = OuterState(weights=base, momentum=torch.zeros_like(base))
    gradients = [base.double() - each.double() for each in locals_]
    made = outer_step(state, gradients, shares, OuterSettings(lr=1, momentum=0))
    average = sum(each.double() * share for each, share in zip(locals_, shares, strict=True))
    torch.testing.assert_close(made.weights, average.float(), rtol=1e-6, atol=1e-7)
    if len(tokens) == 1:
        assert torch.equal(made.weights, locals_[0]), "one side alone keeps its own bits"


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.1, 0.0)])
def test_the_outer_step_is_that_of_torch(lr: float, momentum: float) -> None:
    parameter = torch.nn.Parameter(weights(0)["a"].double())
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    state = OuterState(weights=weights(0)["a"].double(), momentum=torch.zeros(3, 2, dtype=torch.float64))
    for seed in range(1, 6):
        gradients = [weights(seed)["a"], weights(10 * seed)["a"]]
        shares = [0.25, 0.75]
        parameter.grad = sum(g.double() * s for g, s in zip(gradients, shares, strict=True))  # type: ignore[assignment]
        sgd.step()
        state = outer_step(state, gradients, shares, OuterSettings(lr=lr, momentum=momentum))
        torch.testing.assert_close(state.weights, parameter.detach(), rtol=1e-13, atol=1e-14)


def test_the_order_of_arrival_changes_no_bit(tmp_path: Path) -> None:
    sides, made = ("east", "north", "west"), set()
    for number, order in enumerate(permutations(sides)):
        store = begun(tmp_path / str(number), *sides)
        merger = Merger(store, MergeRule(grace_s=1e9), OuterSettings())
        assert merger.poll()
        for side in order:
            assert not merger.poll(), "it waits for every side"
            contribute(store, side, weights(1 + sides.index(side)), tokens=10 + sides.index(side))
        assert merger.poll()
        made.add(bits(read_version(store, 1)))
    assert len(made) == 1


class DyingStore(SideStore):
    """A store whose process dies before its nth write."""

    left = 1 << 30

    def write(self, name: str, data: bytes) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        super().write(name, data)


def rounds(store: SideStore) -> None:
    """Contribute and merge twice with two sides; go on wherever an earlier call died."""
    for version in range(3):
        while store.newest() < version:
            Merger(store, AT_ONCE, OuterSettings()).poll()
        for number, side in enumerate(("east", "west")):
            if version < 2 and store.newest() == version:
                contribute(store, side, weights(10 * version + number + 1), version, 20 * version + 20)
    Merger(store, AT_ONCE, OuterSettings())  # completes the log


def test_a_merger_that_is_killed_anywhere_makes_the_same_versions(tmp_path: Path) -> None:
    whole = begun(tmp_path / "whole", "east", "west")
    rounds(whole)
    log = whole.read(LOG)
    assert whole.newest() == 2 and log is not None
    assert len(log.splitlines()) == 3
    for number in range(20):
        path = tmp_path / str(number)
        store = DyingStore(begun(path, "east", "west").url)
        store.left = number
        try:
            rounds(store)
        except KeyboardInterrupt:
            rounds(SideStore(str(path)))
        assert bits(read_version(store, 2)) == bits(read_version(whole, 2)), number
        assert len((SideStore(str(path)).read(LOG) or b"").splitlines()) == 3
        assert replay(SideStore(str(path)), lambda _: None)


def test_a_replay_names_what_differs(tmp_path: Path) -> None:
    store, said = begun(tmp_path / "store", "east", "west"), list[str]()
    rounds(store)
    assert replay(store, said.append) and "3 versions are equal in all bits" in said
    other = pack(weights(99), {"version": 1})
    store.write("versions/000001.safetensors", other)
    record = store.read_json("versions/000001.json") or {}
    store.write_json("versions/000001.json", {**record, "sha256": sha256(other)})
    assert not replay(store, said.append)
    assert any("version 1" in each and "bits differ" in each for each in said)


def test_a_contribution_is_refused_with_its_reason(tmp_path: Path) -> None:
    store = begun(tmp_path / "store", "east")
    merger = Merger(store, MergeRule(grace_s=0, most_late=1), OuterSettings())
    assert merger.poll()
    wide = {**weights(1), "a": torch.zeros(3, 3)}
    infinite = {**weights(1), "b": torch.full((5,), torch.nan)}
    more = {**weights(1), "c": torch.zeros(1)}

    def raw(name: str, local: Weights, base: int = 0, **changed: object) -> str:
        side, name = name, contribution_name(name, 20, base)
        facts = {"side": side, "base": base, "step": 20, "tokens": 1, "coding": DENSE, **changed}
        payload = {each: tensor.flatten().view(torch.uint8) for each, tensor in local.items()}
        store.write(f"contributions/{name}.safetensors", pack(payload, facts))
        return name

    cases = {
        raw("wide", wide): "a cannot be decoded",
        raw("infinite", infinite): "not finite",
        raw("lacking", {"a": weights(1)["a"]}): "another model",
        raw("ahead", weights(1), base=7): "the newest is 0",
        raw("codec", weights(1), coding={"gradients": "zip"}): "cannot be decoded",
        raw("bare", weights(1), coding=None): "cannot be decoded",
        raw("other", weights(1), side="east"): "another file",
        raw("tokens", weights(1), tokens=-1): "whole numbers",
    }
    damaged = raw("damaged", weights(1))
    path = tmp_path / "store" / "contributions" / f"{damaged}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    cut = raw("cut", weights(1))
    short = tmp_path / "store" / "contributions" / f"{cut}.safetensors"
    short.write_bytes(short.read_bytes()[:40])
    cases |= {damaged: "another SHA-256", cut: "damaged"}
    assert not merger.poll()
    for name, words in cases.items():
        assert words in reason(store, name), (name, reason(store, name))
    raw("more", more)
    assert not merger.poll()
    assert "another model" in reason(store, contribution_name("more", 20, 0))
    for version in range(2):
        contribute(store, "east", weights(version), version)
        assert merger.poll()
    late = contribute(store, "slow", weights(5), 0)
    assert not merger.poll()
    assert reason(store, late) == "it is 2 versions late, and 1 are accepted"
    accepted = contribute(store, "slow", weights(5), 1, step=40)
    assert merger.poll()
    assert read_records(store)[-1]["contributions"][0]["name"] == accepted
    assert read_records(store)[-1]["contributions"][0]["late"] == 1
    again = Merger(store, MergeRule(grace_s=0), OuterSettings())
    assert not again.poll(), "refused and merged ones are never read again"


def offers(*sides: str, base: int = 0) -> list[Contribution]:
    return [
        Contribution(side=each, base=base, step=20, tokens=1, name=contribution_name(each, 20, base))
        for each in sides
    ]


def test_it_waits_for_a_quorum_and_then_for_the_grace_time() -> None:
    rule = MergeRule(quorum=2, grace_s=10, most_late=3)
    assert not rule.is_due({"a"}, {"a"}, 1e9)
    assert not rule.is_due({"a", "b"}, {"a", "b", "c"}, 9.9)
    assert rule.is_due({"a", "b"}, {"a", "b", "c"}, 10)
    assert rule.is_due({"a", "b"}, {"a", "b"}, 0)
    assert rule.expected({"a": 6, "gone": 2, "new": 5}, newest=6) == {"a", "new"}


def test_of_two_contributions_of_a_side_the_newer_counts() -> None:
    old, new = offers("a")[0], offers("a", base=1)[0]
    chosen, refused = MergeRule().chosen([new, old, *offers("b")], newest=2)
    assert [each.name for each in chosen] == [new.name, "b.00000020.000000"]
    assert refused == {old.name: f"{new.name} of the same side replaces it"}


def test_a_second_merger_is_refused_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    store, now = SideStore(str(tmp_path)), [0.0]

    def sleep(during: Callable[[], None] = lambda: None) -> Callable[[float], None]:
        def wait(seconds: float) -> None:
            now[0] += seconds
            during()

        return wait

    def lease(during: Callable[[], None] = lambda: None) -> MergerLease:
        return MergerLease(store, 1.0, sleep(during), lambda: now[0])

    first = lease()
    first.take()
    with pytest.raises(SideError, match="another merger is at work"):
        lease(first.beat).take()
    second = lease()
    second.take()
    with pytest.raises(SideError, match="another merger is at work"):
        first.confirm()
    now[0] += 2
    with pytest.raises(SideError, match="another merger"):
        first.beat()
    first.release()
    assert store.read(FILE) is not None, "it is the second one's"
    second.release()
    assert store.read(FILE) is None
    other = lease()
    with pytest.raises(SideError, match="another merger"):
        lease(lambda: other._write()).take()


def test_a_store_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RillflowError, match="file") as caught:
        SideStore(str(tmp_path / "file" / "store")).write("claims/a.json", b"")
    assert caught.value.why
    store = SideStore(str(tmp_path))
    (tmp_path / "claims" / "a.json").mkdir(parents=True)
    with pytest.raises(RillflowError, match=r"a\.json"):
        store.write("claims/a.json", b"x")


@pytest.fixture
def memory() -> Iterator[SideStore]:
    store = SideStore("memory://sides-of-test")
    yield store
    for folder, end in (("contributions", ""), ("versions", ""), ("claims", "")):
        for name in store.names(folder, end):
            store.remove(f"{folder}/{name}")


def test_a_url_holds_the_same_files(memory: SideStore) -> None:
    memory.write("claims/a.json", b"{}")
    memory.write("claims/a.json", json.dumps({"run": 1}).encode())
    assert memory.names("claims", ".json") == ["a"] and memory.read_json("claims/a.json") == {"run": 1}
    assert memory.names("versions", ".json") == [] and memory.newest() == -1
    memory.write("versions/000003.json", b"[")
    assert memory.newest() == 3
    with pytest.raises(SideError, match="damaged"):
        memory.read_json("versions/000003.json")
    memory.remove("claims/a.json")
    memory.remove("claims/a.json")
    assert memory.read("claims/a.json") is None


def test_equal_content_gives_equal_bytes_and_a_changed_byte_is_found() -> None:
    tensors = weights(3)
    data = pack(tensors, {"step": 1})
    assert data == pack(dict(reversed(tensors.items())), {"step": 1})
    held = unpack(data, "x")
    assert held.facts == {"step": 1} and bits(held.tensors) == bits(tensors)
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(SideError):
            unpack(bytes(changed), "x")

"""Digests: equal for every layout, and different after any change of a tensor."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rillflow.errors import WeightError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement, Split
from rillflow.placement.slices import Slice, slices
from rillflow.sharding.digest import Digests, digests, owned, slice_digest, verify
from rillflow.sharding.layout import Weight
from rillflow.workers.collectives import SingleRank

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


def number(found: Tensor) -> int:
    return int(found) % 2**64


def digest(values: Tensor) -> int:
    return number(slice_digest(values, Slice(tuple((0, length) for length in values.shape)), values.dtype))


def cut_digest(values: Tensor, placement: Placement) -> int:
    """Return the sum over the slices of a placement, each by its owner."""
    shape, total = tuple(values.shape), 0
    for boxes in owned(placement, shape, placement.mesh.ranks).values():
        for box in boxes:
            piece = values[tuple(slice(start, stop) for start, stop in box.bounds)]
            total += number(slice_digest(piece, box, values.dtype))
    return total % 2**64


@settings(max_examples=80, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dp=st.integers(1, 3),
    tp=st.integers(1, 4),
    dims=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    runs=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
)
def test_every_layout_has_the_same_digest(
    shape: list[int],
    dp: int,
    tp: int,
    dims: tuple[int, int],
    runs: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    values = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)
    parts = {"dp": Split(dims[0] % len(shape)), "tp": Split(dims[1] % len(shape), runs=runs)}
    assert cut_digest(values, Placement(Mesh.of(dp=dp, tp=tp), parts, order=("tp", "dp"))) == digest(values)
    assert cut_digest(values, Placement(Mesh.of(dp=dp, tp=tp), {"tp": parts["tp"]})) == digest(values)


def test_numbers_and_large_tensors() -> None:
    assert digest(torch.tensor(1.5)) != digest(torch.tensor(1.25))
    large = torch.randn(3, 70_000)
    assert cut_digest(large, Placement(Mesh.of(tp=2), {"tp": Split(1)})) == digest(large)
    assert digest(torch.empty(0, 4)) == 0


class Counted(TorchDispatchMode):
    """Counts operations on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.asked += "view" not in str(function)
        return function(*args, **(kwargs or {}))


def test_an_accelerator_is_asked_for_a_few_things_and_never_waited_for() -> None:
    """Meta tensors represent the accelerator, because reading a value from one raises."""
    values = torch.empty(2**7, 2**20, dtype=torch.bfloat16, device="meta")
    with Counted() as counted:
        assert slice_digest(values, Slice(((0, 2**7), (0, 2**20))), values.dtype).is_meta
    assert counted.asked < 40 + 20 * 2**27 / 2**24


def flipped(values: Tensor, rng: random.Random) -> Tensor:
    """Flip one bit of one element."""
    found = values.clone()
    whole = found.view(torch.int16 if values.element_size() == 2 else torch.int32).view(-1)
    bit = rng.randrange(8 * values.element_size() - 1)
    whole[rng.randrange(whole.numel())] ^= 1 << bit
    return found


def one(values: Tensor, rng: random.Random, value: float) -> Tensor:
    found = values.clone()
    found.view(-1)[rng.randrange(found.numel())] = value
    return found


def next_up(values: Tensor, rng: random.Random) -> Tensor:
    found, place = values.clone().view(-1), rng.randrange(values.numel())
    found[place] = torch.nextafter(found[place], torch.tensor(torch.inf, dtype=values.dtype))
    return found.view_as(values)


def permuted(values: Tensor, rng: random.Random) -> Tensor:
    order = list(range(len(values)))
    rng.shuffle(order)
    return values[order]


def exchanged(values: Tensor, rng: random.Random) -> Tensor:
    found = values.clone().view(-1)
    one, other = rng.sample(range(found.numel()), 2)
    found[one], found[other] = found[other].clone(), found[one].clone()
    return found.view_as(values)


def rolled(values: Tensor, rng: random.Random) -> Tensor:
    return values.roll(rng.randrange(1, 7), rng.randrange(2))


WRONGS = {
    "zeros": lambda values, _: torch.zeros_like(values),
    "stale": lambda values, _: values + torch.randn_like(values.float()).to(values.dtype) * 0.01,
    "a row of zeros": lambda values, _: torch.cat([values[:-1], torch.zeros_like(values[-1:])]),
    "transposed": lambda values, _: values.T.contiguous(),
    "reshaped": lambda values, _: values.T.reshape(values.shape),
    "upside down": lambda values, _: values.flip(0),
    "negated": lambda values, _: -values,
    "permuted": permuted,
    "exchanged": exchanged,
    "rolled": rolled,
    "a bit": flipped,
    "the next number": next_up,
    "not a number": lambda values, rng: one(values, rng, float("nan")),
    "infinite": lambda values, rng: one(values, rng, float("inf")),
}


@pytest.mark.parametrize("wrong", WRONGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_wrong_is_missed(wrong: str, dtype: torch.dtype) -> None:
    rng, tries = random.Random(wrong), 0
    torch.manual_seed(len(wrong))
    while tries < 300:
        side = rng.randrange(2, 24)
        values = torch.randn(side, side).to(dtype)
        other = WRONGS[wrong](values, rng)
        if torch.equal(other, values):  # a permutation may be the identity, two elements may be equal
            continue
        assert digest(other) != digest(values)
        tries += 1


def published(tensors: dict[str, Tensor], version: int = 3) -> Digests:
    weights = {
        name: Weight(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
        for name, tensor in tensors.items()
    }
    layout = {name: Placement(Mesh.of(tp=1)) for name in tensors}
    return Digests(version=version, of=digests(weights, layout, tensors, SingleRank()))


def test_the_error_names_the_weight() -> None:
    tensors = {f"layers.{place}": torch.randn(6, 6) for place in range(12)}
    expected = published(tensors)
    verify(expected, published(tensors))
    swapped = {**tensors, "layers.1": tensors["layers.2"], "layers.2": tensors["layers.1"]}
    with pytest.raises(WeightError, match=r"^layers.1, layers.2 differs from .* version 3\n"):
        verify(expected, published(swapped))
    with pytest.raises(WeightError, match=r"layers.7 and 4 more differs"):
        verify(expected, published({name: -tensor for name, tensor in tensors.items()}))
    del swapped["layers.5"]
    with pytest.raises(WeightError, match=r"layers.5 of version 3 is on one side only"):
        verify(expected, published(swapped))
    with pytest.raises(WeightError, match=r"layers.5 of version 3 is on one side only"):
        verify(published(swapped), expected)


def test_a_version_behind_is_refused_even_with_the_same_bits() -> None:
    tensors = {"norm": torch.ones(4)}
    with pytest.raises(WeightError, match="are version 2, and version 3 is needed"):
        verify(published(tensors), published(tensors, version=2))


def test_what_is_cast_on_the_way_is_digested_as_it_arrives() -> None:
    values = torch.randn(40, 9)
    box = Slice(((0, 40), (0, 9)))
    assert number(slice_digest(values, box, torch.bfloat16)) == digest(values.bfloat16())
    assert number(slice_digest(values, box, torch.bfloat16)) != digest(values)


def test_ranks_that_lack_a_part_cannot_digest() -> None:
    placement = Placement(Mesh.of(dp=2, tp=2), {"tp": Split(0)})
    assert set(owned(placement, (4,), (0, 1, 2, 3))) == {0, 1}
    assert set(owned(placement, (4,), (2, 3))) == {2, 3}
    assert set(owned(placement, (4,), (0, 1, 2, 3), 1)) == {2, 3}
    with pytest.raises(WeightError, match=r"ranks \[0, 2\] hold 2 of 4 elements"):
        owned(placement, (4,), (0, 2))
    assert slices(placement, (4,))[0] == owned(placement, (4,), (0, 1))[0]


def splitmix(place: int, seed: int) -> int:
    """Return Steele, Lea and Flood's splitmix64 of an index, in plain integers; odd."""
    found = (place + 1) * seed % 2**64
    found = (found ^ found >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    found = (found ^ found >> 27) * 0x94D049BB133111EB % 2**64
    return (found ^ found >> 31) | 1


def test_a_digest_is_the_one_that_its_formula_gives_in_plain_integers() -> None:
    """Sum over elements of key(row) key(column) mix(bits), modulo 2^64, so that all releases agree."""
    values = torch.tensor([[1, -2, 3], [40, 5, -600]], dtype=torch.int32)
    total = 0
    for row in range(2):
        for column in range(3):
            mixed = int(values[row, column]) * 0xBF58476D1CE4E5B9 % 2**64
            signed = mixed - 2**64 if mixed >= 2**63 else mixed
            mixed = (signed ^ signed >> 29) % 2**64
            total += splitmix(row, 0x9E3779B97F4A7C15) * splitmix(column, 0xD1B54A32D192ED03) * mixed
    assert digest(values) == total % 2**64

"""Counter-based random numbers: published values, and dependence on nothing but the address."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.formulas.counter import permutation, philox, uniform

# Random123's kat_vectors for philox 4x32, 10 rounds: counter, key, answer.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_a_uniform_number_is_the_first_53_bits_of_two_published_words(
    counter: str, key: str, answer: str
) -> None:
    """27 bits of the first word, 26 of the second, as a fraction; the seed is the key, its low word first."""
    position, sample, prompt, epoch = words(counter)
    low, high = words(key)
    first, second = words(answer)[:2]
    wanted = Fraction((first >> 5) * 2**26 + (second >> 6), 2**53)
    found = uniform(low + (high << 32), torch.tensor([epoch, prompt, sample]), torch.tensor(position))
    assert Fraction(found.item()) == wanted


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    first, second = words(key)
    assert philox(torch.tensor(words(counter)), (first, second)).tolist() == words(answer)


IDS = st.tuples(st.integers(-1, 5), st.integers(0, 10**6), st.integers(0, 63))


@settings(max_examples=40, deadline=None)
@given(ids=st.lists(IDS, min_size=1, max_size=8, unique=True), data=st.data())
def test_order_blind(ids: list[tuple[int, int, int]], data: st.DataObject) -> None:
    rows = torch.tensor(ids)
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 4096), min_size=len(ids), max_size=len(ids))))
    together = uniform(7, rows, positions)
    alone = torch.stack([uniform(7, row, place) for row, place in zip(rows, positions, strict=True)])
    assert torch.equal(together, alone)
    order = torch.tensor(data.draw(st.permutations(range(len(ids)))))
    assert torch.equal(uniform(7, rows[order], positions[order]), together[order])


def test_numbers_are_uniform_and_have_53_bits() -> None:
    ids = torch.tensor([0, 3, 1]).expand(20_000, 3)
    numbers = uniform(1, ids, torch.arange(20_000))
    assert numbers.dtype == torch.float64
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert float((counts - 2000).abs().max()) < 5 * 2000**0.5
    assert bool(((numbers * 2**53) % 1 == 0).all())
    assert len(numbers.unique()) == 20_000
    assert abs(float(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1])) < 0.03


def test_seed_epoch_prompt_sample_and_position_each_matter() -> None:
    row = torch.tensor([1, 2, 3])
    base = uniform(5, row, torch.tensor(4))
    others = [uniform(seed, row, torch.tensor(4)) for seed in (6, 5 + (1 << 32), -5)]
    others += [uniform(5, row + torch.eye(3, dtype=torch.int64)[axis], torch.tensor(4)) for axis in range(3)]
    others.append(uniform(5, row, torch.tensor(5)))
    assert len({float(number) for number in [base, *others]}) == 8


def test_positions_broadcast_against_rows() -> None:
    ids = torch.tensor([[0, 0, 0], [0, 1, 0]])
    grid = uniform(2, ids[:, None], torch.arange(3))
    assert grid.shape == (2, 3)
    assert grid[1, 2] == uniform(2, ids[1], torch.tensor(2))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(-(2**63), 2**64), size=st.integers(0, 50), stream=st.integers(0, 10**6))
def test_permutations_hold_every_number_once(seed: int, size: int, stream: int) -> None:
    assert sorted(permutation(seed, size, stream).tolist()) == list(range(size))


def test_permutations_differ_by_seed_and_stream() -> None:
    base = permutation(3, 50)
    assert torch.equal(base, permutation(3, 50))
    assert not torch.equal(base, permutation(4, 50))
    assert not torch.equal(base, permutation(3, 50, stream=1))


def test_all_orders_of_four_come_about_equally_often() -> None:
    seen: dict[tuple[int, ...], int] = {}
    for stream in range(2400):
        order = tuple(permutation(0, 4, stream).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    assert max(abs(count - 100) for count in seen.values()) < 50

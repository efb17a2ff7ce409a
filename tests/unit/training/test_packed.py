"""Packed rows: every prefix once, and attention as if each row ran alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rillflow.models.attention import ATTENTION, Scores, causal, register
from rillflow.records.ragged import Ragged
from rillflow.sharding.packed_rows import PackedAttention, pack

CPU = torch.device("cpu")
ROWS = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(rows=ROWS)
def test_every_beginning_is_there_once_and_rows_read_back(rows: list[list[int]]) -> None:
    column = Ragged.from_rows(rows)
    packed = pack(column)
    beginnings = {tuple(row[: place + 1]) for row in rows for place in range(len(row))}
    assert len(packed.tokens) == len(packed.positions) == len(beginnings)
    assert torch.equal(packed.tokens[packed.places.values], column.values)
    assert torch.equal(packed.positions[packed.places.values], column.positions)
    assert torch.equal(packed.places.lengths, column.lengths)


def alone(row_places: Tensor, states: tuple[Tensor, Tensor, Tensor], scores: Scores) -> Tensor:
    query, key, value = (part[:, :, row_places] for part in states)
    return causal(query, key, value, scores).transpose(1, 2)[0]


ALIKE = st.builds(
    lambda prompts, answers: [[*prompts[place % len(prompts)], *one] for place, one in enumerate(answers)],
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=50), min_size=1, max_size=2),
    st.lists(st.lists(st.integers(0, 1), max_size=20), min_size=1, max_size=6),
)
"""Answers to one or two prompts."""


@settings(max_examples=100, deadline=None)
@given(
    rows=ALIKE | st.lists(st.lists(st.integers(0, 1), max_size=40), min_size=1, max_size=6).filter(any),
    window=st.sampled_from([None, 1, 3, 100]),
    softcap=st.sampled_from([None, 0.5]),
    has_sinks=st.booleans(),
)
def test_attention_is_that_of_each_row_alone(
    rows: list[list[int]], window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    packed = pack(Ragged.from_rows(rows))
    count = len(packed.tokens)
    generator = torch.Generator().manual_seed(count)
    states = tuple(
        torch.randn(1, heads, count, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    leaves = tuple(part.clone().requires_grad_() for part in states)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64) if has_sinks else None
    scores = Scores(scaling=0.5, window=window, softcap=softcap, sinks=sinks)
    found = PackedAttention(packed, CPU).attend(0, *leaves, scores)
    others = tuple(part.clone().requires_grad_() for part in states)
    slopes = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    (found * slopes).sum().backward()
    seen: set[int] = set()
    for places in packed.places.rows():
        expected = alone(places, others, scores)
        torch.testing.assert_close(found[0, places], expected, rtol=1e-10, atol=1e-12)
        new = [index for index, place in enumerate(places.tolist()) if place not in seen]
        seen |= set(places.tolist())
        (expected[new] * slopes[0, places[new]]).sum().backward()
    for leaf, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "settings_", [{}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}]
)
def test_the_whole_model_reads_packed_rows_as_it_reads_each_alone(
    make_module: Callable[..., PreTrainedModel], settings_: dict[str, object]
) -> None:
    module = make_module(**settings_)
    rows = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9], [8] * 40, [1, 2, 3, 4, 5, 6, 7], [5]]
    packed = pack(Ragged.from_rows(rows))
    plan = PackedAttention(packed, CPU)
    with torch.no_grad():
        logits = module(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            use_cache=False,
            attention_plan=plan,
        ).logits[0]
        for row, places in zip(rows, packed.places.rows(), strict=True):
            expected = module(input_ids=torch.tensor([row]), use_cache=False).logits[0]
            torch.testing.assert_close(logits[places], expected, rtol=1e-4, atol=1e-5)
    assert plan.layers == {0, 1}


HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gemma3_text": {**HEADS, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6},
    "mixtral": {**HEADS, "num_key_value_heads": 2, "num_local_experts": 4},
    "opt": {**HEADS, "word_embed_proj_dim": 32},
}


@pytest.mark.parametrize("kind", SMALL)
def test_other_architectures_read_packed_rows_too(kind: str) -> None:
    register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=64, **SMALL[kind])
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    rows = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9], [8, 9] * 10, [5]]
    packed = pack(Ragged.from_rows(rows))
    keep = torch.arange(len(packed.tokens)).flip(0)
    with torch.no_grad():
        logits = (
            module(
                input_ids=packed.tokens[None],
                position_ids=packed.positions[None],
                use_cache=False,
                attention_plan=PackedAttention(packed, CPU),
                logits_to_keep=keep,
            )
            .logits[0]
            .flip(0)
        )
        for row, places in zip(rows, packed.places.rows(), strict=True):
            expected = module(input_ids=torch.tensor([row]), use_cache=False).logits[0]
            torch.testing.assert_close(logits[places], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "buckets"),
    [
        ([400, 390, 200, 180, 60, 30, 12, 9, 4, 1], [(2, 400), (2, 200), (1, 60), (5, 30)]),
        ([12, 500, 3], [(1, 500), (2, 12)]),
        ([7], [(1, 7)]),
        ([0, 5, 0], [(1, 5)]),
    ],
)
def test_rows_of_like_length_lie_side_by_side_with_little_padding(
    lengths: list[int], buckets: list[tuple[int, int]]
) -> None:
    packed = pack(Ragged.from_rows([[row] * length for row, length in enumerate(lengths)]))
    plan = PackedAttention(packed, CPU)
    assert [(bucket.rows, len(bucket.keys.index) // bucket.rows) for bucket in plan._buckets] == buckets


def test_of_rows_that_share_most_their_own_tokens_ask() -> None:
    prompts = [[5] * 40, [6] * 36]
    rows = [[*prompt, *[7 + sample] * (8 + sample)] for prompt in prompts for sample in range(4)]
    rows += [rows[0], rows[0][:20], rows[0][:12] + [3] * 30]
    packed = pack(Ragged.from_rows(rows))
    assert packed.shared.tolist() == [20, 40, 40, 40, 0, 36, 36, 36, 48, 12, 0]
    plan = PackedAttention(packed, CPU)
    asked = [
        (bucket.rows, bucket.before, len(bucket.queries.index) // bucket.rows) for bucket in plan._buckets
    ]
    assert asked == [(6, 36, 15), (3, 0, 48), (1, 12, 8)]


def test_half_precision_is_gathered_and_summed_as_it_is() -> None:
    packed = pack(Ragged.from_rows([[1, 2, 3], [1, 2, 4], [1]]))
    states = [torch.randn(1, heads, 4, 8).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    found = PackedAttention(packed, CPU).attend(0, *states, Scores(scaling=0.3))
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16
    assert all(part.grad is not None and part.grad.dtype == torch.bfloat16 for part in states)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=5).filter(any),
    more=st.integers(0, 9),
)
def test_tokens_that_no_row_sees_change_nothing(rows: list[list[int]], more: int) -> None:
    packed = pack(Ragged.from_rows(rows))
    count = len(packed.tokens)
    generator = torch.Generator().manual_seed(count)
    states = [torch.randn(1, heads, count + more, 8, generator=generator) for heads in (4, 2, 2)]
    slopes = torch.randn(1, count + more, 4, 8, generator=generator)
    plan, gradients = PackedAttention(packed, CPU), []
    for size, used in ((count, plan), (count + more, plan.padded(count + more))):
        leaves = [part[:, :, :size].clone().requires_grad_() for part in states]
        found = used.attend(0, *leaves, Scores(scaling=0.5))
        assert found.shape == (1, size, 4, 8) and bool(torch.isfinite(found).all())
        (found * slopes[:, :size]).sum().backward()
        gradients.append((found[:, :count], [leaf.grad[:, :, :count] for leaf in leaves]))
        assert not any(bool(leaf.grad[:, :, count:].any()) for leaf in leaves)
    assert torch.equal(gradients[0][0], gradients[1][0])
    for one, other in zip(gradients[0][1], gradients[1][1], strict=True):
        assert torch.equal(one, other)

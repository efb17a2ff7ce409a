"""Laws of every codec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from rillflow.errors import WeightError
from rillflow.sharding.codec import Codec, State
from rillflow_links.codecs.registry import GRADIENTS, WEIGHTS
from rillflow_links.codecs.top_k import kept
from rillflow_links.config import FEW, LinksConfig

LINKS = LinksConfig(share=0.02, lifespan=3, full_every=100)
CODECS: dict[str, Codec] = {name: make(LINKS) for name, make in {**WEIGHTS, **GRADIENTS}.items()}
WITH_ERROR = ("top_k", "dct", "sparse_loco")
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn),
    *(torch.int8, torch.int64, torch.uint8, torch.uint16),
)
every_codec = pytest.mark.parametrize("name", CODECS)
shapes = st.sampled_from([(0,), (1,), (3, 5), (FEW - 1,), (FEW,), (33, 70), (4096,), (3, 5000)])


def bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def drawn(shape: tuple[int, ...], seed: int, zeros: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values.masked_fill(torch.rand(shape, generator=generator) < zeros, 0)


@every_codec
@settings(deadline=None, max_examples=60)
@given(shape=shapes, seed=st.integers(0, 999), zeros=st.sampled_from([0.0, 0.5, 0.999, 1.0]))
def test_what_is_decoded_has_the_shape_and_only_values_of_the_tensor(
    name: str, shape: tuple[int, ...], seed: int, zeros: float
) -> None:
    codec, tensor = CODECS[name], drawn(shape, seed, zeros)
    before, into = tensor.clone(), torch.full(shape, 7.0)
    codec.decode(codec.encode(tensor, {}), into, {})
    assert torch.equal(tensor, before), "the tensor is not changed"
    if name == "delta":
        assert torch.equal(bits(into), bits(tensor))
    elif name in ("top_k", "dct") and tensor.numel() >= FEW:
        sent = into != 0
        assert torch.equal(into[sent], tensor[sent].bfloat16().float())
        assert int(sent.sum()) <= kept(LINKS.share, tensor.numel()), "also if most values are 0"
        left = tensor[~sent].abs().max() if bool((~sent).any()) else torch.tensor(0.0)
        assert not bool(sent.any()) or bool(left <= into[sent].abs().min() * (1 + 2**-8))
    elif name == "sparse_loco" and tensor.numel() >= FEW:
        assert torch.equal(into.sign() * (into != 0), tensor.sign() * (into != 0))
    else:
        room = {"cast": 2**-8, "int8": 1 / 253}.get(name, 0.0) * tensor.abs().max() if tensor.numel() else 0.0
        assert bool(((into - tensor).abs() <= room + 1e-12).all())


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=60)
@given(
    shape=shapes,
    seed=st.integers(0, 999),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.4, 1.0]),
    odd=st.booleans(),
)
def test_differences_give_the_bits_of_every_dtype(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int, share: float, odd: bool
) -> None:
    codec, sender, receiver = CODECS["delta"], State(), State()
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(shape).to(dtype)
    width = held.element_size()
    whole = torch.randint(0, 256, (held.numel() * width,), generator=generator, dtype=torch.uint8)
    for _ in range(3):  # any bits: NaNs with payloads, infinities, -0.0
        tensor = whole.clone().view(dtype).view(shape)
        payload = codec.encode(tensor, sender)
        codec.decode(payload, held, receiver)
        assert torch.equal(bits(held), bits(tensor))
        assert payload.numel() <= tensor.nbytes + 64
        changed = torch.rand(held.numel(), generator=generator) < share
        step = torch.randint(1, 256, (held.numel(), width), generator=generator, dtype=torch.uint8)
        if not odd:
            step[:, 1:] = 0  # steps of the lowest byte alone
        whole = (whole.view(-1, width) + step * changed[:, None]).flatten()


@pytest.mark.parametrize("name", WITH_ERROR)
@settings(deadline=None, max_examples=40)
@given(shape=shapes, seed=st.integers(0, 999), steps=st.integers(1, 7))
def test_what_is_not_sent_is_kept(name: str, shape: tuple[int, ...], seed: int, steps: int) -> None:
    """Sum of the decoded tensors + error = sum of the tensors, to float32 rounding."""
    codec, state = CODECS[name], State()
    given_sum, decoded_sum = torch.zeros(shape), torch.zeros(shape)
    for step in range(steps):
        tensor, into = drawn(shape, seed + step), torch.empty(shape)
        codec.decode(codec.encode(tensor, state), into, {})
        given_sum += tensor
        decoded_sum += into
    error = state["error"].view(shape) if "error" in state else torch.zeros(shape)
    assert torch.allclose(decoded_sum + error, given_sum, atol=1e-5 * steps)


def test_a_threshold_holds_for_its_lifespan() -> None:
    codec, state = CODECS["dct"], State()
    thresholds = []
    for step in range(7):
        codec.encode(drawn((5000,), 1) * (step + 1), state)
        thresholds.append(float(state["threshold"]))
    assert thresholds[0] == thresholds[2] < thresholds[3] == thresholds[5] < thresholds[6]


@every_codec
@pytest.mark.parametrize("shape", [(100,), (3000,)])
@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 99), place=st.floats(0, 0.9999), how=st.sampled_from(["flip", "cut", "more", "none"])
)
def test_damage_is_found_before_anything_is_written(
    name: str, shape: tuple[int, ...], seed: int, place: float, how: str
) -> None:
    codec, sender, receiver = CODECS[name], State(), State()
    into = torch.zeros(shape)
    first = drawn(shape, seed)
    codec.decode(codec.encode(first, sender), into, receiver)
    second = first.clone()
    second[: 1 + seed % 50] += 0.25
    payload = codec.encode(second, sender)
    index = int(place * payload.numel())
    hurt = {
        "flip": lambda: torch.cat([payload[:index], payload[index : index + 1] ^ 4, payload[index + 1 :]]),
        "cut": lambda: payload[:index],
        "more": lambda: torch.cat([payload, payload[:1]]),
        "none": lambda: payload[:0],
    }[how]()
    before, kept_state = into.clone(), dict(receiver)
    with pytest.raises(WeightError) as caught:
        codec.decode(hurt, into, receiver)
    assert caught.value.why and caught.value.fix
    assert torch.equal(into, before) and receiver == kept_state
    codec.decode(payload, into, receiver)


@every_codec
def test_a_payload_of_another_codec_shape_or_dtype_is_refused(name: str) -> None:
    payload = CODECS[name].encode(drawn((600,), 0), {})
    for into in (torch.zeros(601), torch.zeros(600, dtype=torch.bfloat16)):
        with pytest.raises(WeightError, match="a payload holds 600 values of float32"):
            CODECS[name].decode(payload, into, {})
    for other, codec in CODECS.items():
        if other != name:
            with pytest.raises(WeightError, match="a payload is of codec"):
                codec.decode(payload, torch.zeros(600), {})


@every_codec
def test_a_saved_state_goes_on_with_the_same_payloads(name: str, tmp_path: Path) -> None:
    codec, state = CODECS[name], State()
    for step in range(4):
        codec.encode(drawn((5000,), step), state)
    save_file(state, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    for step in range(4, 8):
        assert torch.equal(
            codec.encode(drawn((5000,), step), state), codec.encode(drawn((5000,), step), loaded)
        )


def test_a_difference_needs_the_version_that_it_belongs_to() -> None:
    codec, sender = CODECS["delta"], State()
    first = drawn((3000,), 0)
    second, third = first.clone(), first.clone()
    second[5], third[7] = 1.0, 2.0
    whole, one, two = (codec.encode(each, sender) for each in (first, second, third))
    held, receiver = torch.zeros(3000), State()
    with pytest.raises(WeightError, match="a difference to version 1") as caught:
        codec.decode(one, held, receiver)
    assert caught.value.why == "the receiver holds no version yet"
    codec.decode(whole, held, receiver)
    with pytest.raises(WeightError, match="a difference to version 2") as caught:
        codec.decode(two, held, receiver)  # one was lost
    assert caught.value.why == "the receiver holds version 1"
    codec.decode(one, held, receiver)
    with pytest.raises(WeightError, match="a difference to version 1"):
        codec.decode(one, held, receiver)  # it came twice
    held[7] += 1
    with pytest.raises(WeightError, match="does not give the sender's values"):
        codec.decode(two, held, receiver)
    held[7] = first[7]
    codec.decode(two, held, receiver)
    assert torch.equal(held, third)


def test_every_nth_tensor_is_whole() -> None:
    codec, state = WEIGHTS["delta"](LinksConfig(full_every=3)), State()
    sizes = [codec.encode(drawn((3000,), 0), state).numel() for _ in range(7)]
    assert [size > 3000 for size in sizes] == [True, False, True, False, False, True, False]


@pytest.mark.parametrize(("name", "least"), [("top_k", 75), ("dct", 75), ("sparse_loco", 150), ("int8", 3.9)])
def test_gradients_take_few_bytes(name: str, least: float) -> None:
    make: Callable[[LinksConfig], Codec] = GRADIENTS[name]
    tensor = drawn((400_000,), 3)
    assert tensor.nbytes / make(LinksConfig(share=0.02)).encode(tensor, {}).numel() > least

"""Chunked log probabilities equal those of log_softmax, and so do their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rillflow.errors import FormulaError
from rillflow.formulas.logprobs import HeadLogits, TokenLogprobs, token_logprobs


def reference(logits: Tensor, tokens: Tensor, temperature: float) -> TokenLogprobs:
    logs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return TokenLogprobs(
        logprobs=logs.gather(-1, tokens[:, None])[:, 0],
        entropy=-(logs.exp() * logs).sum(-1),
        likeliest=logs.gather(-1, tokens[:, None])[:, 0] >= logs.amax(-1),
    )


def example(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = 4 * torch.randn(rows, vocabulary, generator=generator)
    return logits.to(dtype), torch.randint(0, vocabulary, (rows,), generator=generator)


@pytest.mark.parametrize("rows", [1, 5, 700])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)]
)
def test_values_are_those_of_log_softmax(
    rows: int, temperature: float, dtype: torch.dtype, tolerance: float
) -> None:
    logits, tokens = example(rows, 600, dtype)  # 700 rows of 600 are two chunks
    found, expected = token_logprobs(logits, tokens, temperature), reference(logits, tokens, temperature)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=tolerance, atol=tolerance)
    assert torch.equal(found.likeliest, expected.likeliest)


def test_a_vocabulary_larger_than_a_chunk_is_taken_row_by_row() -> None:
    logits, tokens = example(2, 2**18 + 64, torch.float64)  # the vocabulary size of Gemma 3
    found, expected = token_logprobs(logits, tokens), reference(logits, tokens, 1.0)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 600, 5_000, 1 << 27])
def test_the_size_of_a_chunk_changes_no_value(chunk: int) -> None:
    logits, tokens = example(70, 600, torch.float32)
    found, expected = token_logprobs(logits, tokens, chunk=chunk), token_logprobs(logits, tokens)
    assert torch.equal(found.logprobs, expected.logprobs)
    assert torch.equal(found.entropy, expected.entropy)


class Launches(TorchFunctionMode):
    """Counts operations that a device executes."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.logsumexp
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "chunks"), [("meta", 19), ("cpu", 40)])
def test_a_device_that_is_asked_gets_many_tokens_at_once(device: str, chunks: int) -> None:
    tokens = 16_384 if device == "meta" else 40  # on a CPU one row of such a vocabulary fills a cache
    logits = torch.empty(tokens, 151_936, device=device).fill_(0.0)
    with Launches() as launches:
        token_logprobs(logits, torch.zeros(tokens, dtype=torch.int64, device=device))
    assert launches.count == chunks


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_gradients_are_those_of_log_softmax(weights: tuple[float, float]) -> None:
    logits, tokens = example(700, 600, torch.float64)
    slopes = torch.randn(700, dtype=torch.float64)
    gradients = []
    for formula in (token_logprobs, reference):
        leaf = logits.clone().requires_grad_()
        found = formula(leaf, tokens, 0.8)
        (weights[0] * found.logprobs * slopes + weights[1] * found.entropy * slopes).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-13)


def test_gradcheck_agrees() -> None:
    logits, tokens = example(3, 5, torch.float64)

    def both(leaf: Tensor) -> tuple[Tensor, Tensor]:
        found = token_logprobs(leaf, tokens, 1.3)
        return found.logprobs, found.entropy

    assert torch.autograd.gradcheck(both, (logits.requires_grad_(),))


def test_narrow_logits_get_a_narrow_gradient() -> None:
    logits, tokens = example(4, 9, torch.bfloat16)
    token_logprobs(logits.requires_grad_(), tokens).logprobs.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_the_backward_pass_keeps_no_copy_of_the_logits() -> None:
    logits, tokens = example(64, 256, torch.float32)
    leaf = logits.requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(leaf, tokens)
    large = [tensor for tensor in kept if tensor.numel() >= leaf.numel()]
    assert [tensor.data_ptr() for tensor in large] == [leaf.data_ptr()]


def factors(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(size, 16, generator=generator).to(dtype) for size in (rows, vocabulary))
    return hidden, weight / 4, torch.randint(0, vocabulary, (rows,), generator=generator)


@pytest.mark.parametrize(
    "most", [1, 7 * 150, 7 * 601, 1 << 26], ids=["one token", "uneven", "all but one", "all"]
)
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_slices_of_the_vocabulary_say_what_whole_logits_say(
    most: int, weights: tuple[float, float], dtype: torch.dtype, tolerance: float
) -> None:
    *leaves, tokens = factors(7, 602, dtype)
    said, gradients = [], []
    for is_whole in (False, True):
        hidden, weight = (leaf.clone().requires_grad_() for leaf in leaves)
        if is_whole:
            found = token_logprobs(hidden @ weight.T, tokens, 0.8)
        else:
            found = token_logprobs(HeadLogits(hidden=hidden, weight=weight, most=most), tokens, 0.8)
        (weights[0] * found.logprobs + weights[1] * found.entropy).sum().backward()
        said.append((found.logprobs.detach(), found.entropy.detach()))
        gradients.append((hidden.grad, weight.grad))
        assert found.likeliest.tolist() == (hidden @ weight.T).argmax(-1).eq(tokens).tolist()
    for found, expected in zip((*said[0], *gradients[0]), (*said[1], *gradients[1]), strict=True):
        largest = max(1.0, float(expected.abs().max()))
        assert float((found - expected).abs().max()) <= tolerance * largest


def test_the_likeliest_token_may_be_of_any_slice() -> None:
    hidden, weight, _ = factors(50, 40, torch.float32)
    best = (hidden @ weight.T).argmax(-1)
    for tokens in (best, (best + 1) % 40):
        found = token_logprobs(HeadLogits(hidden=hidden, weight=weight, most=50 * 3), tokens)
        assert found.likeliest.tolist() == (tokens == best).tolist()


def test_narrow_weights_get_the_gradient_of_one_product_rounded_once() -> None:
    hidden, weight, tokens = factors(300, 90, torch.bfloat16)
    leaf = weight.requires_grad_()
    token_logprobs(HeadLogits(hidden=hidden, weight=leaf, most=300 * 8), tokens).logprobs.sum().backward()
    wide = (hidden @ weight.T).float().detach().requires_grad_()
    reference(wide, tokens, 1.0).logprobs.sum().backward()
    assert wide.grad is not None and leaf.grad is not None
    assert torch.equal(leaf.grad, wide.grad.to(torch.bfloat16).T @ hidden)


def test_slices_keep_hidden_states_and_weight_alone() -> None:
    hidden, weight, tokens = factors(64, 4096, torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        token_logprobs(HeadLogits(hidden=hidden.requires_grad_(), weight=weight, most=2**12), tokens)
    assert sum(tensor.nbytes for tensor in kept) == hidden.nbytes + weight.nbytes + tokens.nbytes + 2 * 64 * 4


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, tokens = factors(4, 9, torch.float64)
    leaf = hidden.clone().requires_grad_()
    token_logprobs(HeadLogits(hidden=leaf, weight=weight, most=8), tokens).logprobs.sum().backward()
    whole = hidden.clone().requires_grad_()
    reference(whole @ weight.T, tokens, 1.0).logprobs.sum().backward()
    torch.testing.assert_close(leaf.grad, whole.grad)
    assert weight.grad is None


def test_no_tokens_are_no_trouble() -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    found = token_logprobs(logits, torch.zeros(0, dtype=torch.int64))
    found.logprobs.sum().backward()
    assert found.entropy.shape == (0,)


def test_shapes_and_temperature_are_checked() -> None:
    tokens = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(FormulaError, match=r"\[3, 4\] and tokens \[2\]"):
        token_logprobs(torch.zeros(3, 4), tokens)
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(FormulaError, match=f"temperature is {temperature}"):
            token_logprobs(torch.zeros(2, 4), tokens, temperature)

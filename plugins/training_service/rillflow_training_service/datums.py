"""Datums: the rows of a pass, checked before they reach the model.

    bytes ─ read_pass ─> PassRequest ─ checked ─> Datum: tokens [T], targets [T] or [T, K], inputs alike

Legend: T tokens of a datum, K targets at each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import DataError, NotFiniteError, nearest
from rillflow_training_service.losses import NamedLoss, loss_of
from rillflow_training_service.wire import decoded_pass, tensor_of, tokens_of

TARGETS = "target_tokens"


@dataclass(frozen=True, kw_only=True, eq=False)
class Datum:
    """One row of a pass."""

    tokens: Tensor
    """[T] int64 tokens that the model reads."""
    targets: Tensor
    """[T] or [T, K] int64 tokens whose log probabilities are computed at each place."""
    inputs: Mapping[str, Tensor]
    """[T] or [T, K] float32 inputs of the loss, of the targets' shape."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PassRequest:
    """A ``forward_backward`` request, with its rows still encoded."""

    model_id: str
    """The trained model."""
    seq_id: int
    """Place of the request among the model's requests, from 1."""
    is_forward: bool
    """Whether the pass computes no gradient."""
    loss: str
    """Name of the loss."""
    settings: Mapping[str, float | str]
    """Settings of the loss."""
    data: Sequence[Any]
    """The encoded rows."""


def read_pass(body: bytes) -> PassRequest:
    """Return a request.

    Raises:
        DataError: the bytes are not one.
    """
    message = decoded_pass(body)
    settings: dict[str, float | str] = {each.key: each.value for each in message.options}
    for each in message.settings:
        value = each.value
        settings[each.key] = value.text if value.HasField("text") else value.number
    return PassRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        is_forward=message.is_forward,
        loss=message.loss,
        settings=settings,
        data=message.data,
    )


def checked_data(request: PassRequest, vocabulary: int, context: int) -> tuple[NamedLoss, list[Datum]]:
    """Return the loss and the rows of a request.

    Raises:
        DataError: the loss is unknown, a token is outside the vocabulary, or shapes do not fit.
        NotFiniteError: an input is not finite.
    """
    loss = loss_of(request.loss)
    if not request.data:
        raise DataError("the request has no data", why="a loss needs at least one datum")
    return loss, [
        _checked(each, f"datum {index}", loss, vocabulary, context) for index, each in enumerate(request.data)
    ]


def _checked(message: Any, place: str, loss: NamedLoss, vocabulary: int, context: int) -> Datum:
    chunks = [tokens_of(each, place) for each in message.chunks]
    tokens = torch.cat(chunks) if chunks else torch.zeros(0, dtype=torch.int64)
    given = {each.key: tensor_of(each.value, f"{each.key} of {place}") for each in message.inputs}
    if not len(tokens):
        raise DataError(f"{place} has no tokens", why="the model reads at least one token")
    if len(tokens) > context:
        raise DataError(
            f"{place} has {len(tokens)} tokens",
            why=f"the model's context is {context} tokens",
            fix="cut the datum, or serve a model with a longer context",
        )
    require_tokens(tokens, vocabulary, f"model_input of {place}")
    _require_names(given, place, loss)
    targets = given.pop(TARGETS)
    if targets.dtype.is_floating_point:
        raise DataError(f"{TARGETS} of {place} has the type float32", why="tokens are whole numbers")
    if targets.dim() not in (1, 2) or len(targets) != len(tokens) or not targets.numel():
        raise DataError(
            f"{TARGETS} of {place} has the shape {list(targets.shape)}",
            why=f"model_input has {len(tokens)} tokens, and each has one target or K targets",
            fix=f"send [{len(tokens)}], or [{len(tokens)}, K]",
        )
    targets = targets.long()
    require_tokens(targets, vocabulary, f"{TARGETS} of {place}")
    inputs = {name: _input(name, value, targets, place) for name, value in given.items()}
    if loss.name == "cross_entropy" and "weights" not in inputs:
        inputs["weights"] = torch.ones_like(targets, dtype=torch.float32)
    return Datum(tokens=tokens, targets=targets, inputs=inputs)


def _require_names(given: Mapping[str, Tensor], place: str, loss: NamedLoss) -> None:
    needs = (TARGETS, *loss.needs)
    missing = [name for name in needs if name not in given]
    if missing:
        raise DataError(
            f"{place} has no {missing[0]}",
            why=f"{loss.name} reads {', '.join(needs)}",
            fix=f"add {missing[0]} to its loss_fn_inputs",
        )
    known = (*needs, *loss.may)
    for name in given:
        if name not in known:
            raise DataError(
                f"{place} has the input {name!r}, which {loss.name} does not read",
                why=f"it reads {', '.join(known)}",
                fix=f"leave it out; {nearest(name, known)}",
            )


def _input(name: str, value: Tensor, targets: Tensor, place: str) -> Tensor:
    if value.shape != targets.shape:
        raise DataError(
            f"{name} of {place} has the shape {list(value.shape)}",
            why=f"{TARGETS} has the shape {list(targets.shape)}, and every input has its shape",
        )
    odd = (~torch.isfinite(value)).nonzero() if value.dtype.is_floating_point else value[:0]
    if len(odd):
        at = tuple(odd[0].tolist())
        raise NotFiniteError(
            f"{name} of {place} is {float(value[at])} at {list(at)}",
            why="a loss needs finite numbers; the model is unchanged",
            fix="look for a division by zero, or for log probabilities of -inf, in the client",
        )
    return value.float()


def require_tokens(tokens: Tensor, vocabulary: int, place: str) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        DataError: it names the first one.
    """
    odd = ((tokens < 0) | (tokens >= vocabulary)).flatten().nonzero()
    if len(odd):
        raise DataError(
            f"{place} has the token {int(tokens.flatten()[odd[0]])} at {int(odd[0])}",
            why=f"the model's vocabulary is 0 to {vocabulary - 1}",
            fix="encode the text with the served model's tokeniser",
        )

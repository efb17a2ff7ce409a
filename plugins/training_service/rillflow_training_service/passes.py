"""Passes: log probabilities and gradients of one request, on the model that the base runs at present.

    datums ─ rows: tokens, then the last target ─ micro_batches ─> part ─ lay_out ─> [1, U] ─ body ─> states
    states of targets with a gradient ─ head ─> logits ─> log p ─ loss ─> terms ─ backward ─> gradients
    states of the others ─ head, without a gradient ─> log p

The rows, their packing and the reading of log probabilities are those of ``training.Trainer``: shared
prefixes are computed once, and nothing is padded. Rows without any gradient run in parts of their own. A
request is never computed together with another one, so its bits do not depend on other clients.

Legend: B rows, T tokens of a datum, U packed tokens, N targets with a gradient, M targets, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rillflow.errors import NotFiniteError
from rillflow.formulas.config import MOST_LOGITS
from rillflow.formulas.logprobs import HeadLogits, token_logprobs
from rillflow.models.architecture import is_padded
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.sharding.packed_rows import Reading, lay_out
from rillflow.training.config import TrainConfig
from rillflow.training.scorer import micro_batches
from rillflow_training_service.datums import Datum
from rillflow_training_service.losses import NamedLoss
from rillflow_training_service.shared_base import SharedBase

_BUDGET: int = TrainConfig().tokens_per_micro_batch


@dataclass(frozen=True, kw_only=True, eq=False)
class PassResult:
    """Results of a request."""

    logprobs: list[Tensor]
    """[T] or [T, K] float32 for each datum."""
    loss: float
    """Sum of the terms."""
    gradients: dict[str, Tensor]
    """Gradients by parameter; empty if no target has one."""
    num_tokens: int
    """Tokens that the datums have together."""


def run_pass(
    base: SharedBase,
    parameters: Mapping[str, nn.Parameter],
    data: Sequence[Datum],
    loss: NamedLoss,
    settings: Mapping[str, float],
    *,
    learns: bool,
) -> PassResult:
    """Run a request.

    Args:
        base: the base with the adapters that are trained.
        parameters: the adapters' parameters, without gradients.
        data: rows of the request.
        loss: the loss.
        settings: settings of the loss.
        learns: whether to compute gradients.

    Raises:
        NotFiniteError: the loss is not finite.
    """
    rows = _Rows(base, data, loss, settings)
    found, gradients = [torch.empty(0)] * len(data), dict[str, Tensor]()
    total = 0.0
    try:
        for index, is_learning in rows.parts(learns=learns):
            with torch.set_grad_enabled(is_learning):
                terms, logprobs = rows.run(index, learns=is_learning)
            share = float(terms.detach())
            if not math.isfinite(share):
                raise NotFiniteError(
                    f"the loss {loss.name} of {len(index)} datums is {share}",
                    why="the model is unchanged, and this gradient is dropped",
                    fix="look for extreme log ratios or weights in the datums",
                )
            total += share
            if is_learning:
                terms.backward()  # type: ignore[no-untyped-call]
                _collect(parameters, gradients)
            for row, each in zip(index, logprobs, strict=True):
                found[row] = each
    finally:
        for parameter in parameters.values():
            parameter.grad = None
    tokens = sum(len(each.tokens) for each in data)
    return PassResult(logprobs=found, loss=total, gradients=gradients, num_tokens=tokens)


def _collect(parameters: Mapping[str, nn.Parameter], gradients: dict[str, Tensor]) -> None:
    """Move the parameters' gradients to the request's, in float32."""
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        if name in gradients:
            gradients[name] += parameter.grad
        else:
            gradients[name] = parameter.grad.float()
        parameter.grad = None


class _Rows:
    """The rows of a request."""

    def __init__(
        self, base: SharedBase, data: Sequence[Datum], loss: NamedLoss, settings: Mapping[str, float]
    ) -> None:
        self._base, self._data, self._loss, self._settings = base, data, loss, settings
        self._padded = is_padded(base.module)
        tokens = [torch.cat([each.tokens, each.targets.view(len(each.tokens), -1)[-1:, 0]]) for each in data]
        masks = [torch.arange(len(each)) > 0 for each in tokens]
        self._batch = Batch(
            ids=row_ids([RowId(0, index, 0) for index in range(len(data))]),
            fields={
                "tokens": Ragged.from_rows(tokens),
                "loss_mask": Ragged.from_rows(masks, torch.bool),
            },
        )

    def parts(self, *, learns: bool) -> Iterator[tuple[list[int], bool]]:
        """Yield rows that are computed together, and whether they have a gradient."""
        active = torch.tensor([learns and bool(self._active(each).any()) for each in self._data])
        for kind in (True, False):
            places = (active == kind).nonzero().squeeze(1)
            for part in micro_batches(self._batch.select(places), _BUDGET, padded=self._padded):
                yield places[part].tolist(), kind

    def run(self, index: Sequence[int], *, learns: bool) -> tuple[Tensor, list[Tensor]]:
        """Return the sum of the terms of some rows, and the log probabilities of each."""
        data = [self._data[row] for row in index]
        part, device = self._batch.select(list(index)), self._base.device
        reading = lay_out(part, device, back=1, padded=self._padded)
        widths = torch.tensor([each.targets.numel() // len(each.tokens) for each in data])
        per_place = torch.repeat_interleave(widths, torch.tensor([len(each.tokens) for each in data]))
        wanted = torch.repeat_interleave(reading.wanted.cpu(), per_place).to(device)
        targets = torch.cat([each.targets.flatten() for each in data]).to(device)
        active = torch.cat([self._active(each).flatten() for each in data]) & learns
        learning, silent = (kind.nonzero().squeeze(1).to(device) for kind in (active, ~active))
        states = self._states(reading)
        logprobs = torch.zeros(len(targets), dtype=torch.float32, device=device)
        terms = torch.zeros((), device=device)
        if len(learning):
            read = self._read(states, wanted[learning], targets[learning])
            logprobs[learning] = read.detach().float()
            inputs = self._inputs(data, learning)
            terms = self._loss.terms(read, inputs, self._settings).sum()
        if len(silent):
            with torch.no_grad():
                read = self._read(states.detach(), wanted[silent], targets[silent])
                logprobs[silent] = read.float()
                rest = self._loss.terms(read, self._inputs(data, silent), self._settings).sum()
            terms = terms + rest
        sizes = [each.targets.numel() for each in data]
        split = torch.split(logprobs.cpu(), sizes)
        return terms, [each.view(datum.targets.shape) for each, datum in zip(split, data, strict=True)]

    def _active(self, datum: Datum) -> Tensor:
        """Return whether each target has a gradient, of the targets' shape."""
        factor = self._loss.factor
        return datum.inputs[factor] != 0 if factor else torch.ones_like(datum.targets, dtype=torch.bool)

    def _inputs(self, data: Sequence[Datum], chosen: Tensor) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name in {name: None for each in data for name in each.inputs}:
            values = torch.cat([self._input(each, name).flatten() for each in data])
            found[name] = values.to(self._base.device)[chosen]
        return found

    def _input(self, datum: Datum, name: str) -> Tensor:
        """Return an input of a datum; a threshold that only other datums have is the setting."""
        if name in datum.inputs:
            return datum.inputs[name]
        return torch.full(datum.targets.shape, self._settings[name])

    def _states(self, reading: Reading) -> Tensor:
        """Return [U, D] hidden states; of a model whose head does more than a product, [U, V] logits."""
        module = self._base.module
        if self._base.is_plain:
            states: Tensor = module.base_model(**reading.inputs).last_hidden_state
        else:
            states = module(**reading.inputs).logits
        reading.check(module)
        return states.flatten(0, 1)

    def _read(self, states: Tensor, wanted: Tensor, targets: Tensor) -> Tensor:
        """Return log probabilities of targets at some of the packed tokens."""
        chosen = states.index_select(0, wanted)
        if not self._base.is_plain:
            return token_logprobs(chosen, targets).logprobs
        head = self._base.head
        if len(chosen) * self._base.vocabulary <= MOST_LOGITS:
            return token_logprobs(head(chosen[None])[0], targets).logprobs
        if type(head) is nn.Linear:
            return token_logprobs(HeadLogits(hidden=chosen, weight=head.weight), targets).logprobs

        def some(states: Tensor, targets: Tensor) -> Tensor:
            return token_logprobs(head(states[None])[0], targets).logprobs

        size = max(1, MOST_LOGITS // self._base.vocabulary)
        pieces = zip(torch.split(chosen, size), torch.split(targets, size), strict=True)
        return torch.cat([checkpoint(some, *piece, use_reentrant=False) for piece in pieces])

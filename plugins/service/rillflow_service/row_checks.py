"""Row checks: what a put row must fulfil before the run trains on it.

    RowRules          tokens, lengths, finite log probabilities, version, finish       every row
    LogprobCheck      log probabilities as the rank's own module computes them         a share of the rows

A refusal names the row, the place in it, both values and the rule. Rules have names, by which refusals are
counted: tokens, length, aligned, finite, positive, version, finish, logprobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.formulas.counter import uniform
from rillflow.formulas.logprobs import HeadLogits, token_logprobs
from rillflow.models.architecture import has_plain_head
from rillflow.rollout.engine import Stops
from rillflow_service.requests import SampledRow
from rillflow_service.row_leases import Offered, RefusedRow

ROUNDING = 1e-6
"""Largest log probability: rounding may lift the one of a sure token above 0."""
_EXACT_GAP, _MEAN_GAP = 1e-3, 0.05
"""Default tolerances: of a token in float32, of the mean of a row in narrower types."""
WATCHED_ROWS = 64
"""Rows in a row that a client must pass after a refusal, before only a share is checked again."""
_DRAW = 0x636865636B
"""Changes the seed, so that the choice of checked rows is no function of the rows' own random numbers."""


class RowRules:
    """Rules that need no weights.

    Args:
        vocabulary: number of tokens of the model.
        stop_tokens: tokens that end a row.
        stops: all texts that end a row; None if tokens suffice.
    """

    def __init__(self, *, vocabulary: int, stop_tokens: frozenset[int], stops: Stops | None) -> None:
        self._vocabulary, self._stop_tokens, self._stops = vocabulary, stop_tokens, stops

    def check(self, row: SampledRow, offered: Offered, newest: int) -> list[float]:
        """Return the log probabilities of a row that fulfils every rule.

        Raises:
            RefusedRow: it does not.
        """
        name = f"row {row.row} ({offered.rollout.row})"
        self._check_tokens(row, offered, name)
        logprobs = _checked_logprobs(row, name)
        if not offered.oldest <= row.version <= newest:
            raise RefusedRow(
                "version",
                f"{name} has version {row.version}",
                why=f"versions {offered.oldest} to {newest} may sample it"
                + (f"; version {row.version} was never published" if row.version > newest else ""),
                fix="load the weights of GET /v1/weights, and put the version that sampled the tokens",
            )
        self._check_finish(row, offered, name)
        return logprobs

    def _check_tokens(self, row: SampledRow, offered: Offered, name: str) -> None:
        if not 0 < len(row.tokens) <= offered.most:
            why = f"a row has 1 to {offered.most} (max_tokens of the row)"
            fix = "end a row at its max_tokens, and put no prompt tokens"
            raise RefusedRow("length", f"{name} has {len(row.tokens)} sampled tokens", why=why, fix=fix)
        for place, token in enumerate(row.tokens):
            if not 0 <= token < self._vocabulary:
                why = f"the model's vocabulary is 0 to {self._vocabulary - 1}"
                fix = "sample with the model and the tokens of GET /v1/model"
                raise RefusedRow("tokens", f"{name} has token {token} at position {place}", why=why, fix=fix)

    def _check_finish(self, row: SampledRow, offered: Offered, name: str) -> None:
        rollout = offered.rollout
        own = [token for token, is_own in zip(rollout.tokens, rollout.loss_mask, strict=True) if is_own]
        before = own[-self._stops.longest :] if self._stops is not None else []
        for place in range(len(row.tokens) - 1):
            if self._ends(row.tokens, place, before):
                what = f"{name} goes on after position {place}, token {row.tokens[place]}"
                why = "that token ends the row: it is a stop token, or completes a stop text"
                fix = "end a row at the stop tokens and stop texts of GET /v1/model"
                raise RefusedRow("finish", what, why=why, fix=fix)
        is_stopped = self._ends(row.tokens, len(row.tokens) - 1, before)
        expected = "stop" if is_stopped else "length"
        if row.finish != expected or not (is_stopped or len(row.tokens) == offered.most):
            last = f"token {row.tokens[-1]} {'ends' if is_stopped else 'does not end'} a row"
            what = f"{name} has finish {row.finish!r} with {len(row.tokens)} of {offered.most} tokens"
            why = f"{last}; a row ends at a stop or at its max_tokens"
            fix = "put whole rows, with finish stop if the last token ends the row, else length"
            raise RefusedRow("finish", what, why=why, fix=fix)

    def _ends(self, tokens: Sequence[int], place: int, before: Sequence[int]) -> bool:
        """Return whether the token at ``place`` ends the row, whose earlier turns sampled ``before``."""
        if tokens[place] in self._stop_tokens or self._stops is None:
            return tokens[place] in self._stop_tokens
        longest = self._stops.longest
        return self._stops.ends([*before, *tokens[max(0, place + 1 - longest) : place + 1]][-longest:])


def _checked_logprobs(row: SampledRow, name: str) -> list[float]:
    """Return the log probabilities, at most 0.

    Raises:
        RefusedRow: there are more or fewer than tokens, or one is not finite or above 0.
    """
    if len(row.logprobs) != len(row.tokens):
        what = f"{name} has {len(row.logprobs)} log probabilities and {len(row.tokens)} tokens"
        why = "every sampled token has one log probability"
        fix = "put the log probability of each sampled token, and none of the prompt"
        raise RefusedRow("aligned", what, why=why, fix=fix)
    found = []
    for place, value in enumerate(row.logprobs):
        if value is None or not math.isfinite(value):
            what = f"{name} has the log probability {value} at position {place}, token {row.tokens[place]}"
            why = "a log probability is a finite number (null is what JSON makes of NaN)"
            fix = "check the engine's logits and the digests of the weights"
            raise RefusedRow("finite", what, why=why, fix=fix)
        if value > ROUNDING:
            what = f"{name} has the log probability {value:g} at position {place}, token {row.tokens[place]}"
            why = "a probability is at most 1, so its logarithm is at most 0"
            fix = "put log_softmax of the logits at the sampled token"
            raise RefusedRow("positive", what, why=why, fix=fix)
        found.append(min(value, 0.0))
    return found


class LogprobCheck:
    """Compares log probabilities of a share of the rows with the rank's own module.

    Args:
        module: the decoder with the weights of the newest version.
        share: share of the rows.
        tolerance: largest difference of a token; None for the default of the module's type.
        seed: chooses the rows.
    """

    def __init__(self, module: nn.Module, *, share: float, tolerance: float | None, seed: int) -> None:
        self._module, self._share, self._tolerance, self._seed = module, share, tolerance, seed ^ _DRAW
        self._seen: set[str] = set()
        self._watched: dict[str, int] = {}
        self._is_plain: bool | None = None  # tried when there are weights
        self.checked = 0
        """Number of compared rows."""

    def begin(self) -> None:
        """Check the first row of every client again: there are new weights."""
        self._seen.clear()

    def check(self, row: SampledRow, offered: Offered, client: str) -> None:
        """Compare a row, if it is one of the share, or its client's first with these weights.

        After a refusal every row of the client is compared, until ``WATCHED_ROWS`` in a row have passed.

        Raises:
            RefusedRow: a log probability differs by more than the tolerance, or a greedy token is not the
                likeliest.
        """
        drawn = uniform(self._seed, torch.tensor(offered.rollout.row), torch.tensor(len(row.tokens)))
        if client in self._seen and client not in self._watched and float(drawn) >= self._share:
            return
        left = self._watched.pop(client, 1)
        self._watched[client] = WATCHED_ROWS  # until the row has passed
        self.checked += 1
        begin, temperature = len(offered.rollout.tokens), offered.temperature
        tokens = [*offered.rollout.tokens, *row.tokens]
        own, below = self._read(tokens, begin, temperature or 1.0)
        self._compare(row, offered, own.cpu())
        if temperature == 0 and bool((below > (self._tolerance or _MEAN_GAP)).any()):
            what = f"row {row.row} ({offered.rollout.row}) has a token that is not the likeliest"
            why = "temperature 0 takes the likeliest token"
            fix = "take the argmax of the logits for rows of temperature 0"
            raise RefusedRow("logprobs", what, why=why, fix=fix)
        self._seen.add(client)
        self._watched.pop(client)
        if left > 1:
            self._watched[client] = left - 1

    def _compare(self, row: SampledRow, offered: Offered, own: Tensor) -> None:
        given = torch.tensor(row.logprobs, dtype=torch.float32)
        gaps = (own - given).abs().nan_to_num(torch.inf)
        is_mean = self._tolerance is None and next(self._module.parameters()).dtype.itemsize < 4
        most = self._tolerance or (_MEAN_GAP if is_mean else _EXACT_GAP)
        gap, which = (gaps.mean(), "mean") if is_mean else (gaps.max(), "largest")
        if float(gap) <= most:
            return
        place = int(gaps.argmax())
        raise RefusedRow(
            "logprobs",
            f"row {row.row} ({offered.rollout.row}) has the log probability {float(given[place]):.6g} at "
            f"position {place}, token {row.tokens[place]}; the run computes {float(own[place]):.6g}",
            why=f"the {which} difference with version {row.version} at temperature "
            f"{offered.temperature:g} is {float(gap):.3g}, more than {most:g}",
            fix="load the version's weights whole, and put log_softmax(logits / temperature) over the whole "
            "vocabulary; rollout.service.check_tolerance allows for coarser arithmetic",
        )

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log probability, at temperature 1, of every token but the first."""
        found: list[float] = self._read(tokens, 1, 1.0)[0].tolist()
        return found

    @torch.inference_mode()
    def _read(self, tokens: Sequence[int], begin: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log probabilities of the tokens from ``begin`` on, and how far each is below the likeliest.

        The head of a usual model makes the logits of some tokens, or of a part of the vocabulary, at a time.
        """
        module: Any = self._module
        ids = torch.tensor([tokens], device=next(self._module.parameters()).device)
        given: Tensor | HeadLogits
        if self._is_plain is None:
            self._is_plain = has_plain_head(module)
        if self._is_plain:
            hidden = module.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, begin - 1 : -1]
            given = HeadLogits(hidden=hidden, weight=module.get_output_embeddings().weight)
        else:
            given = module(input_ids=ids, use_cache=False).logits[0, begin - 1 : -1]
        found = token_logprobs(given, ids[0, begin:], temperature)
        below = torch.zeros_like(found.logprobs)
        for place in (~found.likeliest).nonzero().flatten().tolist():
            scores = given.hidden[place] @ given.weight.T if isinstance(given, HeadLogits) else given[place]
            below[place] = (scores.max() - scores[tokens[begin + place]]).float() / temperature
        return found.logprobs, below

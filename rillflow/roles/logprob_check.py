"""Canary: check with fixed texts that an engine samples with the published weights.

    trainer   publish ─ texts ─ Scorer ─> said ──────────┐  sent with the version and its digests
    sampler   load ──── texts ─ engine.score ─> found ───┴─ differ by more than rounding? refused

A digest proves which weights were handed over; a canary proves how the engine uses them. An engine that
packs, shards and renames weights may lose one or keep an old one. A change that moves no log probability
is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rillflow.errors import WeightError
from rillflow.formulas.counter import uniform
from rillflow.models.language_model import LanguageModel
from rillflow.records.batch import Batch
from rillflow.records.rollout import Rollout, rollout_batch
from rillflow.records.row import RowId

_TEXTS, _TOKENS = 4, 16
_LARGEST_GAP = 1e-3
"""Largest difference of a log probability in float32; rounding stays below a tenth of this."""
_MEAN_GAP = 0.05
"""Largest mean difference of log probabilities where rounding is coarse."""


def canary_texts(model: LanguageModel) -> list[list[int]]:
    """Return the texts, drawn from all of the model's tokens; equal for equal tokenisers and contexts."""
    tokens = torch.arange(min(_TOKENS, model.context))
    ids = torch.stack([torch.tensor([0, text, 0]) for text in range(_TEXTS)])
    numbers = uniform(0, ids[:, None], tokens[None])
    drawn: list[list[int]] = (numbers * model.tokenizer.vocabulary_size).long().tolist()
    return drawn


def canary_rows(model: LanguageModel) -> Batch:
    """Return the texts as rows; the loss mask covers all but their first tokens."""
    starts = [
        Rollout.start(RowId(0, index, 0), text[:1]).sampled(text[1:], [0.0] * len(text[1:]), version=0)
        for index, text in enumerate(canary_texts(model))
    ]
    return rollout_batch(starts)


def check_canary(
    said: Sequence[float], found: Sequence[Sequence[float]], version: int, *, is_exact: bool
) -> None:
    """Refuse an engine whose log probabilities differ from the trainer's.

    Args:
        said: log probabilities by the trainer, text after text.
        found: log probabilities of each text by the engine.
        version: version of the weights.
        is_exact: whether the weights are wide enough to compare token by token, not only in the mean.

    Raises:
        WeightError: they differ by more than rounding.
    """
    own, other = torch.tensor(said), torch.tensor([each for text in found for each in text])
    gaps = (own - other).abs().nan_to_num(torch.inf)
    gap, most = (gaps.max(), _LARGEST_GAP) if is_exact else (gaps.mean(), _MEAN_GAP)
    if float(gap) > most:
        at, which = int(gaps.argmax()), "largest" if is_exact else "mean"
        raise WeightError(
            f"the rollout engine does not sample with version {version}: a token of a fixed text has the log "
            f"probability {float(other[at]):.6g} in the engine and {float(own[at]):.6g} in the trainer",
            why=f"the {which} difference is {float(gap):.3g}, more than {most:g}: the engine lost, cut or "
            "renamed a weight wrongly, or kept an older version of it",
            fix="do not train on its samples; try another release of the engine, or set "
            'rollout.engine = "native"',
        )

"""Positions: keep a row's position embeddings independent of the other rows in a pass.

    8 tokens ── the last at position 7, or at the context's last ── do the other logits differ?
                                                 no ──> the module as it is
                                                 yes ─> AtContext ─ still? refused

Some rotary embeddings (``longrope``, ``dynamic``) choose their frequencies by the longest position of a pass.
Then sampler, trainer and every division into micro-batches would run different models. So these embeddings
get the context's last position in every pass: every row is computed as if it filled the context.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rillflow.errors import ModelError
from rillflow.models.architecture import context_of, is_padded, relative_difference, trial, trial_positions

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Largest difference of the outputs over the largest output; other rows change only the last bits."""


class AtContext(nn.Module):
    """A rotary embedding that always gets the context's last position in addition to those of a pass.

    Args:
        rotary: transformers' embedding; for a tensor and positions [..., T] it returns tensors [..., T, D].
        context: maximum tokens of a row.
    """

    def __init__(self, rotary: nn.Module, context: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.context = context

    def forward(self, x: Tensor, position_ids: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, ...]:
        """Return the embedding of these positions."""
        last = torch.full_like(position_ids[..., :1], self.context - 1)
        found = self.rotary(x, torch.cat([position_ids, last], -1), *rest, **named)
        return tuple(part[..., :-1, :] for part in found)


def settle_positions(module: PreTrainedModel, tried: PreTrainedModel) -> None:
    """Make a row's outputs independent of other rows: always those of a full context.

    Args:
        module: the decoder; it may be on the meta device.
        tried: its ``architecture.short_copy``, used for the trial.

    Raises:
        ModelError: the module uses the longest row elsewhere than in its rotary embeddings.
    """
    if is_padded(tried) and "position_ids" not in signature(type(tried).forward).parameters:
        return  # positions cannot be passed to it
    if _difference(tried) == 0:
        return
    for each in (tried, module):
        for name in [name for name, part in each.named_modules() if _is_rotary(part)]:
            each.set_submodule(name, AtContext(each.get_submodule(name), context_of(each)))
    difference = _difference(tried)
    if not difference <= _TOLERANCE[module.dtype]:
        raise ModelError(
            f"a longer row in the batch changes a row's outputs of {type(module).__name__}, "
            f"by {difference:.2g} of the largest",
            why="sampler and trainer batch rows differently, so their outputs would differ",
            fix="choose a model whose position embeddings do not depend on the longest row",
        )


def _difference(module: PreTrainedModel) -> float:
    """Return the relative change of a row's outputs when the pass ends at the context's last position."""
    far = trial_positions(module)
    far[:, -1] = context_of(module) - 1
    return relative_difference(
        trial(module, position_ids=far)[:, :-1],
        trial(module, position_ids=trial_positions(module))[:, :-1],
    )


def _is_rotary(part: nn.Module) -> bool:
    """Return whether the module itself is a rotary embedding: it has a buffer of frequencies."""
    own = dict(part.named_buffers(recurse=False))
    return any(name.endswith("inv_freq") for name in own)

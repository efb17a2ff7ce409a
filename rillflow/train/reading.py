"""Reading: a part laid out for one pass of a module, and where the module's outputs are wanted.

    rows ── cut after the last token that is read ── pack ──> [1, U], positions, attention plan
    loss tokens ── ``back`` tokens before each ──> [N] places among the packed tokens

A token is predicted from the state one token before it (back = 1), as its value is; a row is scored at
its last token itself (back = 0). Legend: B rows, U packed tokens, N loss tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rillflow.errors import TrainingError
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.train.packed import PackedAttention, pack


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """What one pass needs."""

    inputs: dict[str, Any]
    """The module's arguments: tokens, positions and the attention plan."""
    wanted: Tensor
    """[N] int64 the packed tokens at which the outputs for the loss tokens stand."""
    plan: PackedAttention
    """Attention over the packed rows."""

    @property
    def size(self) -> int:
        """Packed tokens."""
        return int(self.inputs["input_ids"].shape[1])

    def padded(self, size: int) -> Reading:
        """The same pass with packed tokens that no row sees, up to ``size``."""
        more = (0, size - self.size)
        plan = self.plan.padded(size)
        grown = {name: pad(self.inputs[name], more) for name in ("input_ids", "position_ids")}
        return replace(self, inputs={**self.inputs, **grown, "attention_plan": plan}, plan=plan)

    def check(self, module: nn.Module) -> None:
        """Show after the pass that the module asked the plan.

        Raises:
            TrainingError: it has an attention of its own.
        """
        if not self.plan.layers:
            raise TrainingError(
                f"{type(module).__name__} does not use Rillflow's attention",
                why="rows that lie end to end would see each other",
                fix='build the module with attn_implementation="rillflow"',
            )


def lay_out(part: Batch, device: torch.device, *, back: int) -> Reading:
    """The part's rows, with nothing behind the last token that is read.

    Args:
        part: rows with ``tokens`` and ``loss_mask``, at least one loss token among them.
        device: where the module computes.
        back: how many tokens before a loss token its output stands.
    """
    tokens, mask = part.ragged("tokens"), part.ragged("loss_mask")
    index = mask.values.nonzero().squeeze(1)
    rows, read = mask.row_of[index], mask.positions[index] - back
    needed = torch.zeros_like(mask.lengths).scatter_reduce(0, rows, read + 1, "amax")
    inputs = _beginnings(tokens, needed)
    packed = pack(inputs)
    plan = PackedAttention(packed, device)
    return Reading(
        inputs={
            "input_ids": packed.tokens[None].to(device),
            "position_ids": packed.positions[None].to(device),
            "use_cache": False,
            "attention_plan": plan,
        },
        wanted=packed.places.values[inputs.starts[rows] + read].to(device),
        plan=plan,
    )


def empty_reading(device: torch.device) -> Reading:
    """A pass over one token of no row, for a rank that has none while others have."""
    rows = Ragged.from_rows([[0]])
    part = Batch(
        ids=torch.zeros(1, 3, dtype=torch.int64),
        fields={"tokens": rows, "loss_mask": rows.with_values(torch.ones(1, dtype=torch.bool))},
    )
    return lay_out(part, device, back=0)


def last_tokens(batch: Batch) -> Batch:
    """The rows' ``tokens``, and a ``loss_mask`` that is True at each row's last token alone.

    Raises:
        TrainingError: a row is empty.
    """
    tokens = batch.ragged("tokens")
    empty = (tokens.lengths == 0).nonzero()
    if len(empty):
        raise TrainingError(
            f"row ({batch.row_id(int(empty[0]))}) is empty",
            why="a row is scored at its last token, and there is none",
            fix="leave the row out",
        )
    last = tokens.positions == tokens.expand(tokens.lengths - 1)
    return batch.only("tokens").with_fields(loss_mask=tokens.with_values(last))


def _beginnings(rows: Ragged, lengths: Tensor) -> Ragged:
    """The first ``lengths`` [B] values of each row."""
    kept = rows.positions < rows.expand(lengths)
    return Ragged(values=rows.values[kept], lengths=lengths)

"""Slots: the running rows' state on the device, and their draws.

    slot             0    1    2   ...            one window of W steps
    position         9    4   17                  uniforms [W, rows]       made once for the whole window
    line l     feeds a    b    c                  tokens   [W + 1, rows]   line l is fed, l + 1 drawn
    line l+1   drawn a'   b'   c'                 logprobs [W, rows]       of the drawn tokens

Every step reads one line and writes the next. A row's draws are collected as one column when it ends or is
aborted, and at the end of a window, never token by token.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from rillflow.formulas.counter import uniform
from rillflow.rollout.native.passes import Feed
from rillflow.rollout.native.sampling import Drawn
from rillflow.rollout.native.scheduler import Sequence

WINDOW = 64
"""Steps of a window; also the maximum of random numbers made for a row at a time."""
BULK = 128
"""Waiting rows whose random numbers are made together, which costs little more than making them for one."""


class Slots:
    """The running rows on the device.

    Args:
        device: the module's device.
        seed: the run's seed.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._seed = seed
        self._begin = 0
        self._positions = torch.zeros(0, dtype=torch.int64, device=device)
        self._uniforms = torch.zeros(WINDOW, 0, dtype=torch.float64, device=device)
        self._tokens = torch.zeros(WINDOW + 1, 0, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(WINDOW, 0, dtype=torch.float32, device=device)

    def reserve(self, rows: int) -> None:
        """Allocate slots 0 to ``rows`` - 1; growth at least doubles them, so that it is rare."""
        there = len(self._positions)
        if rows <= there:
            return
        more = (0, max(rows - there, there))
        self._positions, self._uniforms = pad(self._positions, more), pad(self._uniforms, more)
        self._tokens, self._logprobs = pad(self._tokens, more), pad(self._logprobs, more)

    def is_full(self, clock: int) -> bool:
        """Return whether this step needs a new window."""
        return clock - self._begin >= WINDOW

    def begin(self, clock: int, running: Rows[Sequence]) -> None:
        """Start a new window; the draws of the old one have been collected."""
        self._tokens[0] = self._tokens[clock - self._begin]
        self._begin = clock
        for row in running:
            row.uniforms = None
        self._fill_uniforms(clock, running, ahead=())

    def move(self, moves: Rows[tuple[int, int]]) -> None:
        """Move rows between slots, given as (from, to); all at once."""
        if not moves:
            return
        sources, targets = torch.tensor(moves, device=self._device).T
        self._positions[targets] = self._positions[sources]
        for lines in (self._uniforms, self._tokens, self._logprobs):
            lines[:, targets] = lines[:, sources]

    def admit(self, clock: int, admitted: Rows[Sequence], ahead: Rows[Sequence]) -> None:
        """Start new rows; the random numbers of ``ahead``, waiting rows, are made at the same time."""
        if not admitted:
            return
        fed = [(row.rollout.tokens[row.read], row.read) for row in admitted]
        tokens, positions = torch.tensor(fed, device=self._device).T
        slots = torch.tensor([row.slot for row in admitted], device=self._device)
        self._tokens[clock - self._begin, slots] = tokens
        self._positions[slots] = positions
        self._fill_uniforms(clock, admitted, ahead)

    def feed(self, clock: int, running: int, rows: int) -> Feed:
        """Return tokens and positions of the first ``rows`` slots; idle ones feed token 0 at position 0."""
        line = self._tokens[clock - self._begin]
        if running < rows:
            line[running:rows] = 0
            self._positions[running:rows] = 0
        return Feed(tokens=line[:rows], positions=self._positions[:rows])

    def uniforms(self, clock: int, rows: int) -> Tensor:
        """Return [rows] float64, this step's random numbers."""
        return self._uniforms[clock - self._begin, :rows]

    def record(self, clock: int, drawn: Drawn) -> None:
        """Store this step's draws, to be fed next at the following position."""
        rows, line = len(drawn.tokens), clock - self._begin
        self._positions[:rows] += 1
        self._tokens[line + 1, :rows] = drawn.tokens
        self._logprobs[line, :rows] = drawn.logprobs

    def repeat(self, clock: int, slot: int, token: int) -> None:
        """Feed this token after step ``clock``, whatever was drawn."""
        self._tokens[clock + 1 - self._begin, slot] = token

    def collect(self, clock: int, rows: Rows[Sequence], version: int) -> None:
        """Append each row's draws of the steps before ``clock``, made under this version, to its rollout."""
        behind = [row for row in rows if row.collected_step < clock]
        if not behind:
            return
        slots, end = [row.slot for row in behind], clock - self._begin
        tokens = self._tokens[1 : end + 1, slots].T.tolist()
        logprobs = self._logprobs[:end, slots].T.tolist()
        for row, drawn, chances in zip(behind, tokens, logprobs, strict=True):
            first = row.collected_step - self._begin
            row.rollout = row.rollout.sampled(drawn[first:], chances[first:], version)
            row.collected_step = clock

    def _fill_uniforms(self, clock: int, rows: Rows[Sequence], ahead: Rows[Sequence]) -> None:
        """Fill the rest of the window for these rows."""
        if any(row.uniforms is None for row in rows):
            self._make([row for row in (*rows, *ahead) if row.uniforms is None], clock)
        made = [row.uniforms for row in rows if row.uniforms is not None]
        if not made:
            return
        line, numbers = clock - self._begin, pad_sequence(made)
        slots = torch.tensor([row.slot for row in rows], device=self._device)
        self._uniforms[line : line + len(numbers), slots] = numbers[: WINDOW - line]

    def _make(self, rows: Rows[Sequence], clock: int) -> None:
        """Make each row's next random numbers; a token's number depends only on (seed, row, position)."""
        ids = torch.tensor([row.rollout.row for row in rows], device=self._device)
        fed = [clock - row.start_step if row.slot >= 0 else len(row.prefix) for row in rows]
        most = min(WINDOW, max(row.limit - position for row, position in zip(rows, fed, strict=True)) - 1)
        ahead = torch.arange(1, most + 1, device=self._device)
        made = uniform(self._seed, ids[:, None], torch.tensor(fed, device=self._device)[:, None] + ahead)
        for row, numbers in zip(rows, made.unbind(), strict=True):
            row.uniforms = numbers

"""Engine: what a sampler asks of a rollout engine, whoever makes it.

    wake ─> load, once a version ─> generate, or add, step, abort ─> sleep, while the trainer needs the room

The native engine is one, vLLM another; ``rollout.engine = "package.module:Class"`` names one more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Protocol

from torch import Tensor, nn

from rillflow.cluster.ranks import Ranks
from rillflow.records.batch import Batch
from rillflow.records.rollout import Rollout, rollout_batch, starts
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.native.scheduler import check_ids
from rillflow.rollout.stops import Stops


class Capability(StrEnum):
    """What not every engine can do."""

    GREEDY = "take the likeliest token"
    """``temperature`` 0."""
    CUT = "draw from the likeliest tokens alone"
    """``top_k``, ``top_p`` and ``min_p``."""
    PENALTIES = "make tokens less likely that a row has already"
    """``repetition_penalty``, ``presence_penalty`` and ``frequency_penalty``."""
    BUDGET = "keep keys and values within a budget"
    """``cache_gib``."""
    STOP = "end a row at a text of the recipe's"
    """``stop``."""
    SHARED = "share a copy of the weights over ranks"
    """``tp`` above 1."""
    FIXED = "compute with fixed shapes"
    """``deterministic``."""
    ROWS = "take rows in and out while others run"
    """``add``, ``step`` and ``abort``."""
    PARTS = "hand over a part of the rows while the others run"
    """``generate_parts``."""
    ADAPTERS = "run an adapter beside its base"
    """``policy.model.adapter``."""
    LOOK = "show a row that runs"
    """``look``: answers can be streamed, and texts that end a single answer are seen before it ends."""
    ROUTES = "say which experts a token took"
    """``replay_routing``."""
    SCORE = "say the log probabilities of a given text"
    """``score``: after each publish they are compared with the trainer's."""


class Engine(Protocol):
    """Continues prompts with the weights it was given.

    Args:
        module: the decoder, or this rank's part of it.
        config: how tokens are drawn.
        stop_tokens: token ids that end a row.
        seed: of the run; random numbers follow from it and from row ids.
        context: tokens of a row at most, prompt included.
        tp: the ranks that share a copy of the weights; they are given the same calls.
        stops: texts that end a row, ``stop_tokens`` among them.
    """

    def __init__(
        self,
        module: nn.Module,
        config: RolloutConfig,
        *,
        stop_tokens: frozenset[int],
        seed: int,
        context: int,
        tp: Ranks,
        stops: Stops,
    ) -> None: ...

    can: ClassVar[frozenset[Capability]]
    """Known before a process starts: a recipe that needs more is refused."""

    @property
    def has_work(self) -> bool:
        """Whether a row waits or runs."""

    @property
    def held_bytes(self) -> int:
        """What it holds beside the weights: keys and values of its rows."""

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Sample with these weights from now on.

        Args:
            version: what they are called; it is written beside every sampled token.
            weights: this rank's part of every one, by its name in the whole model; the memory stays the
                same from version to version, its numbers do not.
        """

    def generate(self, prompts: Batch, samples: int = 1, sampling: SamplingConfig | None = None) -> Batch:
        """Continue every prompt ``samples`` times; see ``NativeEngine.generate`` for fields and order.

        Log probabilities are those of the whole vocabulary after temperature, before cuts and penalties.
        """

    def generate_parts(
        self, parts: Sequence[Batch], samples: int = 1, sampling: SamplingConfig | None = None
    ) -> Iterator[Batch]:
        """As ``generate`` of all prompts at once; the rows of each part as soon as all of them have ended."""

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """Let a row run: a prompt, or a row that was taken out, which goes on where it stopped."""

    def step(self) -> list[Rollout]:
        """Go on by a token or more; the rows that ended."""

    def abort(self, row: RowId) -> Rollout:
        """Take a waiting or running row out, its tokens kept."""

    def look(self, row: RowId) -> Rollout:
        """A waiting or running row with its tokens so far; it runs on."""

    def score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log probability, at temperature 1, of every token but the first of each text."""

    def sleep(self) -> None:
        """Give room back until ``wake``: no row runs; the trainer is about to work."""

    def wake(self) -> None:
        """Take what ``sleep`` gave back."""


class RowByRow:
    """``generate`` and ``generate_parts`` of an engine that has ``add`` and ``step``: see Engine."""

    def generate(self, prompts: Batch, samples: int = 1, sampling: SamplingConfig | None = None) -> Batch:
        """See Engine."""
        (rollouts,) = self.generate_parts([prompts], samples, sampling)
        return rollouts

    def generate_parts(
        self, parts: Sequence[Batch], samples: int = 1, sampling: SamplingConfig | None = None
    ) -> Iterator[Batch]:
        """See Engine; whoever stops asking for parts leaves no row behind."""
        begun = [starts(part, samples) for part in parts]
        check_ids([each.row for part in begun for each in part])
        finished = dict[RowId, Rollout]()
        try:
            for start in (each for part in begun for each in part):
                self.add(start, sampling)
            for part in begun:
                while any(each.row not in finished for each in part):
                    finished |= {each.row: each for each in self._some_steps()}
                yield rollout_batch([finished.pop(each.row) for each in part])
        finally:
            self._clear()

    @abstractmethod
    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """See Engine."""

    @abstractmethod
    def step(self) -> list[Rollout]:
        """See Engine."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget every row."""

    def _some_steps(self) -> list[Rollout]:
        """The rows that ended since the last call; as many steps as suit the engine."""
        return self.step()

"""Engine: the interface between a sampler and a rollout engine.

    wake ─> load, once a version ─> generate, or add, step, abort ─> sleep, while the trainer needs the room

The native engine and vLLM implement it; ``rollout.engine = "package.module:Class"`` selects another one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor, nn

from rillflow.errors import ConfigError, nearest
from rillflow.records.batch import Batch
from rillflow.records.rollout import Rollout, rollout_batch, starts
from rillflow.records.row import RowId
from rillflow.rollout.config import NATIVE, VLLM, RolloutConfig, SamplingConfig
from rillflow.rollout.native.scheduler import check_ids
from rillflow.rollout.stops import Stops
from rillflow.workers.collectives import Ranks

_METHODS = ("can", "load", "generate", "add", "step", "abort", "sleep", "wake")


class Capability(StrEnum):
    """A feature that some engines lack."""

    GREEDY = "sample the most likely token"
    """``temperature`` 0."""
    CUT = "restrict sampling to the most likely tokens"
    """``top_k``, ``top_p`` and ``min_p``."""
    PENALTIES = "penalise tokens that a row already has"
    """``repetition_penalty``, ``presence_penalty`` and ``frequency_penalty``."""
    BUDGET = "limit the memory of the KV cache"
    """``cache_gib``."""
    STOP = "end a row at a stop string"
    """``stop``."""
    SHARED = "shard the weights over ranks"
    """``tp`` above 1."""
    FIXED = "compute with fixed shapes"
    """``deterministic``."""
    ROWS = "add and abort rows while others run"
    """``add``, ``step`` and ``abort``."""
    PARTS = "return some prompts' rows while others run"
    """``generate_parts``."""
    ADAPTERS = "run an adapter on its base model"
    """``policy.model.adapter``."""
    LOOK = "show the tokens of a running row"
    """``look``: answers can be streamed, and stop texts of a single answer are detected while it runs."""
    ROUTES = "report the experts of each token"
    """``replay_routing``."""
    SCORE = "return the log probabilities of a given text"
    """``score``: after each publish, its log probabilities are compared with the trainer's."""


class Engine(Protocol):
    """A rollout engine, which continues prompts with the loaded weights.

    Args:
        module: the decoder, or this rank's shard of it.
        config: settings of sampling and of the engine.
        stop_tokens: token ids that end a row.
        seed: the run's seed; random numbers depend on it and on row ids.
        context: maximum tokens of a row, prompt included.
        tp: the ranks that share a copy of the weights; all of them receive the same calls.
        stops: all texts that end a row, including those of ``stop_tokens``.
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
    """Capabilities of the engine, known before a process starts: a recipe that needs others is refused."""

    @property
    def has_work(self) -> bool:
        """Whether a row waits or runs."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the engine holds besides the weights: keys and values of its rows."""

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Sample with these weights from now on.

        Args:
            version: the policy version of the weights; it is recorded with every sampled token.
            weights: this rank's shard of every weight, by its name in the whole model. The memory stays the
                same from version to version; only its contents change.
        """

    def generate(self, prompts: Batch, samples: int = 1, sampling: SamplingConfig | None = None) -> Batch:
        """Continue every prompt ``samples`` times; see ``NativeEngine.generate`` for fields and order.

        Log probabilities are those of the whole vocabulary after temperature, before cuts and penalties.
        """

    def generate_parts(
        self, parts: Sequence[Batch], samples: int = 1, sampling: SamplingConfig | None = None
    ) -> Iterator[Batch]:
        """Generate like ``generate`` for all prompts together; yield a part's rows once all have ended."""

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """Add a row: a prompt, or an aborted row, which continues where it stopped."""

    def step(self) -> list[Rollout]:
        """Generate at least one token per running row; return the rows that ended."""

    def abort(self, row: RowId) -> Rollout:
        """Remove a waiting or running row and return it with its tokens so far."""

    def look(self, row: RowId) -> Rollout:
        """Return a waiting or running row with its tokens so far; it continues to run."""

    def score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log probability, at temperature 1, of every token but the first of each text."""

    def sleep(self) -> None:
        """Free memory for the trainer until ``wake``; called only when no row runs."""

    def wake(self) -> None:
        """Allocate again the memory that ``sleep`` freed."""


class RowByRow:
    """Mixin with ``generate`` and ``generate_parts`` over an engine's ``add`` and ``step``: see Engine."""

    def generate(self, prompts: Batch, samples: int = 1, sampling: SamplingConfig | None = None) -> Batch:
        """See Engine."""
        (rollouts,) = self.generate_parts([prompts], samples, sampling)
        return rollouts

    def generate_parts(
        self, parts: Sequence[Batch], samples: int = 1, sampling: SamplingConfig | None = None
    ) -> Iterator[Batch]:
        """See Engine; if the caller stops iterating, all rows are removed."""
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
        """Remove every row."""

    def _some_steps(self) -> list[Rollout]:
        """Run as many steps as suit the engine; return the rows that ended since the last call."""
        return self.step()


def engine_class(name: str) -> type[Engine]:
    """Return the engine class that ``rollout.engine`` names.

    Raises:
        ConfigError: it cannot be imported, or is not an engine.
    """
    if name == NATIVE:
        from rillflow.rollout.native.engine import NativeEngine

        return NativeEngine
    if name == VLLM:
        from rillflow.rollout.vllm.engine import VllmEngine

        return VllmEngine
    module, _, what = name.partition(":")
    try:
        found: Any = vars(import_module(module)).get(what)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"rollout.engine is {name!r}, which cannot be imported",
            why=str(error),
            fix=f'it is "{NATIVE}", "{VLLM}", or "package.module:Class" of a package that Python finds here',
        ) from None
    lacking = [each for each in _METHODS if found is None or each not in dir(found)]
    if lacking:
        raise ConfigError(
            f"rollout.engine is {name!r}, which is no engine",
            why=f"it has no {lacking[0]}" if found is not None else f"{module} has no {what!r}",
            fix=nearest(what, vars(import_module(module))) if found is None else "rillflow/rollout/engine.py",
        )
    return cast(type[Engine], found)


def server_python(server: str, base: Path) -> Path:
    """Return the Python that ``rollout.server`` names, relative to the recipe's folder; keep its links."""
    return (base / Path(server).expanduser()).absolute()

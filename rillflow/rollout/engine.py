"""Engine: the interface between a sampler and a rollout engine, and the checks that all engines share.

    wake ─> load, once a version ─> generate, or add, step, abort ─> sleep, while the trainer needs the room
      └── any of them: EngineLost, if the engine's process has ended ─> the rank counts as dead

The native engine and vLLM implement it; ``rollout.engine = "package.module:Class"`` selects another one.
``Stops`` finds the texts that end a row before its limit:

    a text that is one token of the model ─ the engine compares tokens
    any other text ─ the last tokens are decoded when a new one may complete it
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor, nn

from rillflow.errors import ConfigError, RolloutError, RowError, nearest
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.rollout import Finish, Rollout, rollout_batch, starts
from rillflow.records.row import RowId
from rillflow.rollout.config import NATIVE, RolloutConfig, SamplingConfig
from rillflow.rollout.native.scheduler import check_ids
from rillflow.runs.error_lines import innermost_line
from rillflow.workers.backend import RankLost
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
    CACHE = "move a row's KV cache to another engine"
    """``detach``, and ``add`` with ``Rollout.cache``."""


class EngineLost(RankLost, RolloutError):
    """The process of a rollout engine has ended, or does not answer: its rank cannot sample any more.

    Any method of an engine may raise it, and so may the constructor. The run then treats the rank as dead: it
    saves the finished steps, and replaces the rank or starts all ranks again.

    Example:
        raise EngineLost(f"the engine's process {pid} was killed", fix="read its log in /var/log/engine")
    """

    def of(self, rank: str) -> str:
        """See RankLost; ``what`` is a sentence of its own."""
        return f"{rank} has lost its engine: {self.what}"


@contextmanager
def losses() -> Iterator[None]:
    """Raise a broken connection of an engine as EngineLost.

    Raises:
        EngineLost: the other end of a pipe or socket is gone.
    """
    try:
        yield
    except (ConnectionError, EOFError) as error:
        what = f"its connection broke ({type(error).__name__}{f': {error}' if str(error) else ''})"
        why = f"raised at {innermost_line(error)}: the process at the other end has ended"
        raise EngineLost(what, why, "read the log of that process") from error


class Engine(Protocol):
    """A rollout engine, which continues prompts with the loaded weights.

    An engine with a process, a device or a connection of its own raises EngineLost once that is gone. Broken
    pipes and connections (ConnectionError, EOFError) count as such.

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

    def detach(self, row: RowId) -> Rollout:
        """Remove a row like ``abort``; return it with its KV cache, from which ``add`` continues it."""

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

    def detach(self, row: RowId) -> Rollout:
        """See Engine; nobody calls it, since ``can`` lacks Capability.CACHE."""
        raise NotImplementedError

    @abstractmethod
    def _clear(self) -> None:
        """Remove every row."""

    def _some_steps(self) -> list[Rollout]:
        """Run as many steps as suit the engine; return the rows that ended since the last call."""
        return self.step()


class Stops:
    """Texts that end a row; the text and any rest of its last token stay in the row.

    A text is searched in the row's text, because a tokeniser writes ".\\n\\n" as one token where "\\n" stops.

    Args:
        texts: texts that end a row, in addition to the model's own stop tokens.
        tokenizer: the model's tokenizer.

    Raises:
        ModelError: a text is empty.

    Example:
        Stops(("Observation:", "</s>"), tokenizer).ends([17, 4, 99])
    """

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer) -> None:
        one = {text: tokenizer.token_of(text) for text in texts}
        characters = [text for text in one if len(text.encode()) == 1]
        self.tokens = tokenizer.stop_tokens | {token for token in one.values() if token is not None}
        """Tokens that end a row by themselves."""
        if characters:
            pieces = tokenizer.pieces(range(tokenizer.vocabulary_size))
            self.tokens |= {
                token for token, piece in enumerate(pieces) if any(c in piece for c in characters)
            }
        self._texts = tuple(
            text.encode() for text in one if text not in characters and tokenizer.special_in(text) != text
        )
        self.longest = max(map(len, self._texts), default=0)
        """Most tokens that a stop text needs; 0 if every stop is one byte or a special token."""
        self._tokenizer = tokenizer

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of these tokens, a row's last ``longest`` at most, completes a text."""
        parts = self._tokenizer.token_bytes(tokens)
        known = sum(map(len, parts[:-1]))
        said = b"".join(parts)
        return any(text in said[max(0, known + 1 - len(text)) :] for text in self._texts)


def check_tokens(rollout: Rollout, context: int, vocabulary: int) -> None:
    """Check that a row can be continued.

    Raises:
        RolloutError: the row has ended, is empty, fills the context, or has a token outside the vocabulary.
    """
    tokens = rollout.tokens
    if rollout.finish is not Finish.ABORTED:
        raise RolloutError(
            f"row ({rollout.row}) has ended with {rollout.finish.name}",
            why="a row that has ended cannot continue",
            fix="append tokens with Rollout.inserted, or make a new row",
        )
    if not tokens:
        raise RolloutError(
            f"row ({rollout.row}) has an empty prompt",
            why="the first token is sampled from the logits of the prompt's last token",
            fix="give every prompt at least one token, such as the tokeniser's begin token",
        )
    if len(tokens) >= context:
        raise RolloutError(
            f"row ({rollout.row}) has {len(tokens)} tokens",
            why=f"the context is {context} tokens, and at least one new token must fit",
            fix="shorten the prompt, or use a model with a longer context",
        )
    odd = [token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary]
    if odd:
        raise RolloutError(
            f"row ({rollout.row}) has token {odd[0]}, at position {tokens.index(odd[0])}",
            why=f"the model's vocabulary is 0 to {vocabulary - 1}",
            fix="encode the prompt with the model's own tokeniser",
        )


def limit_of(rollout: Rollout, max_tokens: int, context: int) -> int:
    """Return the length at which a row ends: prompt, inserted and ``max_tokens`` sampled tokens.

    Raises:
        RolloutError: the row already has ``max_tokens`` sampled tokens.
    """
    drawn = sum(rollout.loss_mask)
    if drawn >= max_tokens:
        raise RolloutError(
            f"row ({rollout.row}) has {drawn} sampled tokens and max_tokens is {max_tokens}",
            why="a running row samples at least one more token",
            fix="raise max_tokens",
        )
    return min(len(rollout.tokens) - drawn + max_tokens, context)


def check_stop(sampling: SamplingConfig, engine: SamplingConfig) -> None:
    """Check that a row's stop texts are those the engine was built with.

    Raises:
        RolloutError: they differ.
    """
    if sampling.stop != engine.stop:
        raise RolloutError(
            f"a row has the stop strings {list(sampling.stop)}, and the engine has {list(engine.stop)}",
            why="the engine tokenises stop strings when it is built",
            fix="build the engine with these stop strings, or use the engine's",
        )


def check_stop_tokens(stop_tokens: frozenset[int], vocabulary: int) -> None:
    """Check that every stop token is in the vocabulary.

    Raises:
        RolloutError: one of them is outside it.
    """
    for token in sorted(stop_tokens):
        if not 0 <= token < vocabulary:
            raise RolloutError(
                f"stop token {token} is outside the vocabulary",
                why=f"the model's vocabulary is 0 to {vocabulary - 1}, so it is never sampled",
                fix="use the tokeniser the model was trained with",
            )


def not_finite(row: RowId, position: int) -> RowError:
    """Return the error for a row whose logits are not finite."""
    return RowError(
        f"the logits of row ({row}) at position {position} are not finite",
        why="a weight is NaN or infinite, or an activation overflowed",
        fix="check the weights of the last update for NaN and infinite values",
        row=row,
    )


def engine_class(name: str) -> type[Engine]:
    """Return the engine class of ``package.module:Class``, or of ``native``.

    Raises:
        ConfigError: it cannot be imported, or is not an engine.
    """
    if name == NATIVE:
        from rillflow.rollout.native.engine import NativeEngine

        return NativeEngine
    module, _, what = name.partition(":")
    try:
        found: Any = vars(import_module(module)).get(what)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"rollout.engine is {name!r}, which cannot be imported",
            why=str(error),
            fix='name an engine, or "package.module:Class" of a package that Python finds here',
        ) from None
    lacking = [each for each in _METHODS if found is None or each not in dir(found)]
    if lacking:
        raise ConfigError(
            f"rollout.engine is {name!r}, which is no engine",
            why=f"it has no {lacking[0]}" if found is not None else f"{module} has no {what!r}",
            fix=nearest(what, vars(import_module(module))) if found is None else "rillflow/rollout/engine.py",
        )
    return cast(type[Engine], found)


def engine_options(name: str) -> Callable[[Any], Mapping[str, Any]]:
    """Return the function of ``package.module:function``, which makes arguments from a RoleSetting."""
    module, _, what = name.partition(":")
    return cast("Callable[[Any], Mapping[str, Any]]", vars(import_module(module))[what])

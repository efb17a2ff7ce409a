"""VllmEngine: prompts in, rollouts out, by vLLM on its own copy of the weights, or a shard of it per rank.

    rows ─ add ─> AnyCore ─ step ─ tokens, log probabilities ─> Rollout      in this process, or in a server
    load: a layer at a time ─ names as in files ─> AnyCore   every token has the version that sampled it
          with an adapter: the base once, then only the adapter
    score: given tokens are processed like drawn ones

A row's random numbers are those of the native engine, from (seed, row id, position). Its logits may differ
by rounding, which depends on the other rows in the batch. So a repeated run gives the same text unless
rounding changes a drawn token.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from rillflow.errors import RolloutError
from rillflow.models.adapters import adapted, file_name, is_adapter
from rillflow.models.architecture import vocabulary_of
from rillflow.models.model_files import file_weights, layer_of, write_settings
from rillflow.models.quantised import widened
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.roles.setting import RoleSetting
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import (
    Capability,
    RowByRow,
    Stops,
    check_stop,
    check_stop_tokens,
    check_tokens,
    limit_of,
    not_finite,
)
from rillflow.rollout.native.scheduler import check_ids, row_in
from rillflow.workers.collectives import Ranks
from rillflow_parts.vllm.requests import ENVIRONMENT, LOUDNESS, AnyCore, Ask, CoreSettings, told
from rillflow_parts.vllm.served_core import ServedCore, StartRefused
from rillflow_parts.vllm.shards import Shards, meeting_port

_GIVEN = -2
"""Epoch in the row ids of texts whose log probabilities are requested."""
_STEPS = 16
"""Tokens that rows advance at once when no caller looks at them in between."""


@dataclass(kw_only=True)
class _Running:
    """A row that vLLM continues."""

    rollout: Rollout
    """The row when it was added, or when weights were last loaded."""
    stop: frozenset[int]
    """Tokens that end the row."""
    tokens: list[int] = field(default_factory=list)
    """Tokens sampled since then."""
    logprobs: list[float] = field(default_factory=list)
    """Log probabilities of these tokens."""

    def settled(self, version: int, finish: Finish = Finish.ABORTED) -> Rollout:
        """Return the row with the tokens sampled since, recorded under this version."""
        return self.rollout.sampled(self.tokens, self.logprobs, version, finish)


def options(setting: RoleSetting) -> dict[str, Any]:
    """Return the arguments of a rank's VllmEngine that only this engine has."""
    place = setting.site.place
    return {"home": setting.run / "vllm" / f"{place.pool}-{place.rank}"}


class VllmEngine(RowByRow):
    """vLLM; with ``rollout.server``, in a process of another Python environment, else in this process.

    Args: see Engine; and
        home: folder of a server's log, ``server.log``, and of files of a moment; None for the system's.

    Raises:
        RolloutError: vLLM rejects the model, or there is not enough memory.
        EngineLost: the server has ended; also from all methods that need it.
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
        home: Path | None = None,
    ) -> None:
        self._shards = Shards(module, tp)
        self._module: Any = module
        self._config, self._context, self._seed = config, context, seed
        weight: Tensor = module.get_input_embeddings().weight  # type: ignore[operator]
        self._vocabulary = vocabulary_of(module)
        check_stop_tokens(stop_tokens, self._vocabulary)
        self._stop, self._stops = stop_tokens, stops if stops.longest else None
        self._tied = _tied(self._module)
        self._version = -1
        self._rows: dict[RowId, _Running] = {}
        self._ended: list[Rollout] = []
        self._adapters = [each.beside[0] for each in adapted(module).values()]
        self._log = _emptied(home) if home is not None else None
        with tempfile.TemporaryDirectory(dir=home) as folder:
            write_settings(self._module, Path(folder))
            self._core = self._started(
                CoreSettings(
                    directory=folder,
                    device=weight.device.type,
                    dtype=str(self._module.dtype).removeprefix("torch."),
                    context=context,
                    max_rows=config.max_rows,
                    keep_cache=config.keep_cache,
                    rank=max((each.down.out_features for each in self._adapters), default=0),
                    cache_gib=config.cache_gib,
                    tp=tp.size,
                    tp_rank=tp.rank,
                    port=meeting_port(tp),
                    scratch=None if home is None else str(home),
                )
            )

    def _started(self, settings: CoreSettings) -> AnyCore:
        """Start vLLM, in a server if the recipe names its Python, else in this process."""
        try:
            server = self._config.server
            if server is not None or settings.tp > 1:  # vLLM's process groups need processes of their own
                return ServedCore(Path(server or sys.executable), settings, log=self._log)
            gc.collect()  # collecting an unused engine later would destroy vLLM's process groups
            os.environ.update(ENVIRONMENT)
            os.environ.setdefault(LOUDNESS, "ERROR")
            from rillflow_parts.vllm.core import Core

            return Core(settings)
        except (ValueError, RuntimeError, NotImplementedError, ImportError, StartRefused) as error:
            raise RolloutError(
                f"vLLM cannot start a {type(self._module).__name__}",
                why=str(error) if isinstance(error, StartRefused) else told(error),
                fix="if memory is short, lower rollout.max_rows; else choose another model, or set "
                'rollout.engine = "native"',
            ) from error

    can: ClassVar = frozenset(Capability) - {*(Capability.FIXED, Capability.ROUTES, Capability.CACHE)}

    @property
    def has_work(self) -> bool:
        """See Engine."""
        return bool(self._rows or self._ended)

    @property
    def held_bytes(self) -> int:
        """See Engine; allocated once for ``max_rows`` whole contexts, and kept."""
        return self._core.cache_bytes

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """See Engine; the weights are copied a layer at a time; with an adapter, the base only once."""
        for row in self._rows.values():
            row.rollout, row.tokens, row.logprobs = row.settled(self._version), [], []
        beside = {name: weight for name, weight in weights.items() if is_adapter(name)}
        if self._version < 0 or not self._adapters:
            base = {name: weight for name, weight in weights.items() if name not in beside}
            self._core.reload(version, self._by_file(base))
        if beside:
            scale = self._adapters[0].scale
            whole = self._shards.whole({name: weight.detach() for name, weight in beside.items()})
            named = ((file_name(name), weight.contiguous()) for name, weight in whole.items())
            self._core.adapt(version, scale, named)
        self._version = version

    def _by_file(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights by their names in files: tied ones under each name, quantised ones dequantised."""
        weights = {
            **weights,
            **{name: weights[first] for name, first in self._tied.items() if first in weights},
        }
        for _, layer in groupby(weights, key=layer_of):
            held = {name: weights[name].detach() for name in layer}
            whole = self._shards.whole(widened(held, self._module.dtype))
            yield from file_weights(self._module, whole).items()

    def sleep(self) -> None:
        """See Engine."""
        self._core.sleep()

    def wake(self) -> None:
        """See Engine."""
        self._core.wake()

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """See Engine.

        Raises:
            RolloutError: the row has ended, cannot be continued, or is in the engine already.
        """
        chosen = sampling or self._config
        check_stop(chosen, self._config)
        limit = limit_of(rollout, chosen.max_tokens, self._context)
        self._add(rollout, chosen, limit, stop=self._stop)

    def _add(
        self,
        rollout: Rollout,
        sampling: SamplingConfig,
        limit: int,
        *,
        stop: frozenset[int] = frozenset(),
        given: Sequence[int] = (),
    ) -> None:
        begin = len(rollout.tokens)
        check_tokens(rollout, self._context, self._vocabulary)
        check_ids([rollout.row, *({rollout.row} & self._rows.keys())])
        how: dict[str, Any] = {"row": rollout.row, "sampling": sampling, "seed": self._seed, "begin": begin}
        own = zip(rollout.tokens, rollout.loss_mask, strict=True) if sampling.is_penalised else ()
        how["sampled"] = tuple(token for token, is_sampled in own if is_sampled)
        ask = Ask(**how, most=limit - begin, stop=tuple(sorted(stop)), given=tuple(given))
        self._core.add(rollout.tokens, ask)
        self._rows[rollout.row] = _Running(rollout=rollout, stop=stop)

    def step(self) -> list[Rollout]:
        """See Engine.

        Raises:
            RolloutError: the logits of a row are not finite; the engine is empty afterwards.
        """
        return self._stepped(1)

    def _some_steps(self) -> list[Rollout]:
        return self._stepped(_STEPS)

    def _stepped(self, most: int) -> list[Rollout]:
        ended, self._ended = self._ended, []
        return ended + self._advanced(most)

    def _advanced(self, most: int) -> list[Rollout]:
        """Step; return the rows that ended. Runs ``most`` steps, or one if a stop text may end a row."""
        ended = []
        for piece in self._core.step(most if self._stops is None else 1):
            if piece.row not in self._rows:
                continue
            row = self._rows[piece.row]
            row.tokens += piece.tokens
            row.logprobs += piece.logprobs
            self._check_finite(row, len(piece.tokens))
            is_stopped = self._stops_at(row)
            if piece.has_ended or is_stopped:
                ended.append(row.settled(self._version, Finish.STOP if is_stopped else Finish.LENGTH))
                self._left(piece.row, is_over=piece.has_ended)
        return ended

    def _stops_at(self, row: _Running) -> bool:
        """Return whether the row's last token is a stop token or completes a stop text."""
        if not row.stop or self._stops is None:
            return row.tokens[-1] in row.stop
        own, longest = row.settled(self._version), self._stops.longest
        tail = zip(own.tokens[-longest:], own.loss_mask[-longest:], strict=True)
        return row.tokens[-1] in row.stop or self._stops.ends([token for token, is_own in tail if is_own])

    def _left(self, row: RowId, *, is_over: bool = False) -> Rollout:
        """Remove and return a row; abort it in vLLM unless it has ended there."""
        if not is_over:
            self._core.abort(row)
        return self._rows.pop(row).settled(self._version)

    def abort(self, row: RowId) -> Rollout:
        """See Engine.

        Raises:
            RolloutError: the row is not in the engine.
        """
        self.look(row)
        return self._left(row)

    def look(self, row: RowId) -> Rollout:
        """See Engine.

        Raises:
            RolloutError: the row is not in the engine.
        """
        return row_in(self._rows, row).settled(self._version)

    def score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Engine; running rows continue meanwhile."""
        plain, scored = SamplingConfig(stop=self._config.stop), dict[RowId, Rollout]()
        for index, text in enumerate(texts):
            start = Rollout.start(RowId(_GIVEN, index, 0), text[:1])
            self._add(start, plain, len(text), given=text[1:])
        while len(scored) < len(texts):
            for each in self._advanced(_STEPS):
                if each.row.epoch == _GIVEN:
                    scored[each.row] = each
                else:
                    self._ended.append(each)
        return [list(scored[RowId(_GIVEN, index, 0)].logprobs[1:]) for index in range(len(texts))]

    def _clear(self) -> None:
        """Remove every row."""
        for row in [*self._rows]:
            self._left(row)
        self._ended = []

    def _check_finite(self, row: _Running, new: int) -> None:
        begin = len(row.logprobs) - new
        odd = [place for place, each in enumerate(row.logprobs[begin:], begin) if not isfinite(each)]
        if not odd:
            return
        self._clear()
        raise not_finite(row.rollout.row, len(row.rollout.tokens) + odd[0])


def _emptied(home: Path) -> Path:
    """Make an engine's folder, remove what a killed process left there, and return the path of its log."""
    home.mkdir(parents=True, exist_ok=True)
    for left in home.iterdir():
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
    return home / "server.log"


def _tied(module: nn.Module) -> dict[str, str]:
    """Return, for weights with several names, each further name and the first name it is tied to."""
    first: dict[int, str] = {}
    every = dict(module.named_parameters(remove_duplicate=False))
    return {name: first[id(each)] for name, each in every.items() if first.setdefault(id(each), name) != name}

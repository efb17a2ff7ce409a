"""ServiceEngine: a rollout engine whose rows are sampled by programs in other processes, over HTTP.

    add ─> RowLeases <─ take, put ─ EngineApp <─ HTTP ─ any program
    step <── rows that were put and checked
    load ─> WeightFolder ─ files ─────────────────────> any program

Loop (``step``, in the thread of the sampler's rank)
    consumes      puts of clients
    waits for     a put, at most STEP_S
    unblocked by  a put; the caller calls again while rows run
    produces      accepted rows; an answer to every put
    shuts down    healthy: the rank ends, every later request is refused. No accepted row for
                  ``rollout.service.timeout_s``: an error that names the clients and the last refusal

The rank's own module computes the log probabilities of a share of the rows again, and those of the canary.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rillflow.config.user_paths import expanded
from rillflow.errors import RolloutError, StreamError
from rillflow.formulas.counter import uniform
from rillflow.models.architecture import vocabulary_of
from rillflow.models.model_files import file_weights, shard_file, shards, write_settings, write_tensors
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
)
from rillflow.rollout.native.scheduler import check_ids
from rillflow.serving.http_body import Declined
from rillflow.serving.server import LoopbackServer, bound
from rillflow.sharding.codec import Codec
from rillflow.workers.backend import Site
from rillflow.workers.collectives import Ranks
from rillflow_service.access import token_for, write_private
from rillflow_service.config import ServiceConfig
from rillflow_service.engine_app import EngineApp
from rillflow_service.row_checks import LogprobCheck, RowRules
from rillflow_service.row_leases import Offered, Proposal, RowLeases
from rillflow_service.weight_differences import WeightDifferences
from rillflow_service.weight_folder import WeightFolder

SHARD_BYTES = 2**29
"""Size of a weight file, if no layer is larger."""
STEP_S = 0.05
"""Longest wait of a step for a put; between two calls of the rank, weights and further rows arrive."""
_log = logging.getLogger(__name__)


def options(setting: RoleSetting) -> dict[str, Any]:
    """Return the arguments of a rank's ServiceEngine that only this engine has."""
    service = setting.sections["rollout.service"]
    return {
        "service": service,
        "site": setting.site,
        "base": setting.base,
        "folder": setting.run / "service",
        "codec": setting.codecs.weights,
    }


class ServiceEngine(RowByRow):
    """Rows sampled over HTTP. It listens when it is made, and writes address and token into ``folder``.

    Args: see Engine; and
        service: the section ``rollout.service``.
        site: the sampler's rank; its stack closes the engine.
        base: the recipe's folder.
        folder: folder of address files, one for each rank.
        codec: codec of differences between versions; None for whole weights only.

    Raises:
        StreamError: the address is taken, or needs a token of the user's own.
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
        service: ServiceConfig,
        site: Site,
        base: Path,
        folder: Path,
        codec: Codec | None = None,
    ) -> None:
        assert tp.size == 1, "capabilities are looked at before"
        self._config, self._context, self._service = config, context, service
        self._vocabulary = vocabulary_of(module)
        check_stop_tokens(stop_tokens, self._vocabulary)
        self._rules = RowRules(
            vocabulary=self._vocabulary, stop_tokens=stop_tokens, stops=stops if stops.longest else None
        )
        share, tolerance = self._service.check_share, self._service.check_tolerance
        self._check = LogprobCheck(module, share=share, tolerance=tolerance, seed=seed)
        file = folder / f"{site.place.pool}-{site.place.rank}.json"
        site.stack.callback(_remove, file)
        folder.mkdir(mode=0o700, exist_ok=True)
        shutil.rmtree(weights := folder / file.stem, ignore_errors=True)  # of a run that was killed
        self._module, self._weights, self._seed = module, WeightFolder(weights), seed
        self._differences = None if codec is None else WeightDifferences(codec, self._weights)
        self._leases = RowLeases(lambda: self._app.ring())
        token_file = self._service.token_file
        token = token_for(self._service.host, None if token_file is None else base / expanded(token_file))
        about = {
            "config": _settings(module),
            "vocabulary": self._vocabulary,
            "context": context,
            "stop_tokens": sorted(stop_tokens),
            "stop": list(config.stop),
            "reads_text": bool(stops.longest),
            "session": self._leases.session,
        }
        self._app = EngineApp(self._leases, self._weights, model=about, token=token)
        self._waited_s = 0.0
        self._listen(site, file, token)

    can: ClassVar = frozenset(
        {Capability.GREEDY, Capability.STOP, Capability.ROWS, Capability.PARTS, Capability.SCORE}
    )
    held_bytes = 0

    @property
    def has_work(self) -> bool:
        """See Engine."""
        return self._leases.has_rows

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """See Engine; the weights are written to files. Leased rows may end with older ones."""
        names = shards({name: each.nbytes for name, each in weights.items()}, SHARD_BYTES)
        files = [shard_file(index, len(names)) for index in range(len(names))]
        more: dict[str, Any] = {"session": self._leases.session}
        for file, held in zip(files, names, strict=True):
            tensors = file_weights(self._module, {name: weights[name].detach().cpu() for name in held})
            self._weights.arrived[file] = write_tensors(self._weights.arriving(version) / file, tensors)
            if self._differences is not None:
                self._differences.add(version, file, tensors)
        if self._differences is not None:
            more |= self._differences.finish(version)
        self._weights.publish(version, files, more)
        self._check.begin()
        self._app.ring()

    def sleep(self) -> None:
        """See Engine; the engine holds no memory of the rank."""

    def wake(self) -> None:
        """See Engine."""

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """See Engine.

        Raises:
            RolloutError: the row has ended, cannot be continued, or is in the engine already.
        """
        chosen = sampling or self._config
        check_stop(chosen, self._config)
        check_tokens(rollout, self._context, self._vocabulary)
        check_ids([rollout.row] * (1 + self._leases.holds(rollout.row)))
        drawn = uniform(self._seed, torch.tensor(rollout.row), torch.tensor(len(rollout.tokens)))
        offered = Offered(
            rollout=rollout,
            temperature=chosen.temperature,
            most=limit_of(rollout, chosen.max_tokens, self._context) - len(rollout.tokens),
            oldest=self._weights.version,
            seed=int(float(drawn) * 2**53),
        )
        self._leases.offer(offered)

    def step(self) -> list[Rollout]:
        """See Engine; wait a short time for rows.

        Raises:
            RolloutError: no row was accepted for ``rollout.service.timeout_s`` of waiting.
        """
        began = time.monotonic()
        puts = self._leases.proposals(STEP_S)
        waited_s = time.monotonic() - began
        accepted = [row for put in puts for row in self._judged(put)]
        self._waited_s = 0.0 if accepted or not self.has_work else self._waited_s + waited_s
        if self._waited_s > self._service.timeout_s:
            raise self._silent()
        return accepted

    def abort(self, row: RowId) -> Rollout:
        """See Engine; the row is returned as it was added, and a later put of it is refused.

        Raises:
            RolloutError: the row is not in the engine.
        """
        if not self._leases.holds(row):
            why = "it ended, was taken out, or was never added"
            raise RolloutError(f"row ({row}) is not in the engine", why=why, fix="add it first")
        return self._leases.withdraw(row)

    def look(self, row: RowId) -> Rollout:
        """See Engine; nobody calls it, since ``can`` lacks Capability.LOOK: programs send whole rows."""
        raise NotImplementedError

    def score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Engine; computed by the rank's own module."""
        return [self._check.logprobs(text) for text in texts]

    def close(self) -> None:
        """Refuse every further request."""
        self._leases.close("the run has ended")
        for rule, count in sorted(self._leases.refused.items()):
            _log.warning("rollout.engine service: refused %d puts by the rule %s", count, rule)

    def _clear(self) -> None:
        self._leases.clear()

    def _judged(self, put: Proposal) -> list[Rollout]:
        """Accept or refuse a put; return its rows if they are accepted."""
        ended = []
        try:
            for row, offered in zip(put.rows, self._leases.offers(put), strict=True):
                logprobs = self._rules.check(row, offered, self._weights.version)
                if row.version == self._weights.version:
                    self._check.check(row, offered, put.client)
                finish = Finish.STOP if row.finish == "stop" else Finish.LENGTH
                ended.append(offered.rollout.sampled(row.tokens, logprobs, row.version, finish))
            self._leases.complete(put)
        except Declined as error:
            put.answered.set_exception(error)
            return []
        return ended

    def _silent(self) -> RolloutError:
        now = self._leases.status()
        clients = ", ".join(f"{name} {ago:g} s ago" for name, ago in now["heard_s"].items())
        refused = f"; the last refusal: {now['last_refusal']}" if now["last_refusal"] else ""
        return RolloutError(
            f"no row came back for {self._waited_s:.0f} s: {now['ready']} rows wait, {now['leased']} are "
            "leased",
            why=f"requests of rows came from {clients or 'nobody'}{refused}",
            fix=f"start a program that samples at {self.url}, or raise rollout.service.timeout_s",
        )

    def _listen(self, site: Site, file: Path, token: str) -> None:
        host, port = self._service.host, self._service.port
        rank = site.place.rank
        if port and port + rank > 65535:
            raise StreamError(
                f"port {port + rank} of {site.place}", why="ports end at 65535", fix="use port 0"
            )
        server = site.stack.enter_context(
            LoopbackServer(self._app.app(), bound(port + rank if port else 0, host))
        )
        self.url = server.url
        """Base URL of this rank."""
        write_private(file, json.dumps({"url": self.url, "token": token}))
        site.stack.callback(self.close)
        _log.warning("rollout.engine service: %s; address and token are in %s", self.url, file)


def _remove(file: Path) -> None:
    """Remove an address file and the weights beside it, and their folder with the last one."""
    file.unlink(missing_ok=True)
    shutil.rmtree(file.with_suffix(""), ignore_errors=True)
    with suppress(OSError):
        file.parent.rmdir()


def _settings(module: Any) -> dict[str, Any]:
    """Return the config.json of the module."""
    with tempfile.TemporaryDirectory() as folder:
        write_settings(module, Path(folder))
        found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found

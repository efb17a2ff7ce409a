"""Arithmetic roles: a policy, a sampler's engine and a reward whose results are sums of hashes.

    tokens of a row        a hash of the weights, the row's id and the position
    reward of a row        a share of its tokens
    weights after a step   the weights before, plus every token, advantage and version, in order
    reference              a mean of the weights after each step

A row that is lost, doubled, out of order or sampled by other weights therefore changes the weights' bits. A
step takes two milliseconds. Everything around the roles is Rillflow's own: loop, source, sampler, weight
transfer, checkpoints, run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from rillflow.models.tensor_plan import weight_parts
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch
from rillflow.records.metrics import Mean, Metric, Sum
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.roles.publishing import ReceivedWeights, SentWeights
from rillflow.roles.sampler import Sampler
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Capability, RowByRow
from rillflow.runs.durable import write_flushed
from rillflow.sharding.layout import generation_layout, logical_weights
from rillflow.workers.backend import Site
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import BROADCAST, SPLIT_DP, SPLIT_DP_REDUCE

MODEL = "model.safetensors"
MOST_TOKENS = 24
"""Tokens of the longest row."""


class Numbers(nn.Module):
    """A model of twelve numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.arange(12.0).sin(), requires_grad=False)


def model(module: Numbers) -> Any:
    """Return the attributes that roles use of a language model."""
    return SimpleNamespace(
        module=module,
        device=torch.device("cpu"),
        trained=(),
        adapter=None,
        context=MOST_TOKENS + 8,
        tokenizer=SimpleNamespace(stop_tokens=frozenset()),
    )


class Engine(RowByRow):
    """Samples tokens from weights, row and position; a few rows are much longer than the rest."""

    can: ClassVar = frozenset({Capability.ROWS, Capability.PARTS})
    held_bytes = 0

    def __init__(self, module: nn.Module, config: RolloutConfig, **_: object) -> None:
        self._most, self._rows, self._version, self._key = config.max_rows, dict[RowId, Rollout](), -1, b""

    @property
    def has_work(self) -> bool:
        """True if a row runs."""
        return bool(self._rows)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Sample with these weights from now on."""
        self._version, self._key = version, key_of([weights[name] for name in sorted(weights)])

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """Add a row."""
        assert rollout.row not in self._rows, "a row runs twice"
        self._rows[rollout.row] = rollout

    def abort(self, row: RowId) -> Rollout:
        """Remove a row and return it."""
        return self._rows.pop(row)

    def step(self) -> list[Rollout]:
        """Add a token to each of the first rows; return those that ended."""
        ended = []
        for row, rollout in list(self._rows.items())[: self._most]:
            place = len(rollout.tokens)
            token, chance, *_ = drawn(self._key, row, place)
            finish = Finish.STOP if place > length_of(row) else Finish.ABORTED
            grown = rollout.sampled([token], [-chance / 64], self._version, finish)
            if finish is Finish.STOP:
                ended.append(grown)
                del self._rows[row]
            else:
                self._rows[row] = grown
        return ended

    def _clear(self) -> None:
        self._rows.clear()

    def wake(self) -> None:
        """Do nothing."""

    def sleep(self) -> None:
        """Do nothing."""


def key_of(weights: Sequence[Tensor]) -> bytes:
    """Return a key that differs for any other weights."""
    whole = b"".join(each.detach().numpy().tobytes() for each in weights)
    return blake2b(whole, digest_size=16).digest()


def drawn(key: bytes, row: tuple[int, int, int], place: int) -> bytes:
    """Return four random bytes for a position of a row."""
    return blake2b(repr((*row, place)).encode(), key=key, digest_size=4).digest()


def length_of(row: RowId) -> int:
    """Return the tokens of a row: mostly few, sometimes many."""
    few, many = blake2b(repr(tuple(row)).encode(), digest_size=2).digest()
    return few % 4 if many % 8 else MOST_TOKENS - few % 4


def trained(numbers: Tensor, rows: Sequence[tuple[Any, ...]]) -> Tensor:
    """Return the weights after rows were added, in order."""
    places = torch.arange(12.0)
    for row in rows:
        told = blake2b(repr(row).encode(), digest_size=12).digest()
        numbers = numbers * 0.99 + (places + torch.tensor([*told], dtype=torch.float32)).sin() * 0.1
    return numbers


@dataclass(frozen=True)
class Passes:
    """The policy's training order: rows in order, so that parts follow each other."""

    def goes_by(self, parts: int) -> bool:
        """Return whether the rows may arrive in parts."""
        return parts > 1


def followed(reference: Tensor, numbers: Tensor) -> Tensor:
    """Return the reference after it moved towards the weights."""
    return reference.lerp(numbers, 0.25)


class Kept:
    """A role whose weights change, so that checkpoints save it.

    Args:
        name: its folder in a checkpoint.
        kept: that folder in the checkpoint to resume from; None for a new run.
    """

    def __init__(self, name: str, kept: Path | None) -> None:
        self.module, self.updates = Numbers(), 0
        if kept is not None:
            saved = load_file(kept / MODEL)
            self.module.numbers.data.copy_(saved["numbers"])
            self.updates = int(saved["updates"])
        self._name = name
        self._files: dict[Path, dict[str, Any]] = {}

    def begin_saving(self, folder: Path) -> None:
        """Write the weights into a checkpoint."""
        at = folder / self._name / MODEL
        at.parent.mkdir()
        data = save({"numbers": self.module.numbers.data, "updates": torch.tensor(self.updates)})
        write_flushed(at, [data])
        files = {f"{self._name}/{MODEL}": {"bytes": len(data), "sha256": sha256(data).hexdigest()}}
        self._files[folder] = files

    def written(self, folder: Path, *, wait: bool) -> Mapping[str, Any] | None:
        """Return the digests of the files, the first time only if asked to wait."""
        files = self._files[folder]
        if not wait and "asked" not in files:
            files["asked"] = True
            return None
        return {name: each for name, each in files.items() if name != "asked"}


class Reference(Kept):
    """An untrained role that follows the policy.

    Args:
        site: its rank, which is the policy's.
        kept: see Kept.
    """

    def __init__(self, site: Site, kept: Path | None) -> None:
        super().__init__("reference", kept)
        self._policy = cast(Policy, site.objects["policy"])

    @endpoint(BROADCAST)
    def follow(self) -> int:
        """Move towards the policy; return the number of calls."""
        numbers = self.module.numbers.data
        numbers.copy_(followed(numbers, self._policy.module.numbers.data))
        self.updates += 1
        return self.updates


class Policy(Kept):
    """The trained role: it adds up its training rows.

    Args:
        site: its rank.
        kept: its folder in the checkpoint to resume from.
        version: publishes so far.
    """

    def __init__(self, site: Site, kept: Path | None, version: int) -> None:
        super().__init__("policy", kept)
        self.version = version
        weights = logical_weights(self.module)
        share = SimpleNamespace(
            layout=generation_layout(weights, weight_parts({}, cast(Any, self.module)), Mesh.of(dp=1, tp=1)),
            written=weights,
            parallel=SimpleNamespace(parameters=dict(self.module.named_parameters())),
            groups=SimpleNamespace(everyone=site.ranks),
        )
        self.weights = SentWeights(cast(Any, share))
        self.trainer = SimpleNamespace(skipped=SimpleNamespace(take=list[Any]))

    @endpoint(SPLIT_DP_REDUCE, reads=("tokens", "versions", "advantages"), by_parts=True)
    def update(
        self, rollouts: Batch, scored: Batch, *, passes: Passes, part: tuple[int, int] = (0, 1)
    ) -> dict[str, Metric]:
        """Add rows, or a part of a step's rows, to the weights, in order; each call is an optimiser step."""
        numbers = self.module.numbers.data
        tokens, versions = rollouts.ragged("tokens").lists(), rollouts.ragged("versions").lists()
        gains: list[float] = scored.dense("advantages").tolist()
        rows = zip(rollouts.ids.tolist(), tokens, versions, gains, strict=True)
        numbers.copy_(trained(numbers, [*rows]))
        self.updates += 1
        return {
            "policy/better/share": Mean(total=float(sum(gain > 0 for gain in gains)), count=len(gains)),
            "policy/trained/sum": Sum(value=float(len(gains))),
        }

    @endpoint(BROADCAST)
    def publish(self) -> int:
        """Publish the weights; return their version."""
        self.version += 1
        self.weights.publish(self.version)
        return self.version

    def announce(self) -> None:
        """Publish the present weights under the present version."""
        self.weights.publish(self.version)


class Reward:
    """Scores a row by a share of its tokens.

    Args:
        site: its rank.
    """

    def __init__(self, site: Site) -> None:
        self.place = site.place

    @endpoint(SPLIT_DP, reads=("tokens",), writes=("rewards", "valid"))
    def score(self, rollouts: Batch) -> Batch:
        """Return the rows with their rewards."""
        rows = rollouts.ragged("tokens").lists()
        rewards = torch.tensor([sum(token % 2 for token in row) / len(row) for row in rows])
        return Batch(ids=rollouts.ids, fields={"rewards": rewards, "valid": torch.ones(len(rows)).bool()})


def sampler(site: Site, mesh: Mesh, rows: int) -> Sampler:
    """Return Rillflow's sampler around the arithmetic engine."""
    whole = model(Numbers())
    weights = ReceivedWeights(whole, mesh=mesh, ranks=site.ranks, rank=site.place.rank)
    return Sampler(
        weights, model=whole, rollout=RolloutConfig(max_rows=rows), seed=0, engine=cast(Any, Engine)
    )


@dataclass(frozen=True, kw_only=True)
class Factory:
    """Makes a role on its rank."""

    make: Callable[..., Any]
    arguments: Sequence[Any] = ()

    def __call__(self, site: Site) -> Any:
        """Make the role."""
        return self.make(site, *self.arguments)

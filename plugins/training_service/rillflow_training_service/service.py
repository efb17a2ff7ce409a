"""Service: what the engine thread does for a request. Every method here runs in that thread.

Tenant per trained model; Snapshot per set of weights that is sampled from
snapshots in memory: the newest ``KEPT`` of each model; older ones in files, read again when they are used
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rillflow.errors import DataError, RillflowError
from rillflow_training_service.checkpoints import About, CheckpointPath, Checkpoints
from rillflow_training_service.datums import Datum, PassRequest, checked_data, require_tokens
from rillflow_training_service.losses import LOSSES
from rillflow_training_service.passes import run_pass
from rillflow_training_service.sampling import SampleRequest, Snapshot, SnapshotSampler
from rillflow_training_service.shared_base import Shape, SharedBase
from rillflow_training_service.tenant import AdamParams, Tenant
from rillflow_training_service.wire import encoded_pass

KEPT = 3
"""Snapshots of one model that stay in memory."""


@dataclass(frozen=True, kw_only=True)
class SnapshotFile:
    """A snapshot that was moved to a file."""

    key: str
    """Key of the snapshot, with the version of its weights."""
    shape: Shape | None
    """Shape of the adapter."""
    path: Path
    """The file, which has no other weights at any time."""


class Service:
    """Trained adapters and snapshots.

    Args:
        base: the base model.
        sampler: sampling.
        checkpoints: checkpoints on the disk.
    """

    def __init__(self, base: SharedBase, sampler: SnapshotSampler, checkpoints: Checkpoints) -> None:
        self.base, self.sampler, self.checkpoints = base, sampler, checkpoints
        self._tenants: dict[str, Tenant] = {}
        self._snapshots: dict[str, dict[str, Snapshot | SnapshotFile]] = {}
        """Snapshots of each model, by key, the oldest first."""
        self._read: dict[str, Snapshot] = {}
        """Snapshots of checkpoints, by key, the oldest first."""

    def create(self, model: str, shape: Shape, seed: int) -> dict[str, Any]:
        """Create a trained model."""
        self._require_room(shape)
        self._tenants[model] = Tenant.new(model, self.base, shape, seed)
        return {"model_id": model, "type": "create_model"}

    def create_from(self, model: str, path: CheckpointPath, *, optimizer: bool) -> dict[str, Any]:
        """Create a trained model from a checkpoint."""
        loaded = self.checkpoints.load(path, optimizer=optimizer)
        self._require_room(loaded.about.shape)
        made = Tenant.new(model, self.base, loaded.about.shape, loaded.about.seed)
        made.load(loaded.weights, loaded.state)
        self._tenants[model] = made
        return {"path": str(path), "model_id": model, "type": "load_weights"}

    def load(self, model: str, path: CheckpointPath, *, optimizer: bool) -> dict[str, Any]:
        """Load a checkpoint into a trained model."""
        tenant, loaded = self._tenant(model), self.checkpoints.load(path, optimizer=optimizer)
        if loaded.about.shape != tenant.shape:
            raise DataError(
                f"the checkpoint {path} has the shape {_told(loaded.about.shape)}",
                why=f"this model's adapter has {_told(tenant.shape)}",
                fix="load it into a model of its own: create_training_client_from_state",
            )
        tenant.load(loaded.weights, loaded.state)
        return {"path": str(path), "model_id": model, "type": "load_weights"}

    def release(self, model: str) -> None:
        """Forget a trained model and its snapshots; checkpoints stay."""
        self._tenants.pop(model, None)
        self._snapshots.pop(model, None)
        shutil.rmtree(self._spilled(model), ignore_errors=True)

    def forward_backward(self, request: PassRequest) -> bytes:
        """Run a pass; a failed one with a gradient makes the next step be refused."""
        tenant = self._tenant(request.model_id)
        try:
            loss, data = checked_data(request, self.base.vocabulary, self.base.model.context)
            settings = loss.chosen(request.settings)
        except RillflowError as error:
            tenant.fail(None if request.is_forward else error)
            raise
        found = tenant.run(data, loss, settings, learns=not request.is_forward)
        return encoded_pass(found.logprobs, {"loss:sum": found.loss, "num_tokens:sum": found.num_tokens})

    def optim_step(self, model: str, params: AdamParams) -> dict[str, Any]:
        """Apply the gradient."""
        return {"metrics": self._tenant(model).step(params)}

    def save(
        self, model: str, path: CheckpointPath, about: About, *, optimizer: bool, overwrite: bool = False
    ) -> dict[str, Any]:
        """Write a checkpoint."""
        tenant = self._tenant(model)
        tenant.enter()
        state = tenant.optimizer_state() if optimizer else None
        self.checkpoints.save(path, about, tenant.weights, state, overwrite=overwrite)
        kind = "save_weights" if optimizer else "save_weights_for_sampler"
        return {"path": str(path), "type": kind}

    def snapshot(self, model: str, key: str) -> None:
        """Keep the present weights for sampling, under a key of ``snapshot_of``."""
        tenant = self._tenant(model)
        copies = {name: each.detach().clone() for name, each in tenant.weights.items()}
        held = self._snapshots.setdefault(model, {})
        before = held.pop(key, None)
        if isinstance(before, SnapshotFile):
            before.path.unlink(missing_ok=True)
        held[key] = Snapshot(key=tenant.key, shape=tenant.shape, weights=copies)
        in_memory = [each for each, one in held.items() if isinstance(one, Snapshot)]
        for old in in_memory[:-KEPT]:
            held[old] = self._spill(model, old, held[old])

    def sample(self, snapshot: Snapshot, request: SampleRequest) -> Tensor | None:
        """Begin a request; return the prompt's log probabilities [T], NaN where there are none."""
        require_tokens(torch.tensor(request.prompt), self.base.vocabulary, "the prompt")
        found = None if request.wants_prompt is None else self._prompt(snapshot, request)
        self.sampler.put(snapshot, request)
        return found

    def snapshot_of(self, model: str, key: str) -> Snapshot:
        """Return kept weights.

        Raises:
            DataError: the model was released.
        """
        found = self._snapshots.get(model, {}).get(key)
        if found is None:
            raise DataError(
                f"the weights of {model} are no longer there",
                why="its session has ended, or its model was unloaded",
                fix="sample from a checkpoint of save_weights_for_sampler",
            )
        if isinstance(found, SnapshotFile):
            return Snapshot(key=found.key, shape=found.shape, weights=load_file(found.path))
        return found

    def snapshot_at(self, path: CheckpointPath) -> Snapshot:
        """Return the weights of a checkpoint."""
        about = self.checkpoints.about(path)
        key = f"{path} {about.time}"
        if key not in self._read:
            loaded = self.checkpoints.load(path, optimizer=False)
            self._read[key] = Snapshot(key=key, shape=about.shape, weights=loaded.weights)
            for old in [*self._read][:-KEPT]:
                del self._read[old]
        return self._read[key]

    def _tenant(self, model: str) -> Tenant:
        if model not in self._tenants:
            raise DataError(
                f"the model {model} is no longer there",
                why="its creation failed, or it was unloaded",
                fix="create it again, or load a checkpoint: create_training_client_from_state",
            )
        return self._tenants[model]

    def _require_room(self, shape: Shape) -> None:
        """Refuse an adapter for which there is no memory left.

        Raises:
            DataError: the adapters of all clients would have too many parameters.
        """
        most = 2 * self.base.room
        held = sum(each.numel() for tenant in self._tenants.values() for each in tenant.weights.values())
        new = sum(size.numel() for size in self.base.names(shape).values())
        if held + new > most:
            raise DataError(
                f"{len(self._tenants)} models with {held:,} parameters are trained, and this one has {new:,}",
                why=f"the limit is {most:,}, because each parameter needs a gradient and two moments",
                fix="unload models, or choose a smaller rank",
            )

    def _prompt(self, snapshot: Snapshot, request: SampleRequest) -> Tensor:
        tokens = torch.tensor(request.prompt)
        weights = torch.ones(len(tokens) - 1)
        found = torch.full((len(tokens),), torch.nan)
        if len(tokens) > 1:
            datum = Datum(tokens=tokens[:-1], targets=tokens[1:], inputs={"weights": weights})
            parameters = self.base.enter(snapshot.shape, snapshot.key, snapshot.weights)
            loss = LOSSES["cross_entropy"]
            found[1:] = run_pass(self.base, parameters, [datum], loss, {}, learns=False).logprobs[0]
        if request.wants_prompt:
            found[: -request.wants_prompt] = torch.nan
        return found

    def _spilled(self, model: str) -> Path:
        return self.checkpoints.root / quote(model, safe="") / "snapshots"

    def _spill(self, model: str, key: str, snapshot: Snapshot | SnapshotFile) -> SnapshotFile:
        """Move a snapshot to a file of its own: a batch may still read the file of an earlier one."""
        assert isinstance(snapshot, Snapshot)
        path = self._spilled(model) / f"{quote(f'{key} {snapshot.key}', safe='')}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        weights: Mapping[str, Tensor] = {name: each.cpu() for name, each in snapshot.weights.items()}
        save_file(dict(weights), path)
        return SnapshotFile(key=snapshot.key, shape=snapshot.shape, path=path)


def _told(shape: Shape) -> str:
    parts = [name for name in ("attention", "mlp", "unembed") if vars(shape)[name]]
    return f"rank {shape.rank} on {', '.join(parts)}"

"""WeightSwitch: one rank's weights, either for training or for generation, never both.

    training tensors ── to_generation ──> generation tensors    bucket by bucket: allocate, copy the own
            ^                                    │              slices, receive the rest, free the training
            └────────── to_training ─────────────┘              tensors

Both tensors stay the same objects; only their storage is allocated and freed, so an optimiser, FSDP2 and an
engine may keep references. If a rank's slices of a weight are equal in both layouts, both share one storage:
the generation tensor is the training tensor. If the dtypes differ (training in float32, generation in
bfloat16), the training tensors stay: the optimiser adds small steps to them, and the generation tensors could
not restore them.

Switching back needs no communication: a rank's training shard lies within its generation shard.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rillflow.errors import WeightError
from rillflow.sharding.layout import local_shape
from rillflow.sharding.reshard_plan import ReshardPlan
from rillflow.sharding.resharding import Resharding, keep, require_shapes
from rillflow.sharding.tensor import own
from rillflow.workers.collectives import Ranks


class WeightSwitch:
    """The weights of one rank under both meshes.

    Args:
        plan: from training's layout to generation's.
        ranks: the pool, with this rank.
        training: its parameters by weight: DTensors, FSDP2's among them, or plain tensors.

    Raises:
        WeightError: a parameter is missing, or of another shape than in its layout.
        PlacementError, ClusterError: see Resharding.

    Example:
        switch = WeightSwitch(plan, ranks, dict(module.named_parameters()))
        engine_weights = switch.to_generation()
        switch.to_training()
    """

    def __init__(self, plan: ReshardPlan, ranks: Ranks, training: Mapping[str, Tensor]) -> None:
        require_shapes(training, plan, plan.source, ranks.rank)
        self.plan = plan
        self.rank = ranks.rank
        self.is_generating = False
        self.is_torn = False
        """Whether a switch to generation failed half-way, so that this rank has no complete weights."""
        self.peak_bytes = 0
        """Most bytes of parameters since the last switch to generation began."""
        self.buffer_bytes = 0
        """Most bytes of buffers in that time."""
        self.resharding = Resharding(plan, ranks)
        """Execution of the plan, with the bytes moved so far."""
        self._training = {name: training[name] for name in plan.weights if name in training}
        self._shared = {
            name for name in self._training if self._is_alike(name) and plan.is_same(name, self.rank)
        }
        self._memories = self._found_memories()
        self.generation: dict[str, Tensor] = {}
        """Tensors of generation's layout, without storage while this rank trains."""
        for name, weight in plan.weights.items():
            placement = plan.destination[name]
            if name in self._shared:
                self.generation[name] = own(self._training[name])
            elif self.rank in placement.mesh.ranks:
                shape = local_shape(placement, weight.shape, self.rank)
                made = torch.empty(shape, dtype=weight.dtype, device=self._device(name))
                made.untyped_storage().resize_(0)
                self.generation[name] = made

    def to_generation(self) -> Mapping[str, Tensor]:
        """Switch this rank to generation; every rank of the pool calls it.

        Returns:
            ``generation``.

        Raises:
            WeightError: it generates already.
            ClusterError: a rank died or did not arrive in time.
        """
        if self.is_generating:
            raise WeightError(f"rank {self.rank} is already generating", why="it has no training weights now")
        resharding, plan, self.is_torn = self.resharding, self.plan, True
        self.peak_bytes, self.buffer_bytes = self.held_bytes, 0
        for place, bucket in enumerate(plan.buckets):
            for part in bucket.parts:
                if part.piece == 0:
                    self._make_room(part.name)
            self._note()
            resharding.pack(place, self._training)
            for name in (part.name for part in bucket.parts if part.is_last):
                keep(plan, name, self.rank, self._training, self.generation)
                if name in self._memories:
                    self._memories[name].leave(name)
            resharding.exchange(place, self.generation)
            self._note()
        resharding.close()
        self.is_generating, self.is_torn = True, False
        return self.generation

    def to_training(self) -> None:
        """Switch this rank to training, without communication.

        Raises:
            WeightError: it trains already, or a rank failed while weights moved.
        """
        if self.is_torn:
            what = "the weights are half-way between training and generation"
            raise WeightError(
                what, why="a rank failed while they moved", fix="resume from the last checkpoint"
            )
        if not self.is_generating:
            raise WeightError(f"rank {self.rank} is already training", why="it has no generation weights now")
        for name in self.plan.weights:
            if name in self._memories:
                self._memories[name].enter(name)
                self._note()
                keep(self.plan, name, self.rank, self._training, self.generation, back=True)
            if name in self.generation and name not in self._shared:
                self.generation[name].untyped_storage().resize_(0)
        self.is_generating = False

    @property
    def held_bytes(self) -> int:
        """Bytes of all parameters' storages in both layouts; shared ones count once."""
        every = (*self._training.values(), *self.generation.values())
        storages = (own(tensor).untyped_storage() for tensor in every)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _is_alike(self, name: str) -> bool:
        """Return whether training and generation use the same dtype."""
        return self._training[name].dtype == self.plan.weights[name].dtype

    def _found_memories(self) -> dict[str, _Memory]:
        """Return the storage of every training tensor that can be restored from its generation tensor."""
        found: dict[int, _Memory] = {}
        for name, tensor in self._training.items():
            storage = own(tensor).untyped_storage()
            memory = found.setdefault(storage.data_ptr() or id(tensor), _Memory(storage))
            memory.names.add(name)
        comes_back = {
            name
            for name in self._training
            if name not in self._shared and self._is_alike(name) and self.plan.is_within(name, self.rank)
        }
        return {
            name: memory for memory in found.values() for name in memory.names if memory.names <= comes_back
        }

    def _make_room(self, name: str) -> None:
        if name in self.generation and name not in self._shared:
            tensor = self.generation[name]
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)

    def _device(self, name: str) -> torch.device:
        """Return the device for a generation tensor: its weight's, or the first weight's."""
        tensor = self._training.get(name, next(iter(self._training.values()), None))
        return own(tensor).device if tensor is not None else torch.device("cpu")

    def _note(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.buffer_bytes = max(self.buffer_bytes, self.resharding.buffer_bytes)


class _Memory:
    """Storage of a training tensor, or of several that are views of it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.names: set[str] = set()
        self._storage = storage
        self._size = storage.nbytes()
        self._crossed: set[str] = set()

    def leave(self, name: str) -> None:
        """Record that a weight has moved; after the last one, free the storage."""
        self._crossed.add(name)
        if self._crossed == self.names:
            self._storage.resize_(0)

    def enter(self, name: str) -> None:
        """Record that a weight comes back; before the first one, allocate the storage."""
        if self._crossed == self.names:
            self._storage.resize_(self._size)
            # FSDP2 pads slices and gathers the padding with them, so it must not contain garbage.
            torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage).zero_()
        self._crossed.discard(name)

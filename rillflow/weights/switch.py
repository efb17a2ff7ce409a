"""WeightSwitch: one rank's weights, as it trains them or as it generates with them, never both.

    training tensors ── to_generation ──> generation tensors    bucket by bucket: room is made, the own slice
            ^                                    │              copied in, the rest received, the training
            └────────── to_training ─────────────┘              tensor's room given back

Both are the same tensor objects for ever: what comes and goes is the memory under them, so an optimiser,
FSDP2 and an engine may hold on to theirs. A weight of which a rank generates with just what it trains has one
memory: the generation tensor is the training tensor. Where the types differ (float32 that is trained,
bfloat16 that generates) training's tensors stay: they are what the optimiser adds small steps to, and no
switch could bring them back.

Nothing comes back over the wire: what a rank trains lies within what it generates with.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rillflow.cluster.ranks import Ranks
from rillflow.errors import WeightError
from rillflow.parallel.tensor import own
from rillflow.weights.layout import local_shape
from rillflow.weights.plan import ReshardPlan
from rillflow.weights.resharding import Resharding, keep, require_shapes


class WeightSwitch:
    """The weights of one rank under both meshes.

    Args:
        plan: from training's layout to generation's.
        ranks: this rank in the pool.
        training: its parameters by weight: DTensors, FSDP2's among them, or plain tensors.

    Raises:
        WeightError: a parameter is missing, or of another shape than its layout says.
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
        self.peak_bytes = 0
        """Of parameters, the most held since the last turn to generation began."""
        self.buffer_bytes = 0
        """Of buffers beside them, the most in that time."""
        self.resharding = Resharding(plan, ranks)
        """What carries the plan out, with the bytes that have crossed since the beginning."""
        self._training = {name: training[name] for name in plan.weights if name in training}
        self._shared = {
            name for name in self._training if self._is_alike(name) and plan.is_same(name, self.rank)
        }
        self._memories = self._found_memories()
        self.generation: dict[str, Tensor] = {}
        """The tensors of generation's layout; without memory while this rank trains."""
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
        """Let this rank generate; every rank of the pool calls it.

        Returns:
            ``generation``.

        Raises:
            WeightError: it generates already.
            ClusterError: a rank died or did not come in time.
        """
        if self.is_generating:
            raise WeightError(f"rank {self.rank} generates already", why="its training weights are not there")
        resharding, plan = self.resharding, self.plan
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
        self.is_generating = True
        return self.generation

    def to_training(self) -> None:
        """Let this rank train; nothing crosses.

        Raises:
            WeightError: it trains already.
        """
        if not self.is_generating:
            raise WeightError(f"rank {self.rank} trains already", why="there is nothing to switch back from")
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
        """Bytes of parameters of both layouts, as the storages of their tensors say; shared ones once."""
        every = (*self._training.values(), *self.generation.values())
        storages = (own(tensor).untyped_storage() for tensor in every)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _is_alike(self, name: str) -> bool:
        """Whether training's elements are generation's."""
        return self._training[name].dtype == self.plan.weights[name].dtype

    def _found_memories(self) -> dict[str, _Memory]:
        """The memory under every weight that comes back from its generation tensor."""
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
        """Where a generation tensor goes: to its weight's device, or that of the first."""
        tensor = self._training.get(name, next(iter(self._training.values()), None))
        return own(tensor).device if tensor is not None else torch.device("cpu")

    def _note(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.buffer_bytes = max(self.buffer_bytes, self.resharding.buffer_bytes)


class _Memory:
    """The memory under a training tensor, or under several that are views of it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.names: set[str] = set()
        self._storage = storage
        self._size = storage.nbytes()
        self._crossed: set[str] = set()

    def leave(self, name: str) -> None:
        """A weight has crossed; after the last one the memory goes."""
        self._crossed.add(name)
        if self._crossed == self.names:
            self._storage.resize_(0)

    def enter(self, name: str) -> None:
        """A weight comes back; before the first one the memory does."""
        if self._crossed == self.names:
            self._storage.resize_(self._size)
            # What lies beside a slice (FSDP2 pads it) is gathered with it: no garbage there.
            torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage).zero_()
        self._crossed.discard(name)

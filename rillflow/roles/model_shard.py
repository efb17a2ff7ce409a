"""ModelShard: one rank's part of its role's model, and the ranks that have the rest.

    a mesh of dp alone      the whole model; the other ranks hold other rows
    pp, tp, ep or fsdp      this rank's shard of it (parallel.module), placed by ``layout``

A role trains and scores with its share on any mesh; files hold whole models and logical tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor

from rillflow.errors import ModelError
from rillflow.models.language_model import LoadedModel, Model
from rillflow.models.lazy_weights import Index, Source, fill
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement, Split
from rillflow.sharding.codec import LINK, CutCodec
from rillflow.sharding.layout import Layout, Weight, local_shape, logical_weights, training_layout
from rillflow.sharding.mesh import RankGroups, rank_groups
from rillflow.sharding.module import Parallel
from rillflow.sharding.resharding import pieces
from rillflow.sharding.sharded_file import listed_weights, load_sharded
from rillflow.training.optimizer import COUNTER
from rillflow.training.trainer import Trainer
from rillflow.workers.collectives import Ranks, SingleRank
from rillflow.workers.config import MeshSizes


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShard(Generic[Model]):
    """One rank's share of a model.

    Example:
        ModelShard.of(outline(...), MeshSizes(dp=2, tp=2), site.ranks)
    """

    model: Model
    """The module, or the part of it that is left here; its tokeniser and context."""
    parallel: Parallel
    """Runner of this rank's part, and the ranks that have the rest."""
    weights: Mapping[str, Weight]
    """Tensors of the whole model."""
    layout: Layout
    """Placement of each tensor."""

    @staticmethod
    def whole(model: Model, ranks: Ranks | None = None) -> ModelShard[Model]:
        """Return the share of a rank that holds a whole model; ``ranks`` hold other rows."""
        ranks = ranks or SingleRank()
        return ModelShard.of(model, MeshSizes(dp=ranks.size), ranks)

    @staticmethod
    def of(
        model: Model, sizes: MeshSizes, ranks: Ranks, beside: ModelShard[Any] | None = None
    ) -> ModelShard[Model]:
        """Shard a model's module in place, read this rank's part, and return its share.

        Args:
            model: the whole model, with or without its weights.
            sizes: the grid of the role's ranks.
            ranks: the role's ranks.
            beside: another share on this rank; two adapters of one base share its weights.

        Raises:
            ModelError: the model cannot be sharded so, or cannot be read.
            TrainingError: another rank cannot read it.
        """
        weights = logical_weights(model.module)
        groups = RankGroups.whole(ranks)
        if not sizes.is_plain:
            groups = rank_groups(sizes.mesh, ranks, sizes.fsdp, sizes.ep)
        is_unread = next(model.module.parameters()).is_meta
        parallel = Parallel(model.module, groups, sequence=sizes.sequence, device=model.device)
        cut: dict[str, Any] = {"fsdp": sizes.fsdp, "ep": sizes.ep, "experts": parallel.experts}
        layout = training_layout(weights, parallel.parts, parallel.stages, sizes.mesh, **cut)
        share = ModelShard(model=model, parallel=parallel, weights=weights, layout=layout)
        if is_unread:
            share._read(share._together(beside))
        return share

    def compress(self, codec: CutCodec | None) -> None:
        """Let the stages of its pipeline, if it has one, send through a codec."""
        if self.parallel.pipeline is not None:
            self.parallel.pipeline.codec = codec

    @property
    def groups(self) -> RankGroups:
        """All ranks of the role, and the ranks that hold the other rows of every batch."""
        return self.parallel.groups

    @property
    def written(self) -> Mapping[str, Weight]:
        """Tensors that are trained, written, hashed and published: all, or only an adapter's."""
        if self.model.adapter is None:
            return self.weights
        return {name: weight for name, weight in self.weights.items() if name in self.model.trained}

    @property
    def saved_bytes(self) -> int:
        """Bytes of the weights that are written for the whole model."""
        return sum(weight.num_bytes for weight in self.written.values())

    def _together(self, beside: ModelShard[Any] | None) -> set[str]:
        """Use another share's frozen weights if both hold the whole of one base; return their names."""
        own, other = self.model.adapter, None if beside is None else beside.model.adapter
        if beside is None or own is None or other is None or own.base != other.base:
            return set()
        if not (self.parallel.is_whole and beside.parallel.is_whole):
            return set()
        frozen = self.weights.keys() & beside.weights.keys() - self.model.trained - beside.model.trained
        names = {name for name in frozen if self.weights[name] == beside.weights[name]}
        for name in names:
            self.parallel.parameters[name].data = beside.parallel.parameters[name].data
        return names

    def _read(self, known: Set[str]) -> None:
        """Read this rank's slices of the model's weights, except the known slices."""
        rank, met = self.groups.everyone.rank, None
        held = {name: each for name, each in self.parallel.parameters.items() if name not in known}
        try:
            read_slices(self.model.source, held, self.weights, self.layout, rank)
        except ModelError as error:
            met = error
        self.parallel.agree(met)

    def has_base_of(self, model: LoadedModel, sizes: MeshSizes) -> bool:
        """Return whether a model differs only in the adapter's values and is sharded alike, without fsdp."""
        own, other, groups = self.model.adapter, model.adapter, self.groups
        if own is None or other is None or own.base != other.base or self.model.trained != model.trained:
            return False
        if own.config.untargeted != other.config.untargeted:
            return False
        cut = (groups.dp.size, groups.ep.size, groups.pp.size, groups.tp.size)
        return not self.parallel.sharded and cut == (sizes.dp, sizes.ep, sizes.pp, sizes.tp)

    def read_trained(self, model: LoadedModel) -> dict[str, Tensor]:
        """Return this rank's slices of another model's trained weights.

        Raises:
            ModelError: a weight cannot be read.
        """
        held = self.parallel.parameters
        found = {name: torch.empty_like(held[name]) for name in self.written if name in held}
        read_slices(model.source, found, self.weights, self.layout, self.groups.everyone.rank)
        return found

    def load_state(self, trainer: Trainer, folder: Path) -> None:
        """Load a trainer's state that ``Saving`` wrote under any mesh.

        Raises:
            RunDirectoryError: the state is damaged, or another model's.
            TrainingError: the state is another module's.
        """
        listed = listed_weights(folder)
        layout, everyone = self.laid(listed), self.groups.everyone
        tensors = {
            name: torch.empty(local_shape(layout[name], weight.shape, everyone.rank), dtype=weight.dtype)
            for name, weight in listed.items()
            if everyone.rank in layout[name].mesh.ranks
        }
        load_sharded(folder, listed, layout, tensors, everyone)
        trainer.optimizer.load_state(tensors)

    def listed(self, tensors: Mapping[str, Tensor]) -> dict[str, Weight]:
        """Return the logical tensors of a training state that this rank has a part of."""
        if self.parallel.is_whole:
            ranks = self.groups.dp.size
            return {
                name: Weight(
                    name=name,
                    shape=(ranks, *tensor.shape[1:]) if name.startswith(LINK) else tuple(tensor.shape),
                    dtype=tensor.dtype,
                )
                for name, tensor in tensors.items()
            }
        kinds = {name.partition("/")[0]: tensor for name, tensor in tensors.items()}
        counters = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{COUNTER}/")}
        found = {name: Weight(name=name, shape=(), dtype=tensor.dtype) for name, tensor in counters.items()}
        for kind, example in kinds.items():
            for name, weight in self.written.items() if kind != COUNTER else ():
                shape = weight.shape if example.dim() else ()
                found[f"{kind}/{name}"] = Weight(name=f"{kind}/{name}", shape=shape, dtype=example.dtype)
        return found

    def laid(self, listed: Mapping[str, Weight]) -> dict[str, Placement]:
        """Return the placements of a training state: like the weights', with scalars on every rank."""
        everywhere = Placement(Mesh.of(dp=self.groups.everyone.size))
        found = {}
        for name, weight in listed.items():
            laid = self.layout.get(name.partition("/")[2], everywhere)
            if name.startswith(LINK):
                found[name] = Placement(laid.mesh, {"dp": Split(0)})
                continue
            found[name] = laid if weight.shape else Placement(laid.mesh)
        return found


def read_slices(
    source: Source, held: Mapping[str, Tensor], weights: Mapping[str, Weight], layout: Layout, rank: int
) -> None:
    """Read a rank's slices of a model's weights.

    Args:
        source: source of all weights.
        held: the rank's tensors to fill, by name.
        weights: weights of the whole model.
        layout: placement of each weight.
        rank: the rank's number in the layout's meshes.

    Raises:
        ModelError: a weight cannot be read.
    """

    def wanted(name: str) -> Iterator[tuple[Tensor, Index]]:
        if name in held:
            for part, box in pieces(held[name], layout[name], weights[name].shape, rank):
                yield part, tuple(slice(*bounds) for bounds in box.bounds)

    fill(source, wanted)

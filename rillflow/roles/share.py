"""Share: what one rank has of its role's model, and which ranks have the rest.

    a mesh of dp alone      the whole model; the other ranks hold other rows
    pp, tp or fsdp          this rank's part of it (parallel.module), laid as ``layout`` says

A role trains and scores with its share, whatever it is; files hold whole models and logical tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rillflow.cluster.ranks import Alone, Ranks
from rillflow.models.checkpoint import save_model
from rillflow.models.language_model import LoadedModel
from rillflow.parallel.mesh import seat
from rillflow.parallel.module import Parallel
from rillflow.placement.mesh import Mesh
from rillflow.train.state_file import Stateful, load_state, save_state
from rillflow.weights.layout import Layout, Weight, logical_weights, training_layout

Model = TypeVar("Model", bound=LoadedModel)


@dataclass(frozen=True, kw_only=True, eq=False)
class Share(Generic[Model]):
    """One rank's share.

    Example:
        Share.of(load_model(...), mesh=Mesh.of(dp=2, pp=1, tp=2), is_sharded=False, ranks=site.ranks)
    """

    model: Model
    """The module, or what is left of it here; its tokeniser and context."""
    everyone: Ranks
    """All ranks of the role."""
    rows: Ranks
    """Those that hold the other rows of every batch."""
    parallel: Parallel | None
    """How the passes over a part are made; None where the module is whole."""
    weights: Mapping[str, Weight]
    """The tensors of the whole model."""
    layout: Layout
    """Where each of them lies; empty where every rank has all."""

    @staticmethod
    def whole(model: Model, ranks: Ranks | None = None) -> Share[Model]:
        """A whole model, and the ranks that have other rows."""
        rows = ranks or Alone()
        return Share(model=model, everyone=rows, rows=rows, parallel=None, weights={}, layout={})

    @staticmethod
    def of(model: Model, *, mesh: Mesh, is_sharded: bool, ranks: Ranks) -> Share[Model]:
        """This rank's share of a model that every rank has loaded; its module is cut in place.

        Args:
            model: the whole model.
            mesh: of dp, pp and tp.
            is_sharded: whether parameters are cut over dp as well.
            ranks: all ranks of the mesh.

        Raises:
            ModelError: the model cannot be cut so.
        """
        if ranks.size == mesh.axis("dp").size and not is_sharded:
            return Share.whole(model, ranks)
        weights, place = logical_weights(model.module), seat(mesh, ranks)
        parallel = Parallel(model.module, place, shard=is_sharded)
        layout = training_layout(weights, parallel.parts, parallel.stages, mesh, shard=parallel.sharded)
        return Share(
            model=model, everyone=ranks, rows=place.dp, parallel=parallel, weights=weights, layout=layout
        )

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the whole model."""
        return self.parallel is None

    def save_weights(self, folder: Path) -> None:
        """Write the whole model as a Hugging Face directory; every rank calls it, the first one writes."""
        if self.parallel is None:
            if self.rows.rank == 0:
                save_model(self.model, folder)
            return
        raise NotImplementedError

    def save_state(self, trainer: Stateful, path: Path) -> None:
        """Write a trainer's state by logical tensor; every rank calls it."""
        if self.rows.rank == 0:
            save_state(trainer, path)

    def load_state(self, trainer: Stateful, path: Path) -> None:
        """Let a trainer go on from what ``save_state`` wrote, on whatever ranks that was."""
        load_state(trainer, path)

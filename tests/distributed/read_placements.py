"""Convert torch's placements to Rillflow's, for comparison with computed layouts."""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rillflow.errors import PlacementError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Part, Placement, Split


def read_placement(tensor: Tensor, mesh: Mesh) -> Placement:
    """Return the placement of a parameter, as torch reports it.

    Args:
        tensor: a DTensor, whose device mesh names its dims; any other tensor is whole on every rank.
        mesh: its ranks, with axes of those names.

    Raises:
        PlacementError: an axis is missing or has another size, or the placement has no counterpart.
    """
    if not isinstance(tensor, DTensor):
        return Placement(mesh)
    names, sizes = tensor.device_mesh.mesh_dim_names, tuple(tensor.device_mesh.mesh.shape)
    if names is None:
        raise PlacementError(
            "a parameter lies on a device mesh without names", why="its axes are found by their names"
        )
    for name, size in zip(names, sizes, strict=True):
        if mesh.axis(name).size != size:
            raise PlacementError(
                f"a parameter lies on {size} ranks along {name!r}", why=f"the mesh has {mesh.axis(name).size}"
            )
    parts: dict[str, Part] = {}
    order: list[str] = []
    axes = list(zip(names, sizes, tensor.placements, strict=True))
    for place, (name, _, given) in enumerate(axes):
        later = {
            other: size for other, size, one in axes[place + 1 :] if _dim(one) == _dim(given) is not None
        }
        match given:
            case Replicate():
                parts[name] = Broadcast()
            case _StridedShard() if later and given.split_factor == prod(later.values()):
                parts[name] = Split(given.dim)
                order += [other for other in later if other not in order]
            case _StridedShard() if not later:
                parts[name] = Split(given.dim, runs=int(given.split_factor))
            case Shard():
                parts[name] = Split(given.dim)
            case _:
                raise PlacementError(
                    f"a parameter lies as {given} along {name!r}",
                    why="a parameter is whole or cut on every axis, by one axis after the other",
                )
        if isinstance(parts[name], Split) and name not in order:
            order.append(name)
    return Placement(mesh, parts, order=tuple(order))


def _dim(placement: object) -> int | None:
    """Return the dim that a torch placement splits."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None

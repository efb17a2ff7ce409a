"""Offload: tensors that have their device's memory only while they are used.

    bring ─ memory again, bytes from the host ─> used ─ leave ─ bytes to the host, if changed; memory freed

A tensor stays the same object, as does every view of its memory: what is given back is the storage.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rillflow.errors import TrainingError
from rillflow.parallel.tensor import own


class OnHost:
    """Tensors that lie in host memory but while they are used; on a processor the same, in memory of its own.

    Args:
        tensors: on one device, of any size; those that share memory, or are views of more, do so afterwards.
        changes: whether their numbers change while they are used.

    Raises:
        TrainingError: some lie in memory that somebody else gave; all are as they were.

    Example:
        with OnHost(module.parameters()):
            module(tokens)
    """

    def __init__(self, tensors: Iterable[Tensor], *, changes: bool = False) -> None:
        self._changes = changes
        stores = {each.data_ptr(): each for each in (own(tensor).untyped_storage() for tensor in tensors)}
        # torch calls all memory on devices shared
        lent = [s for s in stores.values() if not s.resizable() or (s.device.type == "cpu" and s.is_shared())]
        if lent:
            raise TrainingError(
                f"{len(lent)} of {len(stores)} memories of tensors, the first of {lent[0].nbytes():,} bytes, "
                "cannot be given back while they are not used",
                why="they are not torch's own but a mapped file's, an array's of numpy, or another process's",
                fix="leave policy.offload out, or copy such weights: parameter.data = parameter.data.clone()",
            )
        with torch.no_grad():
            self._near = [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in stores.values()]
            self.far = [host_memory(near, near.device).copy_(near) for near in self._near]
        """The bytes of each memory."""
        self._free()

    @property
    def num_bytes(self) -> int:
        """Of all memories."""
        return sum(far.nbytes for far in self.far)

    def bring(self) -> None:
        """Have the numbers where they are used."""
        for near, far in zip(self._near, self.far, strict=True):
            near.untyped_storage().resize_(far.nbytes)
            near.copy_(far, non_blocking=True)

    def keep(self) -> None:
        """Have the host's bytes as those that are used now have become."""
        for near, far in zip(self._near, self.far, strict=True):
            far.copy_(near)

    def leave(self) -> None:
        """Give the device's memory back."""
        for near, far in zip(self._near, self.far, strict=True):
            if self._changes:
                far.copy_(near, non_blocking=True)
        self._free()

    def __enter__(self) -> None:
        self.bring()

    def __exit__(self, *error: object) -> None:
        self.leave()

    def _free(self) -> None:
        for near in self._near:
            near.untyped_storage().resize_(0)


def host_memory(like: Tensor, device: torch.device) -> Tensor:
    """Host memory for a tensor of this shape and type, pinned where it crosses to a device of CUDA."""
    return torch.empty_like(like, device="cpu", pin_memory=device.type == "cuda")

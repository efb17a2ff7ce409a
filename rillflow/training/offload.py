"""Offload: tensors that occupy device memory only while they are used.

    bring ─ allocate, copy from the host ─> used ─ leave ─ copy to the host, if changed; free

A tensor stays the same object, and so do its views: only the storage is freed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rillflow.errors import TrainingError
from rillflow.sharding.tensor import own


class OnHost:
    """Tensors in host memory except while they are used; on a CPU, in a second buffer.

    Args:
        tensors: on one device, of any size; shared memory and views stay shared.
        changes: whether their values change while they are used.

    Raises:
        TrainingError: some use memory that torch does not own; then nothing is changed.

    Example:
        with OnHost(module.parameters()):
            module(tokens)
    """

    def __init__(self, tensors: Iterable[Tensor], *, changes: bool = False) -> None:
        self._changes = changes
        stores = {each.data_ptr(): each for each in (own(tensor).untyped_storage() for tensor in tensors)}
        # torch reports all device memory as shared
        lent = [s for s in stores.values() if not s.resizable() or (s.device.type == "cpu" and s.is_shared())]
        if lent:
            raise TrainingError(
                f"{len(lent)} of {len(stores)} tensor storages, the first of {lent[0].nbytes():,} bytes, "
                "cannot be freed between uses",
                why="their memory belongs to a mapped file, a numpy array or another process",
                fix="leave policy.offload out, or copy the weights: parameter.data = parameter.data.clone()",
            )
        with torch.no_grad():
            self._near = [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in stores.values()]
            self.far = [host_memory(near, near.device).copy_(near) for near in self._near]
        """The bytes of each storage, in host memory."""
        self._free()

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages together."""
        return sum(far.nbytes for far in self.far)

    def bring(self) -> None:
        """Allocate device memory and copy the values there."""
        for near, far in zip(self._near, self.far, strict=True):
            near.untyped_storage().resize_(far.nbytes)
            near.copy_(far, non_blocking=True)

    def keep(self) -> None:
        """Copy the present device values to the host."""
        for near, far in zip(self._near, self.far, strict=True):
            far.copy_(near)

    def leave(self) -> None:
        """Copy changed values to the host and free the device memory."""
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
    """Return host memory with this shape and dtype, pinned for transfers if the device is CUDA."""
    return torch.empty_like(like, device="cpu", pin_memory=device.type == "cuda")

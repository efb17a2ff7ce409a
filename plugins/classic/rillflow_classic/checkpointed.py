"""Checkpointed objects: learners and buffers whose state a resumed run needs.

plan ─ keep("replay", make) ─> the object: made once, restored if a checkpoint has its state
write ─> NAME.safetensors for each object, and JSON ─> checkpoint ─> read
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors.torch import load_file, save_file
from torch import Tensor

from rillflow.controller.checkpoint import Checkpoint
from rillflow.runs.json_lines import JSON


class Checkpointed(Protocol):
    """An object with a state."""

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, JSON]]:
        """Return everything a resumed run needs: tensors by name, and JSON."""

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, JSON]) -> None:
        """Restore what ``state`` returned."""


State = tuple[Mapping[str, Tensor], Mapping[str, JSON]]
"""What ``state`` returns."""
C = TypeVar("C", bound=Checkpointed)


class CheckpointedObjects:
    """Objects by name, and the states of a checkpoint for objects that are not made yet."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._read: dict[str, State] = {}

    def keep(self, name: str, make: Callable[[], C]) -> C:
        """Return the object of a name; make and restore it at the first call.

        Args:
            name: name in checkpoints; a plain file name.
            make: makes the object.
        """
        if name not in self._objects:
            made = make()
            if name in self._read:
                made.restore(*self._read.pop(name))
            self._objects[name] = made
        found: C = self._objects[name]
        return found

    def states(self, names: Sequence[str] = ()) -> dict[str, State]:
        """Return a copy of the state of some objects by name; of all without names."""
        found = {name: each.state() for name, each in self._objects.items() if not names or name in names}
        return {name: (_copies(tensors), state) for name, (tensors, state) in found.items()}

    def take(self, states: Mapping[str, State]) -> None:
        """Restore objects by name; those that are not made yet are restored as they are made."""
        for name, found in states.items():
            if name in self._objects:
                self._objects[name].restore(*found)
            else:
                self._read[name] = found

    def write(self, folder: Path) -> dict[str, JSON]:
        """Write the tensors of every object into a folder; return the JSON by name."""
        states: dict[str, JSON] = {}
        for name, each in self._objects.items():
            tensors, states[name] = each.state()
            save_file(_copies(tensors), folder / f"{name}.safetensors")
        return states

    def read(self, checkpoint: Checkpoint) -> None:
        """Take the states of a checkpoint; objects of this run are restored as they are made, or now."""
        self.take(
            {
                name: (load_file(checkpoint.path / f"{name}.safetensors"), state)
                for name, state in checkpoint.state["objects"].items()
            }
        )


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the CPU that share no memory, as safetensors needs them."""
    return {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}

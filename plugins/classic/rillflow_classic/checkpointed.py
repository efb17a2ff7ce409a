"""Checkpointed: what makes a resumed run the same: states of learners and buffers.

plan ─ keep("replay", make) ─> the object: made once, restored if a checkpoint has its state
write ─> NAME.safetensors for each object, and JSON ─> checkpoint ─> read
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors.torch import load_file, save_file
from torch import Tensor

from rillflow.controller.checkpoint import Checkpoint
from rillflow.runs.json_lines import JSON

State = Mapping[str, Any]
"""Tensors, JSON and further states by name; no name has a ``/``."""


class Checkpointed(Protocol):
    """An object with a state."""

    def state(self) -> State:
        """Return everything a resumed run needs."""

    def restore(self, state: State) -> None:
        """Restore what ``state`` returned."""


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
        found: C = self._objects[name] if name in self._objects else self.put(name, make())
        return found

    def put(self, name: str, value: C) -> C:
        """Add an object, restored if a checkpoint has its state, and return it."""
        if name in self._read:
            value.restore(self._read.pop(name))
        self._objects[name] = value
        return value

    def states(self, names: Sequence[str] = ()) -> dict[str, State]:
        """Return a copy of the state of some objects by name; of all without names."""
        return {name: joined(*split(self._objects[name].state())) for name in names or self._objects}

    def take(self, states: Mapping[str, State]) -> None:
        """Restore objects by name; those that are not made yet are restored as they are made."""
        for name, found in states.items():
            if name in self._objects:
                self._objects[name].restore(found)
            else:
                self._read[name] = found

    def write(self, folder: Path) -> dict[str, JSON]:
        """Write the tensors of every object into a folder; return the JSON by name."""
        written: dict[str, JSON] = {}
        for name, each in self._objects.items():
            tensors, written[name] = split(each.state())
            save_file(tensors, folder / f"{name}.safetensors")
        return written

    def read(self, checkpoint: Checkpoint) -> None:
        """Take the states of a checkpoint."""
        states: Mapping[str, Any] = checkpoint.state["objects"]
        files = {name: load_file(checkpoint.path / f"{name}.safetensors") for name in states}
        self.take({name: joined(files[name], state) for name, state in states.items()})


def split(state: State, path: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return copies of the tensors of a state by path, such as ``optimizer/step``, and the rest."""
    tensors, rest = dict[str, Tensor](), dict[str, Any]()
    for name, value in state.items():
        if isinstance(value, Tensor):
            # safetensors needs tensors of the CPU that share no memory
            tensors[path + name] = value.detach().cpu().clone().contiguous()
        elif isinstance(value, Mapping):
            inner, rest[name] = split(value, f"{path}{name}/")
            tensors |= inner
        else:
            rest[name] = value
    return tensors, rest


def joined(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> State:
    """Return the state that ``split`` took apart."""
    state: Any = copy.deepcopy(rest)
    for path, tensor in tensors.items():
        *folders, name = path.split("/")
        place = state
        for folder in folders:
            place = place[folder]
        place[name] = tensor
    return state  # type: ignore[no-any-return]

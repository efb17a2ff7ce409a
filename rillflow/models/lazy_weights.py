"""LazyWeights: a model's weights that are read or drawn only when a slice is requested.

    files ─ headers ─> {name: LazyWeights} ─ transformers: names, casts, stacks ─> module on the meta device
    config ─ init under ``Drawing``: every draw made, none kept ─────────────────^     │ taken_out
                                                                                       v
    rank ─ the slices it needs ─ fill ───────────────────────────────────────────> Source
                                 ^── a slice of a file, or a repeated draw ───────────┘

A ``LazyWeights`` tensor is on the meta device and records the operations on it. Elementwise operations
are applied to the requested slice only; any other operation is applied to whole tensors, one weight at a
time.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rillflow.errors import ModelError
from rillflow.models.directory_checks import unusable

ALONE = threading.RLock()
"""Lock of building, drawing or reading a model: torch's generator and default dtype are global, and so are
settings of libraries."""
aten = torch.ops.aten
_FILLS = {aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar}
"""Operations that overwrite a tensor completely."""
Index = tuple[slice, ...]
"""One slice per dim; an empty tuple for the whole tensor."""
Read = Callable[[Index], Tensor]
"""Function that returns a slice of a weight."""
Source = Callable[[], Iterator[tuple[str, Read]]]
"""Function that yields the weights of a model by name, in an order that is efficient to read."""

_ELEMENTWISE = (Tensor.to, Tensor.detach)
"""Elementwise operations, for which a slice can be read alone."""


class LazyWeights(Tensor):
    """A meta tensor that can be read; operations return further lazy tensors."""

    read: Read

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply and record the operation on the meta device."""
        named = dict(kwargs or {})
        if function == Tensor.device.__get__:
            return torch.device("cpu")  # transformers compares values only on non-meta devices
        if function is torch.equal:
            return torch.equal(*map(_whole, args))
        if function is Tensor.to:
            named.pop("device", None)
        found = super().__torch_function__(function, types, args, named)  # type: ignore[no-untyped-call]
        for place, one in enumerate(found if isinstance(found, tuple) else (found,)):
            if isinstance(one, LazyWeights) and "read" not in vars(one):
                one.read = _reader(function, args, named, place if isinstance(found, tuple) else None)
        return found


def unread_weights(source: str) -> dict[str, LazyWeights]:
    """Return the weights of a directory or hub name by their names in files; only headers are read.

    Raises:
        ModelError: a file is missing or incomplete.
    """
    found: dict[str, LazyWeights] = {}
    for path in _files(source):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    found[name] = (
                        file.get_tensor(name).to("meta").as_subclass(LazyWeights)
                    )  # mapped, not read
                    found[name].read = partial(read_slice, path, name)
        except (OSError, SafetensorError) as error:
            raise unusable(source, f"file {Path(path).name}", error) from error
    return found


def taken_out(
    module: nn.Module, dtype: torch.dtype, whole: Callable[[Tensor], Tensor] | None = None
) -> Source:
    """Return the weights of a module; its parameters become empty meta tensors, ties and buffers stay.

    Args:
        module: its weights are unread, real, or made by ``whole``.
        dtype: dtype of the new parameters; buffers, such as rotary frequencies, keep theirs.
        whole: function that makes a weight's values; None if they exist.
    """
    make = whole or _whole

    def reader(weight: Tensor) -> Read:
        return weight.read if isinstance(weight, LazyWeights) else lambda index: make(weight)[index]

    readers = {name: reader(parameter.detach()) for name, parameter in module.named_parameters()}
    for name, buffer in list(module.named_buffers()):
        owner, _, kind = name.rpartition(".")
        setattr(module.get_submodule(owner), kind, make(buffer).clone())
    replace_parameters(module, lambda parameter: torch.empty(parameter.shape, dtype=dtype, device="meta"))
    return lambda: iter(readers.items())


def on_device(module: nn.Module, device: torch.device) -> None:
    """Allocate a module's parameters and move its buffers, on the device."""
    replace_parameters(module, lambda parameter: torch.empty_like(parameter, device=device))
    module.to(device)  # buffers; FSDP also updates its references to parameters here


def replace_parameters(module: nn.Module, make: Callable[[nn.Parameter], Tensor]) -> None:
    """Replace a module's parameters by the tensors of ``make``; tied parameters stay tied."""
    places: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places[id(parameter)].append(name)
    for names in places.values():
        old = module.get_parameter(names[0])
        new = nn.Parameter(make(old), requires_grad=old.requires_grad)
        for name in names:
            owner, _, kind = name.rpartition(".")
            module.get_submodule(owner).register_parameter(kind, new)


@torch.no_grad()
def fill(source: Source, wanted: Callable[[str], Iterable[tuple[Tensor, Index]]]) -> None:
    """Read the requested slices of every weight.

    Args:
        source: the weights.
        wanted: returns, for a weight's name, the tensors to fill and their slices.

    Raises:
        ModelError: a file can no longer be read, or has non-finite numbers.
    """
    with ALONE:
        for name, read in source():
            for target, index in wanted(name):
                try:
                    target.copy_(read(index))
                except (OSError, SafetensorError) as error:
                    raise ModelError(f"the weight {name} cannot be read", why=str(error)) from error
                if target.numel() and not torch.stack(torch.aminmax(target)).isfinite().all():
                    raise not_finite(name)


def not_finite(name: str) -> ModelError:
    """Return the error for a weight with non-finite numbers."""
    return ModelError(
        f"the weight {name} has numbers that are not finite",
        why="a model with such weights can neither sample nor train",
        fix="name another checkpoint",
    )


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that builds a module on the meta device but draws every random number.

    Numbers are drawn, so that the generator advances as in a normal build, and discarded. The operations on
    each tensor are recorded with the generator's state before them, so that its values can be drawn again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._done: dict[int, list[Callable[[Tensor], None]]] = defaultdict(list)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Create or modify a tensor, and record the operation."""
        named = dict(kwargs or {})
        if function is aten.empty.memory_format:
            found = function(*args, **named | {"device": "meta"})
            self._done[_memory(found)] = []
            return found
        first = args[0] if args else None
        if not function._schema.is_mutable or not isinstance(first, Tensor) or not first.is_meta:
            return function(*args, **named)
        state = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            state = torch.get_rng_state()
            function(torch.empty_like(first, device="cpu"), *args[1:], **named)
        place = (first.size(), first.stride(), first.storage_offset())

        def again(whole: Tensor) -> None:
            if state is not None:
                torch.set_rng_state(state)
            function(whole.as_strided(*place), *args[1:], **named)

        if function in _FILLS and first.untyped_storage().nbytes() == first.nbytes:
            self._done[_memory(first)] = []
        self._done[_memory(first)].append(again)
        return first

    def drawn(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values, drawn again; a tensor that has values is returned unchanged."""
        if not tensor.is_meta:
            return tensor
        found = torch.empty_like(tensor, device="cpu")
        with ALONE, torch.random.fork_rng(devices=[]), torch.no_grad():
            for again in self._done[_memory(tensor)]:
                again(found)
        return found


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _reader(function: Any, args: tuple[Any, ...], named: dict[str, Any], place: int | None) -> Read:
    """Return a reader of a function's result on unread tensors."""
    if function in _ELEMENTWISE or (function is Tensor.__getitem__ and args[1] is ...):
        return lambda index: function(args[0].read(index), *args[1:], **named)

    def read(index: Index) -> Tensor:
        made = function(*map(_whole, args), **named)
        found: Tensor = made if place is None else made[place]
        return found[index]

    return read


def _whole(value: Any) -> Any:
    """Return the value with all unread tensors in it read."""
    if isinstance(value, LazyWeights):
        return value.read(())
    return type(value)(map(_whole, value)) if isinstance(value, list | tuple) else value


def read_slice(path: str, name: str, index: Index) -> Tensor:
    """Return a slice of a file's tensor; close the file afterwards, so that its mapped pages can be freed."""
    with safe_open(path, framework="pt") as file:
        found: Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
        return found


def _files(source: str) -> list[str]:
    """Return the files of a model's weights: a single one, or those in its index."""
    one = _file(source, SAFE_WEIGHTS_NAME)
    if one is not None:
        return [one]
    index = _file(source, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        raise ModelError(
            f"the model {source} has no weights",
            why=f"it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}",
        )
    names: list[str] = sorted(set(json.loads(Path(index).read_bytes())["weight_map"].values()))
    paths = {name: _file(source, name) for name in names}
    for name, path in paths.items():
        if path is None:
            raise ModelError(
                f"the model {source} has no file {name}",
                why=f"its index lists {len(names)} weight files, and this is one of them",
                fix="copy the missing file into the directory",
            )
    return [path for path in paths.values() if path is not None]


def _file(source: str, name: str) -> str | None:
    found: str | None = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return found

"""Merge: merge several models' directories into one, tensor by tensor.

    parents, base ─ opened, compared ─> layers ─ method reads a layer ────┐
                                           └──── a piece of every parent ─┴─ combine ─> stream ─> OUT
    concurrently, in a thread: the SHA-256 of the parents' files ────────────────────> OUT/merge.json

Memory: a piece of every model, float64; with a transport also the current weight of every aligned parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial, reduce
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import ConfigError, ModelError, nearest
from rillflow.models.model_files import layer_of
from rillflow_merging import methods
from rillflow_merging.methods import Combine, Method, Span, Spans, normalised
from rillflow_merging.parents import PIECE, Parent, Readable, Stored, open_parents, require_alike
from rillflow_merging.stream import copy_settings, new_directory, require_new, write_merge, write_weights

METHODS = ("linear", "slerp", "ties", "dare", "ot", "greedy")
"""Methods of ``rillflow merge --method``."""
TRIMS = ("tensor", "model")
"""Scope of ties' trimming: the changes of each tensor, or of the whole task vector as in the paper."""
OF_TASK_VECTORS = ("slerp", "ties", "dare")
"""Methods that need the base from which all parents were trained."""


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """Settings of a merge.

    Example:
        MergeSettings(method="ties", density=0.2)
    """

    method: str = "linear"
    """One of ``METHODS``."""
    weights: tuple[float, ...] | None = None
    """One weight per parent, divided by their sum; equal ones if None."""
    density: float = 0.5
    """Share of changes that ties and dare keep."""
    scale: float = 1.0
    """Factor of the merged change in ties and dare."""
    trim: str = "tensor"
    """Scope of the share that ties keeps: one of ``TRIMS``."""
    seed: int = 0
    """Seed of the elements that dare drops."""
    reg: float | None = None
    """Sinkhorn's regularisation in ot, in units of the mean cost; None for exact transport."""

    def checked(self, count: int, *, has_base: bool, least: int = 2) -> MergeSettings:
        """Return valid settings whose weights sum to 1; ``least`` is the smallest number of parents.

        Raises:
            ConfigError: a value is out of range, or parents or base are missing.
        """
        if self.method not in METHODS:
            raise ConfigError(
                f"there is no merge method {self.method!r}",
                why="--method names one of the built-in methods",
                fix=nearest(self.method, METHODS),
            )
        if count < least:
            raise ConfigError(
                f"{count or 'no'} parent{'s' if not count else ''} to merge",
                why="a merge needs two or more models",
                fix="name their directories, or runs, one after the other",
            )
        needs = self.method in OF_TASK_VECTORS
        if needs != has_base and (needs or self.method != "greedy"):
            raise ConfigError(
                f"--method {self.method} {'needs' if needs else 'does not use'} --base",
                why="it merges the changes that each parent made to a common base model"
                if needs
                else "it merges the parents' weights themselves",
                fix="add --base DIR" if needs else "leave --base out, or add it as a parent",
            )
        if not 0 < self.density <= 1:
            raise ConfigError(
                f"--density is {self.density:g}",
                why="it is the share of changes to keep, above 0 and at most 1",
                fix="try 0.5",
            )
        if self.trim not in TRIMS or (self.trim == "model" and self.method != "ties"):
            raise ConfigError(
                f"--trim is {self.trim}, and --method {self.method}",
                why=f"it is {' or '.join(TRIMS)}; model needs --method ties",
                fix=nearest(self.trim, TRIMS) if self.trim not in TRIMS else "add --method ties",
            )
        return MergeSettings(**asdict(self) | {"weights": tuple(normalised(self.weights, count))})


def merge(
    parents: Sequence[Path],
    out: Path,
    settings: MergeSettings,
    base: Path | None = None,
    *,
    texts: Sequence[str] = (),
    said: Mapping[str, Any] | None = None,
    least: int = 2,
) -> Mapping[str, Any]:
    """Write the merged model; return the content of its merge.json.

    Args:
        parents: directories of the parents.
        out: directory to write; it must not exist.
        settings: settings of the merge.
        base: the model from which all parents were trained, for methods of task vectors.
        texts: texts for ot, to align by the models' activations on them; without texts it aligns by weights.
        said: further entries of merge.json.
        least: smallest number of parents.

    Raises:
        ConfigError: the settings are invalid, or ``out`` exists.
        ModelError: the models cannot be merged.
        RunDirectoryError: ``out`` cannot be written.
    """
    settings = settings.checked(len(parents), has_base=base is not None, least=least)
    require_new(out)
    is_aligned = settings.method == "ot"
    opened = open_parents(parents, widths=is_aligned)
    with ExitStack() as stack:
        first = None if base is None else Parent(base)
        if first is not None:
            require_alike(opened[0], first)
        for each in filter(None, (*opened, first)):
            stack.callback(each.close)
        if is_aligned:
            how = {"aligned_by": "activations" if texts else "weights", "aligned_to": len(parents) - 1}
            aligned = _aligned(opened, texts, settings.reg)
            return write_merged(opened, aligned, out, settings, like=-1, said=how | dict(said or {}))
        return write_merged(opened, opened, out, settings, base=first, said=said)


def _aligned(parents: Sequence[Parent], texts: Sequence[str], reg: float | None) -> list[Readable]:
    """Return the parents with units aligned to the last one's; at most one is loaded at a time."""
    from rillflow_merging.activations import activations
    from rillflow_merging.decoder import align_by_activations, align_by_weights, require_alignable

    *others, target = parents
    for each in others:
        require_alignable(each, target)
    if not texts:
        return [*(align_by_weights(each, target, reg) for each in others), target]
    theirs = activations(target.directory, texts)
    found = [
        align_by_activations(each, target, (activations(each.directory, texts), theirs), reg)
        for each in others
    ]
    return [*found, target]


def write_merged(
    parents: Sequence[Parent],
    aligned: Sequence[Readable],
    out: Path,
    settings: MergeSettings,
    *,
    base: Parent | None = None,
    like: int = 0,
    said: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Write the merge of opened parents; return the content of its merge.json.

    Args:
        parents: the models.
        aligned: their weights, or aligned versions of them; shapes are those of ``parents[like]``.
        out: directory to write.
        settings: valid settings from ``checked``.
        base: the model from which all parents were trained.
        like: index of the parent whose config and tokeniser the merged model gets.
        said: further entries of merge.json.

    Raises:
        ModelError: a weight cannot be read, is not finite, or is an integer in which parents differ.
        RunDirectoryError: ``out`` cannot be written.
    """
    kinds = {name: (_type(name, aligned), each.shape) for name, each in aligned[like].weights.items()}
    merged = _Merged(aligned, settings, base, kinds)
    with new_directory(out) as draft, ThreadPoolExecutor(1) as pool:
        digests = [pool.submit(each.digest) for each in (*parents, *([base] if base else []))]
        write_weights(draft, kinds, merged.pieces)
        floats = {dtype for dtype, _ in kinds.values() if dtype.is_floating_point}
        config = dict(parents[like].config)
        if len(floats) == 1:
            config |= {"dtype": str(floats.pop()).removeprefix("torch.")}
        copy_settings(parents[like].directory, config, draft)
        found = [each.result() for each in digests]
        told = {
            **asdict(settings),
            **(said or {}),
            "parents": [
                {"path": str(each.directory), "sha256": one}
                for each, one in zip(parents, found, strict=False)
            ],
            "base": {"path": str(base.directory), "sha256": found[-1]} if base else None,
        }
        write_merge(draft, told)
    return told


class _Merged:
    """The weights of the merged model, computed on demand."""

    def __init__(
        self,
        parents: Sequence[Readable],
        settings: MergeSettings,
        base: Readable | None,
        kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    ) -> None:
        self._parents, self._base, self._kinds = parents, base, kinds
        self._method = _method(settings, partial(self._read, self._floats(kinds)))

    def pieces(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield the numbers of weights in order, with the dtypes of the files."""
        for _, layer in groupby(names, key=layer_of):
            inside = list(layer)
            combine = self._method(partial(self._read, self._floats(inside)))
            for name in inside:
                yield from self._of(name, combine)

    def _floats(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self._kinds[name][0].is_floating_point]

    def _of(self, name: str, combine: Combine) -> Iterator[Tensor]:
        dtype, _ = self._kinds[name]
        if dtype.is_floating_point:
            for piece in self._read([name]):
                yield combine(piece).to(dtype)
            return
        for each in self._spans(name):
            first, *others = (parent.read(name, *each) for parent in self._parents)
            if any(not torch.equal(first, other) for other in others):
                raise ModelError(
                    f"{name} holds integers that differ between parents",
                    why="integers have no average",
                    fix="merge models of one architecture",
                )
            yield first

    def _read(self, names: Sequence[str]) -> Iterator[Span]:
        for name in names:
            for span in self._spans(name):
                yield Span(
                    name=name,
                    first=span[0],
                    parents=[parent.read(name, *span).double() for parent in self._parents],
                    base=None if self._base is None else self._base.read(name, *span).double(),
                )

    def _spans(self, name: str) -> Iterator[tuple[int, int]]:
        size = torch.Size(self._kinds[name][1]).numel()
        return ((first, min(PIECE, size - first)) for first in range(0, size, PIECE))


def _method(settings: MergeSettings, model: Spans) -> Method:
    """Return the merge method of the settings; ``model`` reads every float weight."""
    weights = settings.weights
    assert weights is not None, "the settings were not checked"
    match settings.method:
        case "slerp":
            return methods.slerp(weights)
        case "ties":
            whole = model if settings.trim == "model" else None
            return methods.ties(weights, settings.density, settings.scale, whole)
        case "dare":
            return methods.dare(weights, settings.density, settings.scale, settings.seed)
    return methods.linear(weights)


def _type(name: str, parents: Sequence[Readable]) -> torch.dtype:
    """Return the dtype that can hold a weight of every parent."""
    return reduce(torch.promote_types, (_stored(each, name).dtype for each in parents))


def _stored(parent: Readable, name: str) -> Stored:
    return parent.weights[name]

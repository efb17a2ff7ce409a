"""Stages: a decoder split into pipeline stages that all run the module's own forward pass.

    stage 0    embed   layer 0, 1   ....   ....   ─ hidden [1, U, D] ─>     embedding first
    stage 1    ─ inputs_embeds ─>   ....   2, 3   ....              ─>     "...." returns its input
    stage 2    ─ inputs_embeds ─>   ....   ....   4     norm   head ─>     norm and head last

A dropped layer is replaced by a pass-through, so layers keep their indices and parameters their names; a tied
embedding stays on the last stage too, as the head's weight. The decoder's structure is found by running it,
and the split is tried on the whole module: chained stages must give the whole module's outputs.

Legend: U packed tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.errors import ModelError
from rillflow.models.architecture import relative_difference, trial

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Largest difference between two ways to run a module, over the largest output."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Anatomy:
    """Names of a decoder's parts in the whole module."""

    layers: str
    """Name of the list of layers."""
    count: int
    """Number of layers."""
    embedding: str
    """Name of the input embedding."""
    after: tuple[str, ...]
    """Parts of the body that run after the layers: the final norm."""
    heads: tuple[str, ...]
    """Parts outside the body."""
    tied: bool
    """Whether a head shares the embedding's weight."""
    tuples: bool
    """Whether a layer returns a tuple."""

    def parts_of(self, stage: int, stages: int) -> dict[str, bool]:
        """Return the parts that are divided among stages, and whether this stage runs them."""
        first, last = stage == 0, stage == stages - 1
        own = layers_of(stage, stages, self.count)
        return {
            self.embedding: first or (last and self.tied),
            **{f"{self.layers}.{index}": index in own for index in range(self.count)},
            **dict.fromkeys((*self.after, *self.heads), last),
        }


def layers_of(stage: int, stages: int, count: int) -> range:
    """Return the layers of a stage; sizes differ by at most one, and earlier stages have more.

    Raises:
        ModelError: there are more stages than layers.
    """
    if stages > count:
        raise ModelError(
            f"pp is {stages} and the model has {count} layers",
            why=f"every stage needs a layer; {stages} - {count} = {stages - count} stages would have none",
            fix=f"choose pp among 1 to {count}",
        )
    size, more = divmod(count, stages)
    start = stage * size + min(stage, more)
    return range(start, start + size + (stage < more))


def weight_stages(module: Any, parts: Anatomy, stages: int) -> dict[str, tuple[int, ...]]:
    """Return the stages of every parameter of the whole module, by its first name.

    A tied embedding is on the first and the last stage. Raises as ``layers_of``.
    """
    names = [name for name, _ in module.named_parameters()]
    runs = [parts.parts_of(stage, stages) for stage in range(stages)]
    owners = {name: next(part for part in runs[0] if name.startswith(f"{part}.")) for name in names}
    return {name: tuple(s for s, own in enumerate(runs) if own[part]) for name, part in owners.items()}


def anatomy(module: Any, tried: Any) -> Anatomy:
    """Find a decoder's parts by running a short copy of it.

    Args:
        module: the decoder; it may be on the meta device.
        tried: its ``models.architecture.short_copy``.

    Raises:
        ModelError: it does not consist of embedding, layers, norm and head.
    """
    body: nn.Module = tried.base_model
    count = tried.config.get_text_config().num_hidden_layers
    names = {id(part): name for name, part in tried.named_modules()}
    lists = [part for part in body.children() if isinstance(part, nn.ModuleList) and len(part) == count]
    embedding = tried.get_input_embeddings()
    if len(lists) != 1 or id(embedding) not in names:
        raise _not_cut(module, f"its body has {len(lists)} lists of {count} layers")
    seen, tuples = _order(tried, lists[0])
    last = max(place for place, part in enumerate(seen) if part is lists[0][-1])
    after = [names[id(part)] for part in seen[last + 1 :]]
    heads = [names[id(part)] for part in tried.children() if part is not body]
    head = tried.get_output_embeddings()
    found = Anatomy(
        layers=names[id(lists[0])],
        count=module.config.get_text_config().num_hidden_layers,
        embedding=names[id(embedding)],
        after=tuple(after),
        heads=tuple(heads),
        tied=head is not None and head.weight is embedding.weight,
        tuples=tuples,
    )
    known = tuple(f"{part}." for part in found.parts_of(0, 1))
    odd = [name for name, _ in module.named_parameters() if not name.startswith(known)]
    if odd:
        raise _not_cut(module, f"{odd[0]} belongs to no layer, embedding, final norm or head")
    return found


def check_cut(module: Any, parts: Anatomy, stages: int, expected: Tensor) -> None:
    """Run a module stage by stage and compare its outputs.

    Args:
        module: a whole decoder, or its short copy.
        parts: its anatomy.
        stages: number of stages.
        expected: outputs of the whole module, see ``trial``.

    Raises:
        ModelError: the outputs differ.
    """
    state: Tensor | None = None
    for stage in range(stages):
        with _as_stage(module, parts, stage, stages):
            try:
                given: dict[str, Any] = {} if state is None else {"input_ids": None, "inputs_embeds": state}
                state = trial(module, is_last=stage == stages - 1, **given)
            except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
                raise _not_cut(module, f"stage {stage} failed: {type(error).__name__}: {error}") from error
    assert state is not None  # there is at least one stage
    why = "it handles inputs_embeds differently from its own embeddings"
    require_same(module, state, expected, f"{stages} pipeline stages", why, "leave pp at 1")


def require_same(module: Any, found: Tensor, expected: Tensor, way: str, why: str, fix: str) -> None:
    """Refuse a way to run a module that gives other outputs.

    Raises:
        ModelError: the outputs differ by more than rounding.
    """
    difference = relative_difference(found, expected) if found.shape == expected.shape else 1.0
    if not difference <= _TOLERANCE[expected.dtype]:
        what = f"{type(module).__name__} gives other outputs with {way}"
        raise ModelError(f"{what}, by {difference:.2g} of the largest output", why, fix)


def cut_stage(module: Any, parts: Anatomy, stage: int, stages: int) -> None:
    """Replace, in place, the parts that other stages run."""
    for name, own in parts.parts_of(stage, stages).items():
        if not own:
            part, is_layer = module.get_submodule(name), name.startswith(f"{parts.layers}.")
            module.set_submodule(name, PassThrough(part, parts.tuples) if is_layer else nn.Identity())


class PassThrough(nn.Module):
    """Stand-in for another stage's layer; returns its input.

    Args:
        layer: the layer; its plain attributes are kept for the loop over layers, which reads them.
        as_tuple: whether layers return tuples.
    """

    def __init__(self, layer: nn.Module, as_tuple: bool) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, str | int | float | None):
                vars(self).setdefault(name, value)
        self._as_tuple = as_tuple

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Return the hidden states unchanged."""
        return (hidden_states,) if self._as_tuple else hidden_states


@contextmanager
def _as_stage(module: Any, parts: Anatomy, stage: int, stages: int) -> Iterator[None]:
    """Reduce the module to one of its stages inside the context."""
    kept = {name: module.get_submodule(name) for name in parts.parts_of(stage, stages)}
    try:
        cut_stage(module, parts, stage, stages)
        yield
    finally:
        for name, part in kept.items():
            module.set_submodule(name, part)


def _order(module: Any, layers: nn.ModuleList) -> tuple[list[nn.Module], bool]:
    """Return the layers and other parts of the body in call order, and whether a layer returns a tuple."""
    seen: list[nn.Module] = []
    tuples: list[bool] = []
    others = [part for part in module.base_model.children() if part is not layers]
    with ExitStack() as hooks:
        for part in (*others, *layers):
            hooks.callback(part.register_forward_hook(lambda part, _, __: seen.append(part)).remove)
        last = layers[-1].register_forward_hook(lambda _, __, out: tuples.append(isinstance(out, tuple)))
        hooks.callback(last.remove)
        trial(module)
    if not tuples:
        raise _not_cut(module, "its last layer does not run")
    return seen, tuples[0]


def _not_cut(module: nn.Module, why: str) -> ModelError:
    return ModelError(
        f"{type(module).__name__} cannot be cut into pipeline stages",
        why=why,
        fix="leave pp at 1; dp works with every decoder",
    )

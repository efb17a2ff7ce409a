"""Pipeline: a decoder split into stages that all run the module's own forward pass, and their schedule.

    stage 0    embed   layer 0, 1   ....   ....   ─ hidden [1, U, D] ─>     embedding first
    stage 1    ─ inputs_embeds ─>   ....   2, 3   ....              ─>     "...." returns its input
    stage 2    ─ inputs_embeds ─>   ....   ....   4     norm   head ─>     norm and head last

A dropped layer is replaced by a pass-through, so layers keep their indices and parameters their names; a tied
embedding stays on the last stage too, as the head's weight. The decoder's structure is found by running it,
and the split is tried on the whole module: chained stages must give the whole module's outputs.

Micro-batches run through the stages by torch's 1F1B schedule over its PipelineStage:

    stage 0   F0 F1 F2 B0 F3 B1 ..   only hidden states [1, U, D] and their gradients are sent
    stage 1      F0 F1 B0 F2 B1 ..   every stage knows each micro-batch's tokens and attention by its number
    stage 2         F0 B0 F1 B1 ..   the last one turns outputs into shares of the loss

All sent tensors have one shape: micro-batches are padded to the packed tokens of the longest one. With fewer
micro-batches than stages, all run forward, then all backward; 1F1B would save no memory there.

Legend: U packed tokens of the longest micro-batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from rillflow.errors import ModelError
from rillflow.models.architecture import relative_difference, trial
from rillflow.sharding.codec import CutCodec
from rillflow.sharding.packed_rows import Reading
from rillflow.sharding.pass_times import PassClock
from rillflow.workers.collectives import ProcessRanks

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


NumberedShare = Callable[[int, Any], Tensor]
"""Function that returns a micro-batch's share of the loss from its number and its output."""


def run_pipeline(
    ranks: ProcessRanks,
    module: Any,
    part: nn.Module,
    readings: Sequence[Reading],
    finish: NumberedShare,
    after: Callable[[], None] | None = None,
    *,
    is_descending: bool = False,
    clock: PassClock | None = None,
    codec: CutCodec | None = None,
) -> list[Reading]:
    """Run all micro-batches forward, and backward if ``after`` is given.

    Args:
        ranks: the stages, one per rank.
        module: the decoder, or this stage's part of it.
        part: runs this stage: ``part(state, inputs, wanted, read)``.
        readings: the micro-batches, the same on every stage; may be empty.
        finish: called on the last stage, in the order of micro-batches.
        after: called after every backward pass.
        is_descending: whether the first stage is on the last rank.
        clock: receives the times of the passes.
        codec: compresses what the stages send; None sends hidden states as they are.

    Returns:
        The readings as they were run, padded.
    """
    if not readings:
        return []
    longest = max(reading.size for reading in readings)
    filled = [reading.padded(longest) for reading in readings]
    index = ranks.size - 1 - ranks.rank if is_descending else ranks.rank
    first, last = index == 0, index == ranks.size - 1
    trains = after is not None
    # Only shapes are needed, so meta tensors avoid a pass to infer them.
    width = int(module.config.get_text_config().hidden_size)
    state = torch.empty(1, longest, width, dtype=module.dtype, device="meta", requires_grad=trains)
    crossing = _Crossing(codec=codec, stage=index, width=width)
    stage = _Stage(
        _Step(part, filled, finish if last else None, crossing, is_last=last),
        index,
        ranks.size,
        module.device,
        input_args=_number() if first else crossing.shapes(state, -1),
        output_args=state.new_empty((), requires_grad=trains) if last else crossing.shapes(state, 0),
        group=ranks.group,
    )
    stage.after, stage.clock = after, clock
    if is_descending:
        stage.stage_index_to_group_rank = {each: ranks.size - 1 - each for each in range(ranks.size)}
    count, numbers = len(filled), torch.arange(len(filled))
    few = not trains or count < ranks.size
    kind: type[PipelineScheduleSingle] = ScheduleGPipe if few else Schedule1F1B
    schedule = kind(stage, count, loss_fn=_share if trains else None, scale_grads=False)
    given = (numbers,) if first else ()
    named: dict[str, Any] = {} if first else {"number": numbers}
    schedule.step(*given, target=numbers if last and trains else None, return_outputs=False, **named)
    return filled


def _number() -> Tensor:
    """Return the shape of a micro-batch's number."""
    return torch.empty(1, dtype=torch.int64, device="meta")


@dataclass(frozen=True, kw_only=True)
class _Crossing:
    """The cuts before and after one stage."""

    codec: CutCodec | None
    """See ``run_pipeline``."""
    stage: int
    """Index of the stage."""
    width: int
    """Hidden size."""

    def left(self, state: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return what the stage sends forward for its hidden states."""
        return state if self.codec is None else self.codec.compress(state, self.stage)

    def arrived(self, sent: tuple[Tensor, ...]) -> Tensor:
        """Return the hidden states of what the stage received."""
        return sent[0] if self.codec is None else self.codec.expand(sent, self.width, self.stage - 1)

    def shapes(self, state: Tensor, cut: int) -> Tensor | tuple[Tensor, ...]:
        """Return meta tensors of what crosses the cut before (-1) or after (0) the stage."""
        if self.codec is None:
            return state
        sent = self.codec.compress(state.detach(), self.stage + cut)
        return tuple(each.requires_grad_(state.requires_grad and each.is_floating_point()) for each in sent)


class _Step(nn.Module):
    """Module called by torch's stage, with a micro-batch's number."""

    def __init__(
        self,
        part: nn.Module,
        readings: Sequence[Reading],
        finish: NumberedShare | None,
        crossing: _Crossing,
        *,
        is_last: bool,
    ) -> None:
        super().__init__()
        self._crossing, self._is_last = crossing, is_last
        self.part = part
        self._readings = readings
        self._finish = finish

    def forward(self, *given: Tensor, number: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """Return what the next stage gets, or the loss's share; ``given`` is a number on the first stage."""
        index = int(given[0] if number is None else number)
        reading = self._readings[index]
        state = None if number is None else self._crossing.arrived(given)
        read = None if self._finish is None else partial(self._finish, index)
        output: Tensor = self.part(state, reading.inputs, reading.wanted, read)
        return output if self._is_last else self._crossing.left(output)


class _Stage(PipelineStage):
    """Torch's stage with a callback after every backward pass, and the times of its passes."""

    after: Callable[[], None] | None = None
    clock: PassClock | None = None

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        """See PipelineStage."""
        start = None if self.clock is None else self.clock.stamp()
        found = super().forward_one_chunk(*arguments, **options)
        if self.clock is not None:
            self.clock.add(arguments[0], False, start)
        return found

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        """See PipelineStage."""
        start = None if self.clock is None else self.clock.stamp()
        super().backward_one_chunk(*arguments, **options)
        if self.after is not None and self.has_backward:
            self.after()
        if self.clock is not None:
            self.clock.add(arguments[0], True, start)


def _share(output: Tensor, number: Tensor) -> Tensor:
    del number
    return output

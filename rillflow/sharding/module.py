"""Parallel: a decoder's part on one rank of a mesh, and the passes that all ranks run together.

    whole module, unread ─ tp: weights split ─ pp: layers dropped ─ fsdp: shards ─> part(state, inputs, ...)
                                └ tried on a short copy: outputs must equal the whole module's
    micro-batches ─ lay_out ─> readings ─ part ─> outputs on the last stage ─ finish ─> shares of the loss
                                                  errors are kept until all passes end ─ agree ─> raised

One device is a mesh of one rank, and so is each of several that hold the whole module and different rows. All
ranks of a replica pass the same micro-batches; each replica passes its own. If parameters are sharded over
dp, every replica runs equally many passes: those with fewer micro-batches add empty ones, whose share of the
loss is 0. An error in the middle would leave the other ranks waiting. So a rank with an error continues with
shares of 0, and all ranks raise together after the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rillflow.errors import ModelError, NotFiniteError, RillflowError, TrainingError
from rillflow.formulas.config import MOST_LOGITS
from rillflow.formulas.logprobs import HeadLogits
from rillflow.models.architecture import has_plain_head, head_of, is_padded, short_copy, token_scores, trial
from rillflow.models.lazy_weights import on_device
from rillflow.models.routing import Routers, Routing
from rillflow.models.tensor_plan import Style, require_heads, tensor_plan, weight_parts
from rillflow.placement.sbp import Broadcast, Part
from rillflow.records.batch import Batch
from rillflow.sharding.experts import cut_experts, expert_weights
from rillflow.sharding.mesh import Gradients, RankGroups, require_processes
from rillflow.sharding.packed_rows import Reading, empty_reading, lay_out
from rillflow.sharding.pipeline import (
    anatomy,
    check_cut,
    cut_stage,
    layers_of,
    require_same,
    weight_stages,
)
from rillflow.sharding.pipeline_runner import PipelineRunner
from rillflow.sharding.tensor import cut_tensors, own, share_tokens
from rillflow.workers.collectives import Ranks, SingleRank

Output = Tensor | HeadLogits
"""Output of the last stage: [N, V] logits, or their factors if they are large; a scalar head's [N]."""
LossShare = Callable[[Batch, Output], Tensor]
"""Function on the last stage that returns a micro-batch's share of the loss from its outputs."""
_SEPARATOR = "\0"


def first_said(ranks: Ranks, said: str) -> str:
    """Return, on all ranks, the first non-empty text of a rank; empty if all are."""
    texts = ranks.gather(torch.tensor(list(said.encode()), dtype=torch.uint8))
    return next((bytes(text.tolist()).decode() for text in texts if len(text)), "")


def own_attention_is_whole(name: str) -> tuple[str, str, str]:
    """Return error, reason and fix for splitting a module that uses its own attention."""
    return (
        f"{name} trains with its own attention, but tp, pp, fsdp or ep is above 1",
        "its own attention takes padded rows, and the parts of a model exchange only packed rows",
        "leave tp, pp, fsdp and ep at 1; dp works with every decoder",
    )


class Parallel:
    """One rank's part of a decoder.

    Args:
        module: a decoder with Rillflow's attention, whole and the same on every rank; it is split in place.
            On the meta device, only the remaining part gets memory, and the caller reads its weights.
        groups: the rank's groups.
        sequence: whether tp ranks divide tokens where a layer is replicated (sequence parallelism).
        device: device of the part; by default the module's, unless that is the meta device.
        most_logits: maximum logits held by a pass; more are computed in slices if the head is a plain
            product.

    Raises:
        ModelError: heads, layers or outputs do not divide, the model has no plan for splitting, or it
            gives other outputs once it is split.
        PlacementError: the ranks are threads of one process, and not each of them has the whole module.
    """

    def __init__(
        self,
        module: Any,
        groups: RankGroups,
        *,
        sequence: bool = False,
        device: torch.device | None = None,
        most_logits: int = MOST_LOGITS,
    ) -> None:
        self.module = module.eval()
        """The remaining module; parameters keep their names from the whole module."""
        self.groups = groups
        self.device = device or next(module.parameters()).device
        self.sharded = groups.fsdp.size > 1
        """Whether parameters are sharded over ranks of dp."""
        self.is_whole = groups.is_whole
        """Whether nothing is split, so that this rank runs its passes alone."""
        self.padded = is_padded(module)
        """Whether the module uses its own attention, over padded rows."""
        self._unit = groups.tp.size if sequence else 1
        """The number of packed tokens in a pass is a multiple of this."""
        self._partial: set[str] = set()
        plan = tensor_plan(module) if groups.tp.size > 1 else {}
        self.parts: dict[str, Part] = weight_parts(plan, module)
        """Placement along tp of every parameter of the whole module."""
        self.stages: dict[str, tuple[int, ...]] = {name: (0,) for name, _ in module.named_parameters()}
        """Stages of every parameter of the whole module."""
        self.routers = Routers(module)
        """Routers of the whole module; none for a dense or padded one, whose layers may receive no plans."""
        if self.padded:
            self.routers.all.clear()
        self.experts = frozenset(expert_weights(module) if groups.ep.size > 1 else ())
        """Parameters sharded over ranks of ep."""
        self._error: RillflowError | None = None
        self._agreeing: tuple[Ranks, ...] = (groups.everyone,)
        self.part = _Part(module, groups, most_logits)
        """The module that a pass calls."""
        self.pipeline = PipelineRunner(groups, module, self.part) if groups.pp.size > 1 else None
        """Runner of the passes of a model with several stages."""
        if not self.is_whole:
            if self.padded:
                raise ModelError(*own_attention_is_whole(type(module).__name__))
            require_processes(groups.everyone)
            self._cut(plan)
        if self.sharded:
            _shard(self.part, self._layers, groups.device_mesh(self.device.type, "copies", "fsdp"))
        if any(parameter.is_meta for parameter in module.parameters()):
            on_device(self.part, self.device)
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        """This rank's parameters; DTensors if they are sharded."""
        self.gradients = self._gradients(plan)
        """Sums of their gradients over ranks."""

    @staticmethod
    def whole(module: Any, ranks: Ranks | None = None) -> Parallel:
        """Return the whole module on one rank, or on each of several with different rows."""
        return Parallel(module, RankGroups.whole(ranks or SingleRank()))

    def local_weights(self) -> dict[str, Tensor]:
        """Return this rank's tensor of every parameter, by its name in the whole module, without copies."""
        return {name: own(parameter) for name, parameter in self.parameters.items()}

    def require_head(self) -> None:
        """Check that the last stage has a scalar head.

        Raises:
            ModelError: it has none.
        """
        if self.groups.last:
            head_of(self.module)

    def run(
        self,
        parts: Sequence[Batch],
        back: int,
        finish: LossShare,
        after: Callable[[], None] | None = None,
        routing: Routing | None = None,
    ) -> None:
        """Run every micro-batch forward and, if ``after`` is given, its share of the loss backward.

        Args:
            parts: the micro-batches of this replica, each with a loss token.
            back: number of tokens between an output and its loss token.
            finish: see LossShare; without ``after`` its result is unused.
            after: called after every backward pass.
            routing: observes the choices of a mixture's routers, and balances them.

        Raises:
            RillflowError: an error of ``finish``, if the module is whole; otherwise ``agree`` raises it.
            TrainingError: the module has an attention of its own.
        """
        routing = routing if self.routers.all else None
        watched = nullcontext() if routing is None else self.routers.watched()
        with torch.set_grad_enabled(after is not None), watched:
            self._run(parts, back, finish, after, routing)

    def outputs(self, part: Batch, back: int) -> Output:
        """Return a whole module's outputs for a micro-batch, at the positions that ``run`` reads."""
        reading = lay_out(part, self.device, back=back, padded=self.padded)
        found: Output = self.part(None, reading.inputs, reading.wanted)
        reading.check(self.module)
        return found

    @contextmanager
    def copy_alone(self) -> Iterator[None]:
        """Let the ranks of one copy, pp x tp, run forward passes while the ranks of other copies do not."""
        self._agreeing = (self.groups.pp, self.groups.tp)
        try:
            yield
        finally:
            self._agreeing = (self.groups.everyone,)

    def agree(self, met: RillflowError | None = None) -> None:
        """Raise on every rank an error that any rank met since the last call; see ``copy_alone``.

        Args:
            met: this rank's error outside the passes.

        Raises:
            NotFiniteError: on every rank, if no other kind of error was met.
            RillflowError: this rank's own error.
            TrainingError: another rank's.
        """
        if self.is_whole and met is not None:
            raise met
        if self.is_whole:
            return
        own, self._error = met or self._error, None
        is_hard = own is not None and not isinstance(own, NotFiniteError)
        failed = torch.tensor([float(own is not None), float(is_hard)])
        for ranks in self._agreeing:
            ranks.sum_([failed])
        if not failed[0]:
            return
        said = "" if own is None else _SEPARATOR.join(map(str, own.args))
        for ranks in self._agreeing:
            said = first_said(ranks, said)
        kind = TrainingError if failed[1] else NotFiniteError
        if own is not None and (is_hard or kind is NotFiniteError):
            raise own
        raise kind(*said.split(_SEPARATOR))

    def _run(
        self,
        parts: Sequence[Batch],
        back: int,
        finish: LossShare,
        after: Callable[[], None] | None,
        routing: Routing | None,
    ) -> None:
        def share(index: int, output: Output) -> Tensor:
            if index < len(parts) and self._error is None:
                try:
                    return finish(parts[index], output)
                except RillflowError as error:
                    if self.is_whole:
                        raise
                    self._error = error
            return output.sum() * 0

        if self.pipeline is not None:
            readings = list(self._readings(parts, back, routing))
            for reading in self.pipeline.run(readings, share, after):
                reading.check(self.module)
            return
        for index, reading in enumerate(self._readings(parts, back, routing)):
            found = self.part(None, reading.inputs, reading.wanted, partial(share, index))
            reading.check(self.module)
            if after is not None:
                found.backward()
                after()

    def _readings(self, parts: Sequence[Batch], back: int, routing: Routing | None) -> Iterator[Reading]:
        """Yield the micro-batches as module inputs, and empty passes if other replicas have more of them."""
        passes = len(parts)
        if self.sharded or self.experts:  # communicates with other replicas, so before the first pass
            passes = max(int(count) for count in self.groups.dp.gather(torch.tensor([passes])))
        for index in range(passes):
            found = empty_reading(self.device)
            if index < len(parts):
                found = lay_out(parts[index], self.device, back=back, padded=self.padded)
            more = -found.size % self._unit
            found = found.padded(found.size + more) if more else found
            yield found if routing is None else found.routed(routing)

    def _cut(self, plan: dict[str, Style]) -> None:
        """Reduce the module to this rank's part, after a trial on its short copy."""
        module, groups = self.module, self.groups
        tried: Any = short_copy(module).to(self.device)
        parts = anatomy(module, tried) if self.sharded or groups.pp.size > 1 or self._unit > 1 else None
        expected = trial(tried)
        self.part.is_plain = groups.tp.size == 1 and has_plain_head(tried)
        if groups.tp.size > 1:
            require_heads(module, groups.tp.size)
            mesh = groups.device_mesh(self.device.type, "tp")
            cut_tensors(module, plan, mesh)
            cut_tensors(tried, tensor_plan(tried), mesh)
            _check_cut_ranks(tried, f"tp {groups.tp.size}", expected)
        if groups.ep.size > 1:
            for each in (module, tried):
                cut_experts(each, require_processes(groups.ep))
            _check_cut_ranks(tried, f"ep {groups.ep.size}", expected)
        self._layers: Sequence[Any] = ()
        if parts is not None:
            own = range(parts.count)
            if groups.pp.size > 1:
                self.stages = weight_stages(module, parts, groups.pp.size)
                shown = tried.config.get_text_config().num_hidden_layers
                check_cut(tried, replace(parts, count=shown), min(groups.pp.size, shown), expected)
                cut_stage(module, parts, groups.stage, groups.pp.size)
                own = layers_of(groups.stage, groups.pp.size, parts.count)
            layers: Any = module.get_submodule(parts.layers)
            self._layers = [layers[i] for i in own] if self.sharded else ()
            if self._unit > 1:
                seen = tried.get_submodule(parts.layers)
                share_tokens(seen, _cut_modules(tried, tensor_plan(tried)), groups.tp)
                _check_cut_ranks(tried, f"tp {groups.tp.size} with shared tokens", expected, self._unit)
                partial = share_tokens([layers[i] for i in own], _cut_modules(module, plan), groups.tp)
                self._partial = {name for name, found in module.named_parameters() if id(found) in partial}

    def _gradients(self, plan: dict[str, Style]) -> Gradients:
        groups = self.groups
        summed = {name for name in self.parameters if plan.get(name.rpartition(".")[0]) is Style.SUMMED}
        summed |= self._partial
        whole = {name for name in self.parameters if isinstance(self.parts[name], Broadcast)} - summed
        tied = {name for name in self.parameters if len(self.stages[name]) > 1}
        return Gradients(
            groups=groups,
            experts=self.experts,
            summed=frozenset(summed),
            whole=frozenset(whole if groups.tp.size > 1 else ()),
            tied=frozenset(tied),
        )


class _Part(nn.Module):
    """One pass of the rank's part; the unit for which sharded parameters are gathered."""

    def __init__(self, module: Any, groups: RankGroups, most_logits: int) -> None:
        super().__init__()
        self.module = module
        self._most = most_logits
        self._last = groups.last
        self._padded = is_padded(module)
        self._scalar = module.get_output_embeddings() is None
        self.is_plain: bool | None = None
        """Result of ``has_plain_head``; None before the first call."""

    def forward(
        self,
        state: Tensor | None,
        inputs: dict[str, Any],
        wanted: Tensor,
        read: Callable[[Output], Tensor] | None = None,
    ) -> Any:
        """Return [1, U, D] hidden states for the next stage; on the last one, the output or ``read`` of it.

        Reading happens here because weights sharded over dp are gathered only during this call.
        """
        module: Any = self.module
        if state is not None:
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"}
            inputs["inputs_embeds"] = state
        if not self._last:
            return module.base_model(**inputs).last_hidden_state
        output: Output
        if self._scalar:
            output = token_scores(module.base_model, head_of(module), inputs).index_select(0, wanted)
        elif (self._padded or self._makes_many(len(wanted))) and self._has_plain_head():
            hidden = _chosen(module.base_model(**inputs).last_hidden_state, wanted)
            output = HeadLogits(hidden=hidden, weight=module.get_output_embeddings().weight, most=self._most)
        else:
            with _head_reads(module, wanted):
                output = module(**inputs).logits[0]
        return output if read is None else read(output)

    def _makes_many(self, rows: int) -> bool:
        """Return whether logits of this many rows exceed the limit."""
        return bool(rows * self.module.config.get_text_config().vocab_size > self._most)

    def _has_plain_head(self) -> bool:
        if self.is_plain is None:
            self.is_plain = has_plain_head(self.module)
        return self.is_plain


def _chosen(states: Tensor, wanted: Tensor) -> Tensor:
    """Return [N, D] the wanted of [A, U, D] states; rows that share a prompt repeat its last state.

    The gradient is accumulated in the order of ``wanted``. For ``states[wanted]``, several threads would
    accumulate it in no fixed order, so that equal runs would differ by rounding.
    """
    return states.flatten(0, 1).index_select(0, wanted)


@contextmanager
def _head_reads(module: Any, wanted: Tensor) -> Iterator[None]:
    """Make the module's head compute [1, N, V] logits of the wanted states only, inside the context."""

    def choose(_head: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (_chosen(given[0], wanted)[None], *given[1:])

    hook = module.get_output_embeddings().register_forward_pre_hook(choose, prepend=True)
    try:
        yield
    finally:
        hook.remove()


def _shard(root: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Shard parameters, gradients and optimiser state over ranks of dp, in place (FSDP2).

    A unit is a layer; embedding, norm and head form one more. Gradients are summed, never averaged, because
    the loss is a sum divided by the denominator of all ranks. Each micro-batch gathers and reduces again, so
    that a rank never holds more than its own shard and one unit.
    """
    wide = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # narrow gradients are summed in float32
    for unit in (*layers, root):
        narrow = any(weight.dtype.itemsize < 4 for weight in unit.parameters())
        policy = wide if narrow else MixedPrecisionPolicy()
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)


def _cut_modules(module: nn.Module, plan: dict[str, Style]) -> set[nn.Module]:
    """Return the modules that tp splits, without those of other stages."""
    return {part for name, part in module.named_modules() if plan.get(name, Style.SUMMED) is not Style.SUMMED}


def _check_cut_ranks(module: Any, way: str, expected: Tensor, unit: int = 1) -> None:
    """Refuse a split whose outputs for the trial's tokens, a multiple of ``unit``, differ."""
    why = "its code uses sizes of the whole model"
    fix = f"leave {way.partition(' ')[0]} at 1; dp and fsdp work with every decoder"
    try:
        tokens = expected.shape[1] // unit * unit
        found = trial(module, tokens=tokens)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise ModelError(
            f"{type(module).__name__} cannot be split by {way}: {type(error).__name__}: {error}",
            why=why,
            fix=fix,
        ) from error
    require_same(module, found, expected[:, :tokens], way, why, fix)

"""Parallel: a decoder's part on one rank of a mesh, and the passes that all ranks make together.

    whole module, unread ─ tp: weights cut ─ pp: layers dropped ─ fsdp: shards ─> part(state, inputs, wanted)
                                └ tried on a short copy: the outputs are the whole's, or it is refused

    micro-batches ─ lay_out ─> readings ─ part ─> outputs on the last stage ─ finish ─> shares of the loss
                                                  an error? kept, passes go on ─ agree ─> raised everywhere

One device is a mesh of one rank, and so is each of several that hold the whole module and other rows.
All ranks of a replica give the same micro-batches; replicas give their own. Where parameters are sharded
over dp every replica makes as many passes: those that have fewer micro-batches make empty ones, whose share
of the loss is 0. An error in the middle would leave the other ranks waiting: the rank that met it goes on
with shares of 0, and all give up together when the passes are done.
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

from rillflow.cluster.ranks import Ranks, SingleRank
from rillflow.errors import ModelError, NotFiniteError, RillflowError, TrainingError
from rillflow.formulas.config import MOST_LOGITS
from rillflow.formulas.logprobs import HeadLogits
from rillflow.models.architecture import has_plain_head, is_padded, short_copy, trial
from rillflow.models.routing import Routers
from rillflow.models.scalar_head import head_of, token_scores
from rillflow.models.tensor_plan import Style, require_heads, tensor_plan, weight_parts
from rillflow.models.unread import on_device
from rillflow.parallel.experts import cut_experts, expert_weights
from rillflow.parallel.gradients import Gradients
from rillflow.parallel.mesh import RankGroups, require_processes
from rillflow.parallel.packed import Reading, empty_reading, lay_out
from rillflow.parallel.pipeline import run_pipeline
from rillflow.parallel.routing import Routing
from rillflow.parallel.sequence import share_tokens
from rillflow.parallel.stages import (
    anatomy,
    check_cut,
    cut_stage,
    layers_of,
    require_same,
    weight_stages,
)
from rillflow.parallel.tensor import cut_tensors, own
from rillflow.placement.sbp import Broadcast, Part
from rillflow.records.batch import Batch

Output = Tensor | HeadLogits
"""Of the last stage: [N, V] logits, or what they are made of where they are many; a scalar head's [N]."""
LossShare = Callable[[Batch, Output], Tensor]
"""On the last stage: a micro-batch and its outputs to its share of the loss, a number."""
_SEPARATOR = "\0"


def first_said(ranks: Ranks, said: str) -> str:
    """The first text of a rank that has one, on all ranks."""
    texts = ranks.gather(torch.tensor(list(said.encode()), dtype=torch.uint8))
    return bytes(next(text for text in texts if len(text)).tolist()).decode()


def own_attention_is_whole(name: str) -> tuple[str, str, str]:
    """What is wrong, why and what to do where a module that attends by itself is to be cut."""
    return (
        f"{name} trains with its own attention, and is to be cut over ranks (tp, pp, fsdp or ep above 1)",
        "its rows lie side by side, and only packed rows travel between the parts of a model",
        "leave tp, pp, fsdp and ep at 1; dp works with every decoder",
    )


class Parallel:
    """One rank's part of a decoder.

    Args:
        module: a decoder with Rillflow's attention, whole and the same on every rank; it is cut in place.
            Of one on the meta device only what is left takes memory; its numbers are the caller's to read.
        groups: the rank's groups.
        sequence: whether ranks of tp share out tokens where a layer is whole.
        device: where the parts belong; where the module is, if that is not the meta device.
        most_logits: what a pass holds at once; more are made in slices, where the head is one plain product.

    Raises:
        ModelError: heads, layers or outputs do not divide, the model says not how it may be cut, or says
            something else once it is.
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
        """What is left of it; parameters have the names they have in the whole module."""
        self.groups = groups
        self.device = device or next(module.parameters()).device
        self.sharded = groups.fsdp.size > 1
        """Whether parameters are cut over ranks of dp."""
        self.is_whole = groups.is_whole
        """Whether nothing is cut, so that this rank makes its passes alone."""
        self.padded = is_padded(module)
        """Whether the module attends by itself, over rows side by side."""
        self._unit = groups.tp.size if sequence else 1
        """Packed tokens of a pass are a multiple of it."""
        self._partial: set[str] = set()
        plan = tensor_plan(module) if groups.tp.size > 1 else {}
        self.parts: dict[str, Part] = weight_parts(plan, module)
        """How tp lays every parameter of the whole module."""
        self.stages: dict[str, tuple[int, ...]] = {name: (0,) for name, _ in module.named_parameters()}
        """The stages that every parameter of the whole module lies on."""
        self.routers = Routers(module)
        """Those of the whole module; none of a dense one, or where nothing says that plans reach layers."""
        if self.padded:
            self.routers.all.clear()
        self.experts = frozenset(expert_weights(module) if groups.ep.size > 1 else ())
        """The parameters that ranks of ep share out."""
        self._error: RillflowError | None = None
        self.part = _Part(module, groups, most_logits)
        """What a pass calls."""
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
        """This rank's parameters, DTensors where they are cut."""
        self.gradients = self._gradients(plan)
        """How their gradients are completed."""

    @staticmethod
    def whole(module: Any, ranks: Ranks | None = None) -> Parallel:
        """The whole module on one rank, or on each of several that have other rows."""
        return Parallel(module, RankGroups.whole(ranks or SingleRank()))

    def local_weights(self) -> dict[str, Tensor]:
        """What this rank holds of every parameter, by its name in the whole module; not copies."""
        return {name: own(parameter) for name, parameter in self.parameters.items()}

    def require_head(self) -> None:
        """Show that the last stage has a scalar head.

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
        """Every micro-batch forward, and its share of the loss backward where ``after`` is given.

        Args:
            parts: the micro-batches of this replica, each with a loss token.
            back: how many tokens before a loss token its output stands.
            finish: see LossShare; without ``after`` nobody uses what it returns.
            after: called after every backward pass.
            routing: what sees the choices of a mixture's routers, and evens them out.

        Raises:
            RillflowError: what ``finish`` raised, where the module is whole; else ``agree`` raises it.
            TrainingError: the module has an attention of its own.
        """
        routing = routing if self.routers.all else None
        watched = nullcontext() if routing is None else self.routers.watched()
        with torch.set_grad_enabled(after is not None), watched:
            self._run(parts, back, finish, after, routing)

    def outputs(self, part: Batch, back: int) -> Output:
        """What a whole module puts out for a micro-batch, where ``run`` would read it."""
        reading = lay_out(part, self.device, back=back, padded=self.padded)
        found: Output = self.part(None, reading.inputs, reading.wanted)
        reading.check(self.module)
        return found

    def agree(self, met: RillflowError | None = None) -> None:
        """Raise on every rank what was met on any since the last call.

        Args:
            met: on this rank, outside the passes.

        Raises:
            NotFiniteError: on every rank, where that is all that was met.
            RillflowError: this rank's own error.
            TrainingError: another rank's.
        """
        if self.is_whole and met is not None:
            raise met
        if self.is_whole:
            return
        everyone, own, self._error = self.groups.everyone, met or self._error, None
        is_hard = own is not None and not isinstance(own, NotFiniteError)
        failed = torch.tensor([float(own is not None), float(is_hard)])
        everyone.sum_([failed])
        if not failed[0]:
            return
        said = first_said(everyone, "" if own is None else _SEPARATOR.join(map(str, own.args)))
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

        if self.groups.pp.size > 1:
            ranks, readings = require_processes(self.groups.pp), list(self._readings(parts, back, routing))
            for reading in run_pipeline(ranks, self.module, self.part, readings, share, after):
                reading.check(self.module)
            return
        for index, reading in enumerate(self._readings(parts, back, routing)):
            found = self.part(None, reading.inputs, reading.wanted, partial(share, index))
            reading.check(self.module)
            if after is not None:
                found.backward()
                after()

    def _readings(self, parts: Sequence[Batch], back: int, routing: Routing | None) -> Iterator[Reading]:
        """The micro-batches as the module reads them, and empty passes that only other replicas need."""
        passes = len(parts)
        if self.sharded or self.experts:  # a word with the other replicas, so before the first pass
            passes = max(int(count) for count in self.groups.dp.gather(torch.tensor([passes])))
        for index in range(passes):
            found = empty_reading(self.device)
            if index < len(parts):
                found = lay_out(parts[index], self.device, back=back, padded=self.padded)
            more = -found.size % self._unit
            found = found.padded(found.size + more) if more else found
            yield found if routing is None else found.routed(routing)

    def _cut(self, plan: dict[str, Style]) -> None:
        """Leave in the module what this rank runs, after a trial of its short copy."""
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
    """One pass of what a rank has: the unit that sharded parameters are gathered for."""

    def __init__(self, module: Any, groups: RankGroups, most_logits: int) -> None:
        super().__init__()
        self.module = module
        self._most = most_logits
        self._last = groups.last
        self._padded = is_padded(module)
        self._scalar = module.get_output_embeddings() is None
        self.is_plain: bool | None = None
        """See ``has_plain_head``; None where nobody has asked yet."""

    def forward(
        self,
        state: Tensor | None,
        inputs: dict[str, Any],
        wanted: Tensor,
        read: Callable[[Output], Tensor] | None = None,
    ) -> Any:
        """[1, U, D] hidden states for the next stage; on the last one its output, or what is read of that.

        Reading comes first here because weights that are cut over dp are whole for the length of this call.
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
        """Whether logits of so many tokens are too many to be held."""
        return bool(rows * self.module.config.get_text_config().vocab_size > self._most)

    def _has_plain_head(self) -> bool:
        if self.is_plain is None:
            self.is_plain = has_plain_head(self.module)
        return self.is_plain


def _chosen(states: Tensor, wanted: Tensor) -> Tensor:
    """[N, D] the wanted of [A, U, D] states; rows that share a prompt want its last one several times.

    The gradient is added up in the order of ``wanted``; that of ``states[wanted]`` by several threads
    in no order, so that equal runs would differ by rounding.
    """
    return states.flatten(0, 1).index_select(0, wanted)


@contextmanager
def _head_reads(module: Any, wanted: Tensor) -> Iterator[None]:
    """Within it the module's head makes [1, N, V] logits of the wanted states alone."""

    def choose(_head: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (_chosen(given[0], wanted)[None], *given[1:])

    hook = module.get_output_embeddings().register_forward_pre_hook(choose, prepend=True)
    try:
        yield
    finally:
        hook.remove()


def _shard(root: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Cut parameters, gradients and optimiser state over ranks of dp, in place (FSDP2).

    A unit is a layer; embedding, norm and head are one more. Gradients are summed, never averaged: a loss
    travels as a sum over the denominator of all ranks. Each micro-batch gathers and sums anew, so that a rank
    never holds more than its own share and one unit.
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
    """The modules that tp cuts, but for those that other stages have."""
    return {part for name, part in module.named_modules() if plan.get(name, Style.SUMMED) is not Style.SUMMED}


def _check_cut_ranks(module: Any, way: str, expected: Tensor, unit: int = 1) -> None:
    """Refuse a cut whose ranks say something else of the trial's tokens, of a multiple of ``unit``."""
    why = "its code reads sizes that are the whole model's"
    fix = f"leave {way.partition(' ')[0]} at 1; dp and fsdp work with every decoder"
    try:
        tokens = expected.shape[1] // unit * unit
        found = trial(module, tokens=tokens)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise ModelError(
            f"{type(module).__name__} cannot be cut over {way}: {type(error).__name__}: {error}",
            why=why,
            fix=fix,
        ) from error
    require_same(module, found, expected[:, :tokens], way, why, fix)

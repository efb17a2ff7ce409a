"""Parallel: a decoder's part on one rank of a mesh, and the passes that all ranks make together.

    whole module, unread ─ tp: weights cut ─ pp: layers dropped ─ dp: shards ─> part(state, inputs, wanted)
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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rillflow.cluster.ranks import Ranks, SingleRank
from rillflow.errors import ModelError, NotFiniteError, RillflowError, TrainingError
from rillflow.models.architecture import short_copy, trial
from rillflow.models.scalar_head import head_of, token_scores
from rillflow.models.tensor_plan import Style, require_heads, tensor_plan, weight_parts
from rillflow.models.unread import on_device
from rillflow.parallel.gradients import Gradients
from rillflow.parallel.mesh import RankGroups, require_processes
from rillflow.parallel.packed import Reading, empty_reading, lay_out
from rillflow.parallel.pipeline import run_pipeline
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

LossShare = Callable[[Batch, Tensor], Tensor]
"""On the last stage: a micro-batch and its outputs [N, ...] to its share of the loss, a number."""
_SEPARATOR = "\0"


def first_said(ranks: Ranks, said: str) -> str:
    """The first text of a rank that has one, on all ranks."""
    texts = ranks.gather(torch.tensor(list(said.encode()), dtype=torch.uint8))
    return bytes(next(text for text in texts if len(text)).tolist()).decode()


class Parallel:
    """One rank's part of a decoder.

    Args:
        module: a decoder with Rillflow's attention, whole and the same on every rank; it is cut in place.
            Of one on the meta device only what is left takes memory; its numbers are the caller's to read.
        groups: the rank's groups.
        shard: whether parameters are cut over dp as well.
        device: where the parts belong; where the module is, if that is not the meta device.

    Raises:
        ModelError: heads, layers or outputs do not divide, the model says not how it may be cut, or says
            something else once it is.
        PlacementError: the ranks are threads of one process, and not each of them has the whole module.
    """

    def __init__(
        self, module: Any, groups: RankGroups, *, shard: bool = False, device: torch.device | None = None
    ) -> None:
        self.module = module.eval()
        """What is left of it; parameters have the names they have in the whole module."""
        self.groups = groups
        self.device = device or next(module.parameters()).device
        self.sharded = shard and groups.dp.size > 1
        """Whether parameters are cut over dp."""
        self.is_whole = groups.pp.size == groups.tp.size == 1 and not self.sharded
        """Whether nothing is cut, so that this rank makes its passes alone."""
        plan = tensor_plan(module) if groups.tp.size > 1 else {}
        self.parts: dict[str, Part] = weight_parts(plan, module)
        """How tp lays every parameter of the whole module."""
        self.stages: dict[str, tuple[int, ...]] = {name: (0,) for name, _ in module.named_parameters()}
        """The stages that every parameter of the whole module lies on."""
        self._error: RillflowError | None = None
        if not self.is_whole:
            require_processes(groups.everyone)
            self._cut(plan)
        self._part = _Part(module, groups)
        if self.sharded:
            _shard(self._part, self._layers, groups.device_mesh(self.device.type, "dp"))
        if any(parameter.is_meta for parameter in module.parameters()):
            on_device(self._part, self.device)
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
        self, parts: Sequence[Batch], back: int, finish: LossShare, after: Callable[[], None] | None = None
    ) -> None:
        """Every micro-batch forward, and its share of the loss backward where ``after`` is given.

        Args:
            parts: the micro-batches of this replica, each with a loss token.
            back: how many tokens before a loss token its output stands.
            finish: see LossShare; without ``after`` nobody uses what it returns.
            after: called after every backward pass.

        Raises:
            RillflowError: what ``finish`` raised, where the module is whole; else ``agree`` raises it.
            TrainingError: the module has an attention of its own.
        """
        with torch.set_grad_enabled(after is not None):
            self._run(parts, back, finish, after)

    def outputs(self, part: Batch, back: int) -> Tensor:
        """[N, ...] what a whole module puts out for a micro-batch, where ``run`` would read it."""
        return self._pass(lay_out(part, self.device, back=back))[0]

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
        self, parts: Sequence[Batch], back: int, finish: LossShare, after: Callable[[], None] | None
    ) -> None:
        def share(index: int, output: Tensor) -> Tensor:
            if index < len(parts) and self._error is None:
                try:
                    return finish(parts[index], output[0])
                except RillflowError as error:
                    if self.is_whole:
                        raise
                    self._error = error
            return output.sum() * 0

        if self.groups.pp.size > 1:
            ranks, readings = require_processes(self.groups.pp), list(self._readings(parts, back))
            for reading in run_pipeline(ranks, self.module, self._part, readings, share, after):
                reading.check(self.module)
            return
        for index, reading in enumerate(self._readings(parts, back)):
            found = share(index, self._pass(reading))
            if after is not None:
                found.backward()  # type: ignore[no-untyped-call]
                after()

    def _readings(self, parts: Sequence[Batch], back: int) -> Iterator[Reading]:
        """The micro-batches as the module reads them, and empty passes that only other replicas need."""
        passes = len(parts)
        if self.sharded:  # a word with the other replicas, so before the first pass
            passes = max(int(count) for count in self.groups.dp.gather(torch.tensor([passes])))
        yield from (lay_out(part, self.device, back=back) for part in parts)
        yield from (empty_reading(self.device) for _ in range(passes - len(parts)))

    def _pass(self, reading: Reading) -> Tensor:
        output: Tensor = self._part(None, reading.inputs, reading.wanted)
        reading.check(self.module)
        return output

    def _cut(self, plan: dict[str, Style]) -> None:
        """Leave in the module what this rank runs, after a trial of its short copy."""
        module, groups = self.module, self.groups
        tried: Any = short_copy(module).to(self.device)
        parts = anatomy(module, tried) if self.sharded or groups.pp.size > 1 else None
        expected = trial(tried)
        if groups.tp.size > 1:
            require_heads(module, groups.tp.size)
            mesh = groups.device_mesh(self.device.type, "tp")
            cut_tensors(module, plan, mesh)
            cut_tensors(tried, tensor_plan(tried), mesh)
            _check_tensors(tried, groups.tp.size, expected)
        self._layers: Sequence[Any] = ()
        if parts is not None:
            own = range(parts.count)
            if groups.pp.size > 1:
                self.stages = weight_stages(module, parts, groups.pp.size)
                shown = tried.config.get_text_config().num_hidden_layers
                check_cut(tried, replace(parts, count=shown), min(groups.pp.size, shown), expected)
                cut_stage(module, parts, groups.stage, groups.pp.size)
                own = layers_of(groups.stage, groups.pp.size, parts.count)
            layers = module.get_submodule(parts.layers)
            self._layers = [layers[i] for i in own] if self.sharded else ()

    def _gradients(self, plan: dict[str, Style]) -> Gradients:
        groups = self.groups
        cuts = groups.tp.size > 1
        summed = {name for name in self.parameters if plan.get(name.rpartition(".")[0]) is Style.SUMMED}
        whole = {name for name in self.parameters if isinstance(self.parts[name], Broadcast)} - summed
        tied = {name for name in self.parameters if len(self.stages[name]) > 1}
        return Gradients(
            groups=groups,
            sharded=self.sharded,
            summed=frozenset(summed),
            whole=frozenset(whole if cuts else ()),
            tied=frozenset(tied),
        )


class _Part(nn.Module):
    """One pass of what a rank has: the unit that sharded parameters are gathered for."""

    def __init__(self, module: Any, groups: RankGroups) -> None:
        super().__init__()
        self.module = module
        self._last = groups.last
        self._scalar = module.get_output_embeddings() is None

    def forward(self, state: Tensor | None, inputs: dict[str, Any], wanted: Tensor) -> Tensor:
        """[1, U, D] hidden states for the next stage; on the last one [1, N, V] logits or [1, N] numbers."""
        module: Any = self.module
        if state is not None:
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"}
            inputs["inputs_embeds"] = state
        if not self._last:
            hidden: Tensor = module.base_model(**inputs).last_hidden_state
            return hidden
        if self._scalar:
            return token_scores(module.base_model, head_of(module), inputs)[wanted[None]]
        logits: Tensor = module(**inputs, logits_to_keep=wanted).logits
        return logits


def _shard(root: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Cut parameters, gradients and optimiser state over the ranks of dp, in place (FSDP2).

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


def _check_tensors(module: Any, tp: int, expected: Tensor) -> None:
    why = "its code reads sizes that are the whole model's"
    fix = "leave tp at 1; dp and pp work with every decoder"
    try:
        found = trial(module)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{type(module).__name__} cannot be cut over tp {tp}: {type(error).__name__}: {error}",
            why=why,
            fix=fix,
        ) from error
    require_same(module, found, expected, f"tp {tp}", why, fix)

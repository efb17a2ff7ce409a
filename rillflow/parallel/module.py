"""Parallel: a decoder's part on one rank of a mesh, and the passes that all ranks make together.

    whole module ─ tp: weights cut ─ pp: layers dropped ─ dp: shards ─> part(state, inputs, wanted)
                        └ tried: the outputs are the whole module's, or it is refused

    score(readings, finish)           forward alone
    train(readings, finish, after)    forward and backward; finish gives shares of the loss

``finish`` runs on the last stage. All ranks of a replica give the same readings; replicas give their own.
Where parameters are sharded over dp every replica makes as many passes: those that have fewer readings
make empty ones, whose share of the loss is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.errors import ModelError
from rillflow.models.scalar_head import head_of, token_scores
from rillflow.models.tensor_plan import Style, require_heads, tensor_plan, weight_parts
from rillflow.parallel.gradients import Gradients
from rillflow.parallel.mesh import Seat, require_processes
from rillflow.parallel.pipeline import Finish, Line, Reading, run_pipeline
from rillflow.parallel.shards import shard as shard_over
from rillflow.parallel.stages import (
    Decoder,
    anatomy,
    check_cut,
    cut_stage,
    layers_of,
    require_same,
    trial,
    weight_stages,
)
from rillflow.parallel.tensor import cut_tensors, local
from rillflow.placement.sbp import Broadcast, Part


class Parallel:
    """One rank's part of a decoder.

    Args:
        module: a decoder with Rillflow's attention, whole and the same on every rank; it is cut in place.
        seat: the rank's place.
        shard: whether parameters are cut over dp as well.

    Raises:
        ModelError: heads, layers or outputs do not divide, the model says not how it may be cut, or says
            something else once it is.
        PlacementError: the ranks are threads of one process.
    """

    def __init__(self, module: Decoder, seat: Seat, *, shard: bool = False) -> None:
        self.module = module.eval()
        """What is left of it; parameters have the names they have in the whole module."""
        self.seat = seat
        self.device = next(module.parameters()).device
        self.sharded = shard and seat.dp.size > 1
        """Whether parameters are cut over dp."""
        require_processes(seat.everyone)
        plan = tensor_plan(module) if seat.tp.size > 1 else {}
        self.parts: dict[str, Part] = weight_parts(plan, module)
        """How tp lays every parameter of the whole module."""
        self.stages = weight_stages(module, seat.pp.size)
        """The stages that every parameter of the whole module lies on."""
        self._cut(plan)
        self._part = _Part(module, seat)
        if self.sharded:
            shard_over(self._part, self._layers, seat.device_mesh(self.device.type, "dp"))
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        """This rank's parameters, DTensors where they are cut."""
        self.gradients = self._gradients(plan)
        """How their gradients are completed."""

    @staticmethod
    def of(module: Decoder, seat: Seat, *, shard: bool = False) -> Parallel | None:
        """The rank's part, or None where every rank has the whole module and there is nothing to cut."""
        whole = seat.pp.size == seat.tp.size == 1 and not (shard and seat.dp.size > 1)
        return None if whole else Parallel(module, seat, shard=shard)

    def local_weights(self) -> dict[str, Tensor]:
        """What this rank holds of every parameter, by its name in the whole module; not copies."""
        return {name: local(parameter.detach()) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def score(self, readings: Sequence[Reading], finish: Finish, empty: Callable[[], Reading]) -> None:
        """Every reading forward.

        Args:
            readings: the micro-batches of this replica.
            finish: see Finish; what it returns is not used.
            empty: a reading of no row, for passes that only other replicas need.
        """
        self._run(readings, finish, empty, None)

    def train(
        self,
        readings: Sequence[Reading],
        finish: Finish,
        empty: Callable[[], Reading],
        after: Callable[[], None],
    ) -> None:
        """Every reading forward, and its share of the loss backward.

        Args:
            readings: the micro-batches of this replica.
            finish: see Finish.
            empty: a reading of no row, for passes that only other replicas need.
            after: called after every backward pass.
        """
        self._run(readings, finish, empty, after)

    def _run(
        self,
        readings: Sequence[Reading],
        finish: Finish,
        empty: Callable[[], Reading],
        after: Callable[[], None] | None,
    ) -> None:
        own = len(readings)
        filled: list[Reading] = [*readings, *(empty() for _ in range(self._passes(own) - own))]

        def share(index: int, output: Tensor) -> Tensor:
            return finish(index, output[0]) if index < own else output.sum() * 0

        if not filled:
            return
        if self.seat.pp.size > 1:
            filled = run_pipeline(self._line(), self._part, filled, share, after)
        else:
            for index, reading in enumerate(filled):
                found = share(index, self._part(None, reading.inputs, reading.wanted))
                if after is not None:
                    found.backward()  # type: ignore[no-untyped-call]
                    after()
        for reading in filled:
            reading.check(self.module)

    def _passes(self, own: int) -> int:
        """How many passes all replicas make."""
        if not self.sharded:
            return own
        return max(int(count) for count in self.seat.dp.gather(torch.tensor([own])))

    def _line(self) -> Line:
        return Line(
            ranks=require_processes(self.seat.pp),
            device=self.device,
            width=int(self.module.config.get_text_config().hidden_size),
            dtype=self.module.dtype,
        )

    def _cut(self, plan: dict[str, Style]) -> None:
        """Leave in the module what this rank runs, after a trial."""
        module, seat = self.module, self.seat
        expected = trial(module)
        if seat.tp.size > 1:
            require_heads(module, seat.tp.size)
            cut_tensors(module, plan, seat.device_mesh(self.device.type, "tp"))
            _check_tensors(module, seat.tp.size, expected)
        self._layers: Sequence[Any] = ()
        if seat.pp.size > 1:
            parts = anatomy(module)
            check_cut(module, parts, seat.pp.size, expected)
            cut_stage(module, parts, seat.stage, seat.pp.size)
            layers = module.get_submodule(parts.layers)
            self._layers = [layers[i] for i in layers_of(seat.stage, seat.pp.size, parts.count)]
        elif self.sharded:
            self._layers = list(module.get_submodule(anatomy(module).layers))

    def _gradients(self, plan: dict[str, Style]) -> Gradients:
        seat = self.seat
        cuts = seat.tp.size > 1
        summed = {name for name in self.parameters if plan.get(name.rpartition(".")[0]) is Style.SUMMED}
        whole = {name for name in self.parameters if isinstance(self.parts[name], Broadcast)} - summed
        tied = {name for name in self.parameters if len(self.stages[name]) > 1}
        return Gradients(
            seat=seat,
            sharded=self.sharded,
            summed=frozenset(summed),
            whole=frozenset(whole if cuts else ()),
            tied=frozenset(tied),
        )


class _Part(nn.Module):
    """One pass of what a rank has: the unit that sharded parameters are gathered for."""

    def __init__(self, module: Decoder, seat: Seat) -> None:
        super().__init__()
        self.module = module
        self._last = seat.last
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
            return token_scores(module.base_model, head_of(module), inputs)[None][:, wanted]
        logits: Tensor = module(**inputs, logits_to_keep=wanted).logits
        return logits


def _check_tensors(module: Decoder, tp: int, expected: Tensor) -> None:
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

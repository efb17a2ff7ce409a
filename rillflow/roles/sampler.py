"""Sampler: the module the policy generates with, and how the trained weights get into it.

Own        the trainer's own module: nothing crosses, nothing is held twice
Switched   a module of generation's mesh; weights cross when the role turns from training to
           generation, and room is given back when it turns again (weights.switch)
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

from rillflow.cluster.ranks import Alone, Ranks
from rillflow.models.language_model import LanguageModel
from rillflow.models.sampling_shard import assign, sampling_module
from rillflow.models.tensor_plan import tensor_plan
from rillflow.placement.mesh import Mesh
from rillflow.roles.share import Share
from rillflow.weights.layout import generation_layout
from rillflow.weights.plan import reshard_plan
from rillflow.weights.switch import Ledger, Switch


class Sampler(Protocol):
    """What a policy generates with."""

    module: nn.Module
    """What the rollout engine runs."""
    tp: Ranks
    """The ranks that share one copy of it."""

    def turn_to_generation(self) -> None:
        """Let the module have the trained weights; every rank of the role calls it."""

    def turn_to_training(self) -> None:
        """Let the trainer have its weights."""

    @property
    def ledger(self) -> Ledger:
        """Bytes of parameters on this rank, by phase, at the last turn."""
        ...


class Own:
    """The trainer's own module.

    Args:
        module: the whole module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tp: Ranks = Alone()

    def turn_to_generation(self) -> None:
        """See Sampler."""

    def turn_to_training(self) -> None:
        """See Sampler."""

    @property
    def ledger(self) -> Ledger:
        """See Sampler."""
        held = sum(weight.nbytes for weight in self.module.parameters())
        return Ledger(before=held, peak=held, generating=held, after=held)


class Switched:
    """A module of its own, whose weights come over the wire.

    Args:
        module: what ``sampling_module`` made of the whole model, before that was cut.
        tp: the ranks that share it.
        switch: between this rank's share and the module's tensors.
    """

    def __init__(self, module: nn.Module, tp: Ranks, switch: Switch) -> None:
        self.module, self.tp, self._switch = module, tp, switch

    def turn_to_generation(self) -> None:
        """See Sampler."""
        if not self._switch.is_generating:
            self._switch.to_generation()

    def turn_to_training(self) -> None:
        """See Sampler."""
        if self._switch.is_generating:
            self._switch.to_training()

    @property
    def ledger(self) -> Ledger:
        """See Sampler."""
        return self._switch.ledger


def lay_out(
    model: LanguageModel, *, mesh: Mesh, is_sharded: bool, generate: Mesh, ranks: Ranks
) -> tuple[Share[LanguageModel], Sampler]:
    """A policy's share of its model, and what it generates with.

    Args:
        model: the whole model, on every rank; its module is cut in place.
        mesh: dp, pp and tp of training.
        is_sharded: whether parameters are cut over dp as well.
        generate: the ranks in generation; see ``weights.layout.generation_mesh``.
        ranks: all of them.
    """
    if ranks.size == mesh.axis("dp").size and not is_sharded:
        share = Share.whole(model, ranks)
        return share, Own(model.module)
    plan = tensor_plan(model.module) if mesh.axis("tp").size > 1 else {}
    tp = ranks.part(generate.groups("tp"))
    module = sampling_module(model.module, plan, tp)
    share = Share.of(model, mesh=mesh, is_sharded=is_sharded, ranks=ranks)
    assert share.parallel is not None  # what every rank has whole was laid out above
    wanted = generation_layout(share.weights, share.parallel.parts, generate)
    crossing = reshard_plan(share.weights, share.layout, wanted)
    switch = Switch(crossing, ranks, share.parallel.parameters)
    assign(module, switch.generation)
    return share, Switched(module, tp, switch)

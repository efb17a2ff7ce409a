"""Sampler: the module the policy generates with, and how the trained weights get into it.

Own        the trainer's own module: nothing crosses, nothing is held twice
Switched   a module of generation's mesh; weights cross when the role turns from training to
           generation, and room is given back when it turns again (weights.switch)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from rillflow.cluster.ranks import Alone, Ranks
from rillflow.errors import WeightError
from rillflow.models.language_model import LanguageModel
from rillflow.models.sampling_shard import assign, sampling_module
from rillflow.models.tensor_plan import tensor_plan
from rillflow.placement.mesh import Mesh
from rillflow.roles.share import Share
from rillflow.weights.digest import Digests, digests, verify
from rillflow.weights.layout import generation_layout
from rillflow.weights.plan import reshard_plan
from rillflow.weights.switch import Ledger, Switch


class Sampler(Protocol):
    """What a policy generates with."""

    module: nn.Module
    """What the rollout engine runs."""
    tp: Ranks
    """The ranks that share one copy of it."""

    def publish(self, version: int) -> None:
        """Say what the trained weights are known by from now on; every rank of the role calls it."""

    def turn_to_generation(self) -> None:
        """Let the module have the published weights; every rank of the role calls it.

        Raises:
            WeightError: it has others; they are named, and nothing is generated with them.
        """

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

    def publish(self, version: int) -> None:
        """See Sampler; there is one copy, so there is nothing to compare."""

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
        share: what the rank trains.
        switch: between the share and the module's tensors.
        tp: the ranks that share a copy of the module.
        members: which of all ranks these are.
    """

    def __init__(
        self,
        module: nn.Module,
        share: Share[LanguageModel],
        switch: Switch,
        tp: Ranks,
        members: Sequence[int],
    ) -> None:
        self.module, self.tp = module, tp
        self._share, self._switch, self._members = share, switch, members
        self._published: Digests | None = None

    def publish(self, version: int) -> None:
        """See Sampler."""
        assert self._share.parallel is not None
        self.turn_to_training()
        plan, held = self._switch.plan, self._share.parallel.parameters
        found = digests(plan.weights, plan.source, held, self._share.everyone)
        self._published = Digests(version=version, of=found)

    def turn_to_generation(self) -> None:
        """See Sampler."""
        if self._switch.is_generating:
            return
        if self._published is None:
            self.publish(0)
        assert self._published is not None
        received, plan = self._switch.to_generation(), self._switch.plan
        found = digests(plan.weights, plan.destination, received, self.tp, members=self._members)
        try:
            verify(self._published, Digests(version=self._published.version, of=found))
        except WeightError:
            self._switch.to_training()  # or the next call would find it generating, and not look again
            raise

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
    members = next(group for group in generate.groups("tp") if ranks.rank in group)
    return share, Switched(module, share, switch, tp, members)

"""Publishing: how the weights that were trained come to be those that are sampled.

    trainer and sampler on the same ranks
        SharedWeights       one module: nothing crosses, nothing is held twice
        ReshardedWeights    a module of generation's mesh; weights cross in place when the ranks turn from
                            training to generation, and room is given back when they turn again

    each on ranks of its own, the trainer's counted first
        SentWeights ── a packed tensor for each receiver, bucket by bucket ──> ReceivedWeights

A version is known by its digests (weights.digest): nothing is sampled with weights that have others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from rillflow.cluster.config import MeshSizes
from rillflow.cluster.ranks import Ranks, SingleRank
from rillflow.errors import WeightError
from rillflow.models.language_model import LanguageModel
from rillflow.models.sampling_shard import assign, sampling_module
from rillflow.models.tensor_plan import tensor_plan, weight_parts
from rillflow.placement.mesh import Mesh
from rillflow.roles.share import Share, read_slices
from rillflow.weights.digest import Digests, digests, verify
from rillflow.weights.layout import Layout, generation_layout, local_shape, logical_weights
from rillflow.weights.plan import ReshardPlan, reshard_plan
from rillflow.weights.resharding import pack, unpack
from rillflow.weights.switch import WeightSwitch

Links = Sequence[Mapping[int, Sequence[int]]]
"""For every bucket, the receivers of every rank that sends."""
Canary = tuple[float, ...]
"""What the trainer says of fixed texts: roles.canary."""


class TrainedWeights(Protocol):
    """What the trainer knows of publishing."""

    def publish(self, version: int, compared: bool = True, canary: Canary = ()) -> None:
        """Let the trained weights be known as this version; every rank of the trainer calls it.

        Args:
            version: publishes so far.
            compared: whether a sampler has to hold the same bits, and not only this version.
            canary: what they say of fixed texts.
        """

    def turn_to_training(self) -> None:
        """Let the trainer have its weights; every rank calls it."""


class SampledWeights(Protocol):
    """What the sampler knows of publishing."""

    module: nn.Module
    """What the rollout engine runs."""
    tp: Ranks
    """The ranks that share one copy of it."""
    version: int
    """Of the weights that are sampled with."""
    canary: Canary
    """What the trainer says of fixed texts, by them; empty where an engine is not asked."""

    def turn_to_generation(self, asleep: Callable[[], None]) -> None:
        """Let the module have the published weights; every rank of the sampler calls it.

        Args:
            asleep: called when these ranks turn to training: the engine gives room back.

        Raises:
            WeightError: it has others; they are named, and nothing is generated with them.
        """


class SharedWeights:
    """The trainer's own module.

    Args:
        module: the whole module.
        version: publishes so far.
    """

    def __init__(self, module: nn.Module, version: int = 0) -> None:
        self.module, self.version = module, version
        self.tp: Ranks = SingleRank()
        self.canary: Canary = ()
        self._asleep: Callable[[], None] | None = None

    def publish(self, version: int, compared: bool = True, canary: Canary = ()) -> None:
        """See TrainedWeights; there is one copy, so there are no bits to compare."""
        del compared
        self.version, self.canary = version, canary

    def turn_to_generation(self, asleep: Callable[[], None]) -> None:
        """See SampledWeights."""
        self._asleep = asleep

    def turn_to_training(self) -> None:
        """See TrainedWeights."""
        if self._asleep is not None:
            self._asleep()
            self._asleep = None


class ReshardedWeights:
    """A module of its own on the trainer's ranks, whose weights cross in place.

    Args:
        module: what ``sampling_module`` made of the whole model, before that was cut.
        share: what the rank trains.
        switch: between the share and the module's tensors.
        tp: the ranks that share a copy of the module.
        members: which of all ranks these are.
        version: publishes so far.
    """

    def __init__(
        self,
        module: nn.Module,
        share: Share[LanguageModel],
        switch: WeightSwitch,
        tp: Ranks,
        members: Sequence[int],
        version: int,
    ) -> None:
        self.module, self.tp, self.version = module, tp, version
        self._share, self._switch, self._members = share, switch, members
        self._published: Digests | None = None
        self.canary: Canary = ()

    def publish(self, version: int, compared: bool = True, canary: Canary = ()) -> None:
        """See TrainedWeights."""
        self.turn_to_training()
        self.version, self.canary = version, canary
        self._published = _announced(self._share, version, compared)

    def turn_to_generation(self, asleep: Callable[[], None]) -> None:
        """See SampledWeights."""
        self._asleep = asleep
        if self._switch.is_generating:
            return
        if self._published is None:
            self.publish(self.version)
        assert self._published is not None
        received, plan = self._switch.to_generation(), self._switch.plan
        how = (self._share.written, plan.destination, received, self.tp)
        found = digests(*how, members=self._members) if self._published.of else {}
        try:
            verify(self._published, Digests(version=self.version, of=found))
        except WeightError:
            self._switch.to_training()  # or the next call would find it generating, and not look again
            raise

    def turn_to_training(self) -> None:
        """See TrainedWeights."""
        if self._switch.is_generating:
            self._asleep()
            self._switch.to_training()


class _End:
    """One end of the way to samplers elsewhere."""

    def connect(self, plan: ReshardPlan) -> Links:
        """Take note of what goes where; the plan counts the trainer's ranks first."""
        self._plan, self._links = plan, links_of(plan)
        return self._links


class SentWeights(_End):
    """The trained weights of one rank, on their way to samplers elsewhere.

    Args:
        share: what the rank trains.
    """

    def __init__(self, share: Share[LanguageModel]) -> None:
        self._share, self._announced = share, Digests(version=-1, of={})

    def publish(self, version: int, compared: bool = True, canary: Canary = ()) -> None:
        """See TrainedWeights."""
        self._announced = replace(_announced(self._share, version, compared), canary=canary)

    def what_was_published(self) -> Digests:
        """The version and the digests of the last publish."""
        return self._announced

    def turn_to_training(self) -> None:
        """See TrainedWeights; they never leave."""

    def lie(self) -> Layout:
        """Where they lie on the trainer's ranks."""
        return self._share.layout

    def send(self, bucket: int) -> tuple[Tensor, ...]:
        """The bytes [N] of one bucket for each of its receivers, in the order of the links."""
        rank, parts = self._share.groups.everyone.rank, self._plan.buckets[bucket].parts
        held = self._share.parallel.parameters
        return tuple(pack(self._plan, rank, to, held, parts) for to in self._links[bucket][rank])


class ReceivedWeights(_End):
    """The weights of a sampler on ranks of its own; it has none until the first version has come.

    Args:
        model: the whole model; its weights are of no importance.
        mesh: of generation, its ranks counted after the trainer's.
        ranks: those of the sampler.
    """

    def __init__(self, model: LanguageModel, *, mesh: Mesh, ranks: Ranks) -> None:
        local = Mesh(axes=mesh.axes, ranks=tuple(rank - min(mesh.ranks) for rank in mesh.ranks))
        self.tp, self.version = ranks.part(local.groups("tp")), -1
        self.canary: Canary = ()
        self._rank = min(mesh.ranks) + ranks.rank
        self._members = next(group for group in mesh.groups("tp") if self._rank in group)
        plan = tensor_plan(model.module) if self.tp.size > 1 else {}
        weights = logical_weights(model.module)
        self._weights = {name: weights[name] for name in model.trained or weights}
        self._layout = layout = generation_layout(weights, weight_parts(plan, model.module), mesh)
        self.module = sampling_module(model.module, plan, self.tp)
        self._held = {
            name: torch.empty(
                local_shape(layout[name], weight.shape, self._rank), dtype=weight.dtype, device=model.device
            )
            for name, weight in weights.items()
        }
        assign(self.module, self._held)
        if model.trained:
            read_slices(model.source, self._held, weights, layout, self._rank)

    def plan(self, source: Layout) -> ReshardPlan:
        """How weights get here from where they lie on the trainer's ranks."""
        return reshard_plan(self._weights, source, self._layout)

    def receive(self, bucket: int, *packed: Tensor) -> None:
        """Put what the senders of a bucket packed for this rank where it belongs.

        Args:
            bucket: which one.
            packed: bytes [N] of each sender, in the order of the links.

        Raises:
            WeightError: there are more or fewer bytes than the plan says.
        """
        self.version = -1
        senders = [rank for rank, receivers in self._links[bucket].items() if self._rank in receivers]
        for rank, each in zip(senders, packed, strict=True):
            unpack(self._plan, self._rank, rank, each, self._held, self._plan.buckets[bucket].parts)

    def serve(self, announced: Digests) -> int:
        """Let what was received be sampled with; every rank of the sampler calls it.

        Returns:
            The version.

        Raises:
            WeightError: a weight is not what was published; nothing is generated until the next publish.
        """
        how = (self._weights, self._layout, self._held, self.tp)
        found = digests(*how, members=self._members) if announced.of else {}
        verify(announced, Digests(version=announced.version, of=found))
        self.version, self.canary = announced.version, announced.canary
        return self.version

    def turn_to_generation(self, asleep: Callable[[], None]) -> None:
        """See SampledWeights; nobody trains here."""
        del asleep
        if self.version < 0:
            raise WeightError(
                "the sampler has no weights that were published",
                why="none arrived whole since it was made, or since the last publish began",
                fix="flow.publish(flow.policy) sends them",
            )


def links_of(plan: ReshardPlan) -> Links:
    """Who sends to whom, bucket by bucket."""
    found = []
    for bucket in plan.buckets:
        pairs = {
            (rank, crossed.peer)
            for rank in plan.ranks
            for crossed in plan.crossing("sent", bucket.parts, rank)
        }
        senders = sorted({rank for rank, _ in pairs})
        found.append({rank: sorted(to for sender, to in pairs if sender == rank) for rank in senders})
    return found


def lay_out(
    model: LanguageModel, *, sizes: MeshSizes, generate: Mesh, ranks: Ranks, version: int = 0
) -> tuple[Share[LanguageModel], SharedWeights | ReshardedWeights]:
    """A policy's share of its model, and what a sampler on the same ranks generates with.

    Args:
        model: the whole model, on every rank; its module is cut in place.
        sizes: the grid of training.
        generate: the ranks in generation; see ``weights.layout.generation_mesh``.
        ranks: all of them.
        version: publishes so far.
    """
    if sizes.is_plain:
        return Share.whole(model, ranks), SharedWeights(model.module, version)
    tp = ranks.part(generate.groups("tp"))
    plan = tensor_plan(model.module) if max(tp.size, sizes.tp) > 1 else {}
    parts = weight_parts(plan, model.module)
    module = sampling_module(model.module, plan, tp)
    share = Share.of(model, sizes, ranks)
    wanted = generation_layout(share.weights, parts, generate)
    switch = WeightSwitch(reshard_plan(share.weights, share.layout, wanted), ranks, share.parallel.parameters)
    assign(module, switch.generation)
    members = next(group for group in generate.groups("tp") if ranks.rank in group)
    return share, ReshardedWeights(module, share, switch, tp, members, version)


def _announced(share: Share[LanguageModel], version: int, compared: bool) -> Digests:
    """The digests of what a trainer's ranks hold together, if they are wanted; every one of them calls it."""
    held, everyone = share.parallel.parameters, share.groups.everyone
    found = digests(share.written, share.layout, held, everyone) if compared else {}
    return Digests(version=version, of=found)

"""Publishing: bring the trained weights to the sampler.

    trainer and sampler on the same ranks
        SharedWeights       one module: nothing is sent, nothing is held twice
        ReshardedWeights    a module of generation's mesh; weights are resharded in place when the ranks turn
                            from training to generation, and freed when they turn back

    each on ranks of its own, the trainer's numbered first
        SentWeights ── a packed tensor for each receiver, bucket by bucket ──> ReceivedWeights

Digests identify a version (weights.digest): weights with other digests are never sampled from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rillflow.errors import WeightError
from rillflow.models.language_model import LanguageModel
from rillflow.models.sampling_shard import assign, sampling_module
from rillflow.models.tensor_plan import tensor_plan, weight_parts
from rillflow.placement.mesh import Mesh
from rillflow.records.metrics import Mean, Metric
from rillflow.roles.model_shard import ModelShard, read_slices
from rillflow.runs.abandoning import whole
from rillflow.sharding.codec import Codec, State
from rillflow.sharding.digest import Digests, digests, verify
from rillflow.sharding.layout import Layout, generation_layout, local_shape, logical_weights
from rillflow.sharding.reshard_plan import ReshardPlan, reshard_plan
from rillflow.sharding.resharding import pack, unpack
from rillflow.sharding.switch import WeightSwitch
from rillflow.workers.collectives import Ranks, SingleRank
from rillflow.workers.config import MeshSizes

Links = Sequence[Mapping[int, Sequence[int]]]
"""Receivers of every sending rank, for every bucket."""
Canary = tuple[float, ...]
"""Log probabilities of fixed texts by the trainer: roles.logprob_check."""


class SharedWeights:
    """Weights for a sampler that uses the trainer's own module.

    Every kind of weights has its methods: ``publish`` and ``turn_to_training`` on the trainer's ranks,
    ``turn_to_generation``, ``module`` and ``tp`` on the sampler's.

    Args:
        module: the whole module.
        version: publishes so far.
    """

    def __init__(self, module: nn.Module, version: int) -> None:
        self.module, self.version = module, version
        self.tp: Ranks = SingleRank()
        """Ranks that share one copy of the module."""
        self.canary: Canary = ()
        """Log probabilities of fixed texts by the trainer; empty if the engine is not checked."""
        self._asleep: Callable[[], None] | None = None

    def publish(self, version: int, compared: bool = True, canary: Canary = ()) -> None:
        """Announce the trained weights as this version; a collective call of the trainer's ranks.

        Args:
            version: publishes so far.
            compared: whether the sampler must verify the digests of the weights, and not only the version;
                one copy has none to compare.
            canary: log probabilities of fixed texts.
        """
        del compared
        self.version, self.canary = version, canary

    def turn_to_generation(self, asleep: Callable[[], None]) -> None:
        """Load the published weights into the module; a collective call of the sampler's ranks.

        Args:
            asleep: called when these ranks turn to training, so that the engine frees memory.

        Raises:
            WeightError: the digests differ; the error names the weights, and nothing is generated with them.
        """
        self._asleep = asleep

    def turn_to_training(self) -> None:
        """Give the trainer its weights; a collective call."""
        asleep, self._asleep = self._asleep, None  # once, also if it fails or hangs: a save must go on
        if asleep is not None:
            asleep()


class ReshardedWeights:
    """Weights for a sampler with its own module on the trainer's ranks; they are resharded in place.

    Args:
        module: made by ``sampling_module`` from the whole model, before that was sharded.
        share: the rank's shard in training.
        switch: reshards between the share and the module's tensors.
        tp: the ranks that share a copy of the module.
        members: positions of these ranks among all ranks.
        version: publishes so far.
    """

    def __init__(
        self,
        module: nn.Module,
        share: ModelShard[LanguageModel],
        switch: WeightSwitch,
        tp: Ranks,
        members: Sequence[int],
        version: int,
    ) -> None:
        self.module, self.tp, self.version = module, tp, version
        self._share, self._switch, self._members = share, switch, members
        self._published: Digests | None = None
        self.canary: Canary = ()
        self._asleep: Callable[[], None] | None = None

    def publish(self, version: int, compared: bool = True, canary: Canary = ()) -> None:
        """See SharedWeights."""
        self.turn_to_training()
        self.version, self.canary = version, canary
        self._published = _announced(self._share, version, compared)

    def turn_to_generation(self, asleep: Callable[[], None]) -> None:
        """See SharedWeights."""
        self._asleep = asleep
        if self._switch.is_generating:
            return
        if self._published is None:
            self.publish(self.version)
        assert self._published is not None
        with whole():
            received, plan = self._switch.to_generation(), self._switch.plan
        how = (self._share.written, plan.destination, received, self.tp)
        found = digests(*how, members=self._members) if self._published.of else {}
        try:
            verify(self._published, Digests(version=self.version, of=found))
        except WeightError:
            self._switch.to_training()  # otherwise the next call would skip the check
            raise

    def turn_to_training(self) -> None:
        """See SharedWeights.

        Raises:
            WeightError: a rank failed while weights moved, so there are no complete ones.
        """
        if self._switch.is_generating or self._switch.is_torn:
            asleep, self._asleep = self._asleep, None
            if asleep is not None:
                asleep()
            with whole():
                self._switch.to_training()


class _End:
    """One end of a delivery to samplers on other ranks."""

    def connect(self, plan: ReshardPlan) -> Links:
        """Store the plan and return its links; the plan numbers the trainer's ranks first."""
        self._plan, self._links = plan, links_of(plan)
        return self._links


class SentWeights(_End):
    """Trained weights of one rank that are sent to samplers on other ranks.

    Args:
        share: the rank's shard in training.
        codec: encodes what is sent; None sends the bytes of the weights.
    """

    def __init__(self, share: ModelShard[LanguageModel], codec: Codec | None = None) -> None:
        self._share, self._announced = share, Digests(version=-1, of={})
        self._codec, self._states = codec, defaultdict[tuple[int, int], State](dict)
        self._sent_bytes, self._own_bytes = 0, 0

    def publish(self, version: int, compared: bool = True, canary: Canary = ()) -> None:
        """See SharedWeights."""
        self._sent_bytes, self._own_bytes = 0, 0
        self._announced = replace(_announced(self._share, version, compared), canary=canary)

    def what_was_published(self) -> Digests:
        """Return the version and the digests of the last publish."""
        return self._announced

    def turn_to_training(self) -> None:
        """See SharedWeights; the weights never leave."""

    def lie(self) -> Layout:
        """Return the layout of the weights on the trainer's ranks."""
        return self._share.layout

    def send(self, bucket: int) -> tuple[Tensor, ...]:
        """Return the bytes [N] of one bucket for each of its receivers, in the order of the links."""
        rank, parts = self._share.groups.everyone.rank, self._plan.buckets[bucket].parts
        held, receivers = self._share.parallel.parameters, self._links[bucket][rank]
        packed = [pack(self._plan, rank, to, held, parts) for to in receivers]
        if self._codec is not None:
            dtype = self._plan.buckets[bucket].dtype
            for place, to in enumerate(receivers):
                state = self._states[bucket, to]
                self._own_bytes += packed[place].numel()
                packed[place] = self._codec.encode(packed[place].view(dtype), state)
                self._sent_bytes += packed[place].numel()
        return tuple(packed)

    def link_metrics(self) -> dict[str, Metric]:
        """Return the bytes that this rank sent through the codec for the last publish, and its weights'."""
        if self._codec is None:
            return {}
        return {
            "links/weight_sent_bytes/mean": Mean(total=self._sent_bytes, count=1),
            "links/weight_bytes/mean": Mean(total=self._own_bytes, count=1),
        }


class ReceivedWeights(_End):
    """Weights of a sampler on ranks of its own; there are none until the first version arrives.

    Args:
        model: the whole model; the values of its weights do not matter.
        mesh: the mesh of generation, its ranks numbered after the trainer's.
        ranks: the ranks of this one's world, which covers whole tp groups.
        rank: number of this rank in the sampler's pool.
        codec: decodes what arrives; None for the bytes of the weights.
    """

    def __init__(
        self, model: LanguageModel, *, mesh: Mesh, ranks: Ranks, rank: int, codec: Codec | None = None
    ) -> None:
        self._codec, self._states = codec, defaultdict[tuple[int, int], State](dict)
        self._rank = min(mesh.ranks) + rank
        first = self._rank - ranks.rank
        world = range(first, first + ranks.size)
        groups = [[each - first for each in group] for group in mesh.groups("tp") if group[0] in world]
        self.tp, self.version = ranks.part(groups), -1
        self.canary: Canary = ()
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
        """Return the plan that reshards weights from their layout on the trainer's ranks."""
        return reshard_plan(self._weights, source, self._layout)

    def receive(self, bucket: int, *packed: Tensor) -> None:
        """Unpack a bucket's weights, which its senders packed for this rank.

        Args:
            bucket: index of the bucket.
            packed: bytes [N] from each sender, in the order of the links.

        Raises:
            WeightError: there are more or fewer bytes than in the plan, or the codec cannot decode them.
        """
        self.version = -1
        parts, dtype = self._plan.buckets[bucket].parts, self._plan.buckets[bucket].dtype
        senders = [rank for rank, receivers in self._links[bucket].items() if self._rank in receivers]
        for rank, payload in zip(senders, packed, strict=True):
            arrived = payload
            if self._codec is not None:
                arrived = pack(self._plan, self._rank, rank, self._held, parts, way="received")
                self._codec.decode(payload, arrived.view(dtype), self._states[bucket, rank])
            unpack(self._plan, self._rank, rank, arrived, self._held, parts)

    def serve(self, announced: Digests) -> int:
        """Verify the received weights, the new sampled version; a collective call of the sampler's ranks.

        Returns:
            The version.

        Raises:
            WeightError: a weight differs from the published one; nothing is generated until the next publish.
        """
        how = (self._weights, self._layout, self._held, self.tp)
        found = digests(*how, members=self._members) if announced.of else {}
        verify(announced, Digests(version=announced.version, of=found))
        self.version, self.canary = announced.version, announced.canary
        return self.version

    def turn_to_generation(self, asleep: Callable[[], None]) -> None:
        """See SharedWeights; no rank trains here."""
        del asleep
        if self.version < 0:
            raise WeightError(
                "the sampler has no published weights",
                why="no complete version arrived since the sampler started, or since the last publish began",
                fix="call flow.publish(flow.policy), which sends them",
            )


TrainedWeights = SharedWeights | ReshardedWeights | SentWeights
"""The trainer's side of publishing."""
SampledWeights = SharedWeights | ReshardedWeights | ReceivedWeights
"""The sampler's side of publishing."""


def links_of(plan: ReshardPlan) -> Links:
    """Return the senders and receivers of every bucket."""
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
) -> tuple[ModelShard[LanguageModel], SharedWeights | ReshardedWeights]:
    """Return a policy's share of its model, and the weights of a sampler on the same ranks.

    Args:
        model: the whole model, on every rank; its module is sharded in place.
        sizes: the grid in training.
        generate: the grid in generation; see ``weights.layout.generation_mesh``.
        ranks: all ranks.
        version: publishes so far.
    """
    if sizes.is_plain:
        return ModelShard.whole(model, ranks), SharedWeights(model.module, version)
    tp = ranks.part(generate.groups("tp"))
    plan = tensor_plan(model.module) if max(tp.size, sizes.tp) > 1 else {}
    parts = weight_parts(plan, model.module)
    module = sampling_module(model.module, plan, tp)
    share = ModelShard.of(model, sizes, ranks)
    wanted = generation_layout(share.weights, parts, generate)
    switch = WeightSwitch(reshard_plan(share.weights, share.layout, wanted), ranks, share.parallel.parameters)
    assign(module, switch.generation)
    members = next(group for group in generate.groups("tp") if ranks.rank in group)
    return share, ReshardedWeights(module, share, switch, tp, members, version)


def _announced(share: ModelShard[LanguageModel], version: int, compared: bool) -> Digests:
    """Return the digests of the trainer's weights, if ``compared``; a collective call of its ranks."""
    held, everyone = share.parallel.parameters, share.groups.everyone
    found = digests(share.written, share.layout, held, everyone) if compared else {}
    return Digests(version=version, of=found)

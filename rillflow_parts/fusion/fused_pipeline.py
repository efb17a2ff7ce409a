"""Fused pipelines: two models' micro-batches on the same ranks, each model in the other's idle time.

    device       0        1        2        3
    ascending    0 ─ F ─> 1 ─ F ─> 2 ─ F ─> 3     hidden states [1, U, D]; gradients go the other way
    descending   3 <─ f ─ 2 <─ f ─ 1 <─ f ─ 0     its first stage is on the last device of a replica

    schedule ── passes of this rank's device, in order ──┬─> wait for the input ─> pass ─> send ─> after()
                                                          └─> messages of this rank, in one order

A rank consumes hidden states and gradients of its neighbours. It waits for the input of its next pass, and
for a neighbour's receive before it drops a sent tensor; the neighbour's send or receive unblocks it. It
produces the input of a neighbour's pass. Both models' micro-batches run first in, first out, and each model
has its own process group. So gradients have the bits of ``run_pipeline``.

No order can deadlock: a rank waits only for passes that are earlier in the schedule. Sends run beside the
passes; their tensors are kept until the schedule says that the neighbour has used them. All messages of a
rank are posted in one order, by the end of the sending pass in the schedule; the neighbours have the same
order. So even sends that block until their receive is posted cannot deadlock. A receive is posted before the
sends of later passes, and otherwise at most ``AHEAD`` passes before its own.

Tested with gloo on CPUs, also with sends that block. NCCL is not tested, because that takes several GPUs. It
needs the common order: its sends and receives between two ranks share a stream.

Legend: U packed tokens of a model's longest micro-batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rillflow.sharding.packed_rows import empty_reading
from rillflow.sharding.pass_times import PassClock
from rillflow.sharding.pipeline_runner import PipelinePass, RanPasses
from rillflow_parts.fusion.scheduling.problem import FusedSchedule

AHEAD = 4
"""Passes of a rank before which the receive of its input is posted."""


def run_fused(
    ascending: PipelinePass, descending: PipelinePass, schedule: FusedSchedule
) -> tuple[RanPasses, RanPasses]:
    """Run both models' micro-batches forward and backward, in the order of a schedule.

    Every rank calls it with the same schedule; its devices are the ranks along the longer pipeline, or along
    the least common multiple of both. A replica with fewer micro-batches than the schedule runs empty ones.

    Args:
        ascending: the model whose first stage is on the first rank of a replica.
        descending: the model whose first stage is on the last rank of a replica.
        schedule: orders of all devices, see ``scheduling``.

    Returns:
        The micro-batches of both models as they were run, with the empty ones, and their passes on this rank.
    """
    one, other = ascending.ranks, descending.ranks
    device = next(
        device
        for device in range(len(schedule.devices))
        if device % one.size == one.rank and device % other.size == other.rank
    )
    tasks = schedule.devices[device]
    models = tuple(
        _Model(given, sum(task.pipeline == index for task in tasks) // 2)
        for index, given in enumerate((ascending, descending))
    )
    messages = _Messages(schedule, device, models)
    clock = PassClock(models[0].device)
    with torch.enable_grad():
        for place, task in enumerate(tasks):
            given, model = messages.receive(place), models[task.pipeline]
            start = clock.stamp()
            run = model.backward if task.is_backward else model.forward
            messages.send(place, run(task.micro_batch, given))
            del given
            if task.is_backward:
                model.given.after()
            clock.add(task.micro_batch, task.is_backward, start)
    messages.finish()
    timed = list(zip(tasks, clock.passes(), strict=True))
    first, second = (
        RanPasses(
            readings=model.readings, passes=tuple(each for task, each in timed if task.pipeline == index)
        )
        for index, model in enumerate(models)
    )
    return first, second


class _Model:
    """One model's stage on this rank, and its micro-batches between forward and backward pass."""

    def __init__(self, given: PipelinePass, count: int) -> None:
        ranks, is_descending = given.ranks, given.is_descending
        assert len(given.readings) <= count, f"{len(given.readings)} micro-batches, {count} in the schedule"
        self.given, self.onward = given, -1 if is_descending else 1
        stage = ranks.size - 1 - ranks.rank if is_descending else ranks.rank
        self.is_first, self.is_last = stage == 0, stage == ranks.size - 1
        self.device, self.dtype = given.module.device, given.module.dtype
        missing = count - len(given.readings)
        empty = [empty_reading(self.device)] * (missing > 0)
        longest = max((reading.size for reading in (*given.readings, *empty)), default=0)
        self.readings = [reading.padded(longest) for reading in (*given.readings, *empty * missing)]
        self.shape = 1, longest, int(given.module.config.get_text_config().hidden_size)
        self._live: dict[int, tuple[Tensor | None, Tensor]] = {}

    def forward(self, index: int, state: Tensor | None) -> Tensor | None:
        """Run a micro-batch forward and return the next stage's input; None on the last stage."""
        reading = self.readings[index]
        read = partial(self.given.finish, index) if self.is_last else None
        state = None if state is None else state.requires_grad_()
        output = self.given.part(state, reading.inputs, reading.wanted, read)
        self._live[index] = state, output
        return None if self.is_last else output.detach()

    def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """Run a micro-batch backward and return its input's gradient; None on the first stage."""
        state, output = self._live.pop(index)
        torch.autograd.backward(output, gradient)
        return None if state is None else state.grad


@dataclass(kw_only=True, eq=False)
class _Message:
    """A message of this rank: the input of a neighbour's pass, or of an own one."""

    pipeline: int
    """The model's index."""
    tag: int
    """Twice the micro-batch, plus 1 for a gradient."""
    peer: int
    """The neighbour's rank in the model's group."""
    order: tuple[float, int, int]
    """Place among the messages of a link: end of the sending pass, model, tag."""
    used_s: float
    """End of the pass that uses it, by the schedule."""
    place: int
    """Place of the sending or the using pass among this rank's passes."""
    is_sent: bool
    """Whether this rank sends it."""
    tensor: Tensor | None = None
    """The data, once it is there or a receive is posted."""
    work: dist.Work | None = field(default=None, repr=False)
    """The transfer."""


class _Messages:
    """Sends and receives of this rank, posted in the order that the neighbours have too."""

    def __init__(self, schedule: FusedSchedule, device: int, models: Sequence[_Model]) -> None:
        self._models, self._tasks = models, schedule.devices[device]
        known = {
            (at, task.pipeline, task.is_backward, task.micro_batch): task
            for at in {device - 1, device, device + 1} & set(range(len(schedule.devices)))
            for task in schedule.devices[at]
        }
        self._received: dict[int, _Message] = {}
        self._sent: dict[int, _Message] = {}
        for place, task in enumerate(self._tasks):
            model = models[task.pipeline]
            onward = -model.onward if task.is_backward else model.onward
            from_edge, to_edge = model.is_first, model.is_last
            if task.is_backward:
                from_edge, to_edge = to_edge, from_edge
            for is_sent, is_edge in ((False, from_edge), (True, to_edge)):
                if not is_edge:
                    way = onward if is_sent else -onward
                    other = known[device + way, task.pipeline, task.is_backward, task.micro_batch]
                    source, user = (task, other) if is_sent else (other, task)
                    tag = 2 * task.micro_batch + task.is_backward
                    (self._sent if is_sent else self._received)[place] = _Message(
                        pipeline=task.pipeline,
                        tag=tag,
                        peer=model.given.ranks.rank + way,
                        order=(source.end_s, task.pipeline, tag),
                        used_s=user.end_s,
                        place=place,
                        is_sent=is_sent,
                    )
        both = [*self._received.values(), *self._sent.values()]
        self._due = sorted(both, key=lambda message: message.order, reverse=True)
        self._kept: list[_Message] = []

    def receive(self, place: int) -> Tensor | None:
        """Return the input of an own pass; None if it needs none."""
        self._release(self._tasks[place].start_s)
        message = self._received.pop(place, None)
        if message is None:
            return None
        self._post_until(message)
        assert message.work is not None
        message.work.wait()
        return message.tensor

    def send(self, place: int, tensor: Tensor | None) -> None:
        """Send the result of an own pass, if a neighbour needs it, and post the next receives."""
        message = self._sent.pop(place, None)
        if message is not None:
            assert tensor is not None
            message.tensor = tensor.contiguous()
            self._post_until(message)
        while self._due and not self._due[-1].is_sent and self._due[-1].place <= place + AHEAD:
            self._post(self._due.pop())

    def finish(self) -> None:
        """Wait until the neighbours have all messages."""
        self._release(float("inf"))

    def _post_until(self, wanted: _Message) -> None:
        """Post messages in order up to a wanted one."""
        while wanted.work is None:
            self._post(self._due.pop())

    def _post(self, message: _Message) -> None:
        model = self._models[message.pipeline]
        group = model.given.ranks.group
        if message.is_sent:
            assert message.tensor is not None, "a message precedes its pass in the schedule"
            message.work = dist.isend(message.tensor, group=group, tag=message.tag, group_dst=message.peer)
            self._kept.append(message)
            return
        message.tensor = torch.empty(model.shape, dtype=model.dtype, device=model.device)
        message.work = dist.irecv(message.tensor, group=group, tag=message.tag, group_src=message.peer)

    def _release(self, now_s: float) -> None:
        """Drop sent tensors that neighbours have used by this time of the schedule.

        The wait cannot deadlock: the pass that uses the tensor is earlier in the schedule.
        """
        for message in self._kept:
            if message.used_s <= now_s and message.work is not None:
                message.work.wait()
        self._kept = [message for message in self._kept if message.used_s > now_s]

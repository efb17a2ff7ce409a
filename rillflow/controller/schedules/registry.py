"""Registry: the shipped orders of a phase's steps, by name."""

from __future__ import annotations

from collections.abc import Mapping

from rillflow.controller.schedules.ahead import Ahead
from rillflow.controller.schedules.gathering import Gathered
from rillflow.controller.schedules.in_order import InOrder
from rillflow.controller.schedules.ready_first import ReadyFirst
from rillflow.controller.schedules.schedule import Schedule
from rillflow.controller.schedules.streamed import Streamed
from rillflow.controller.schedules.tail_batching import TailBatches

SCHEDULES: Mapping[str, type[Schedule]] = {
    "in_order": InOrder,
    "ahead": Ahead,
    "ready_first": ReadyFirst,
    "tail_batching": TailBatches,
    "gathering": Gathered,
    "streamed": Streamed,
}
"""Classes of schedules by ``mode``."""

"""An order of the steps by name: schedule.mode = "announced"."""

from typing import Literal

from rillflow.app.plugins import Plugin
from rillflow.controller.schedules.in_order import InOrder


class Announced(InOrder):
    """Steps in order, and a line at the start of a phase."""

    mode: Literal["announced"] = "announced"
    word: str = "begins"

    def source(self, parts):
        parts.say(f"{parts.phase.name} {self.word}")
        return super().source(parts)


PLUGIN = Plugin(schedules={"announced": Announced})

"""An order of steps from outside the package: a plugin brings it, and a recipe names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field

from rillflow.app import plugins
from rillflow.app.plugins import Plugin
from rillflow.app.recipe import load_recipe
from rillflow.controller.schedules.phase_parts import PhaseParts
from rillflow.controller.schedules.schedule import Schedule
from rillflow.controller.source import Source
from rillflow.errors import ConfigError
from rillflow.records.batch import Batch
from rillflow.runs.reader import read_rollouts
from tests.flows.conftest import SUMS, Tiny

REST = f"steps = 2\n{SUMS.replace('digits = 1', 'digits = 3')}[evaluate]\nproblems = 0\n"
OWN = 'schedule={mode="shortest_first",among=2}'


class ShortestFirst(Schedule):
    """Steps of the shortest prompts first, among the prompts of the next steps."""

    paper: ClassVar[str] = "2404.08509"
    mode: Literal["shortest_first"] = "shortest_first"
    among: int = Field(2, gt=0, description="Steps whose prompts are sorted together.")

    def source(self, parts: PhaseParts) -> Source:
        """See Schedule."""
        sorted_prompts = list[Batch]()

        def take(count: int) -> Batch:
            if not sorted_prompts:
                drawn = parts.stream.take(self.among * count)
                drawn = drawn.select(drawn.ragged("tokens").lengths.argsort(stable=True))
                sorted_prompts.extend(
                    drawn.slice(first, first + count) for first in range(0, len(drawn), count)
                )
            return sorted_prompts.pop(0)

        return Source(parts.executor, replace(parts.stream, take=take), sync=parts.sync)


class Unnamed(ShortestFirst):
    """A schedule whose class has another name than its plugin says."""


def bring(monkeypatch: pytest.MonkeyPatch, **brought: Mapping[str, type[Schedule]]) -> None:
    every = {**plugins.installed(), **{name: Plugin(schedules=each) for name, each in brought.items()}}
    monkeypatch.setattr(plugins, "installed", lambda: every)


@pytest.fixture
def tiny(tiny: Tiny) -> Tiny:
    tiny.write(REST)
    return tiny


def test_a_plugins_order_trains_and_resumes(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, shortest={"shortest_first": ShortestFirst})
    how = (OWN, "placement.backend=inline", "rollout.max_tokens=2")
    assert tiny.run("run", *how) == 0
    one, two = (
        [len(row.prompt) for row in read_rollouts(tiny.folder / "run", step) if row.row.sample == 0]
        for step in (1, 2)
    )
    assert len(one) == len(two) == 4 and max(one) <= min(two)
    assert tiny.run("run", *how, "algorithm.steps=4") == 0, "config.json names the order"


@pytest.mark.parametrize(
    ("brought", "said"),
    [
        ({}, 'must be one of "in_order", "ahead"'),
        ({"one": {"ahead": ShortestFirst}}, "the plugin one adds the schedule ahead"),
        (
            {"one": {"shortest_first": ShortestFirst}, "two": {"shortest_first": ShortestFirst}},
            "the plugin two adds the schedule shortest_first",
        ),
        ({"one": {"longest_first": Unnamed}}, "the mode of Unnamed is shortest_first"),
    ],
)
def test_an_order_that_is_not_there_or_there_twice_is_refused(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, brought: Any, said: str
) -> None:
    bring(monkeypatch, **brought)
    with pytest.raises(ConfigError, match=said):
        load_recipe(tiny.recipe, [OWN])


def test_a_setting_that_is_now_in_the_schedule_is_refused_with_its_new_name(tiny: Tiny) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(tiny.recipe, ["algorithm.freshness=1"])
    assert "algorithm.freshness is now schedule.freshness" in refused.value.why
    assert 'with schedule.mode = "ahead" or "ready_first"' in refused.value.fix

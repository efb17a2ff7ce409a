"""Plugin: bring ``[links]``, its codecs, the order ``sides``, and commands. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rillflow.app.plugins import SHIPPED, Command, Plugin
from rillflow.cli.arguments import recipe_arguments
from rillflow.cli.failure import DONE
from rillflow_links.remote.arguments import bridge, bridge_arguments, join, join_arguments
from rillflow_links.sides.arguments import merge_arguments, merge_sides

if TYPE_CHECKING:
    from rillflow.app.any_recipe import AnyRecipe
    from rillflow.app.check_report import Report
    from rillflow.app.facts import RecipeFacts
    from rillflow.app.resolved import Resolved
    from rillflow.controller.schedules.schedule import Schedule
    from rillflow.errors import ConfigError
    from rillflow.sharding.codec import EdgeCodecs


def codecs(resolved: Resolved) -> EdgeCodecs:
    """Return the codecs that a recipe's ``[links]`` names; an edge that is dense has none."""
    from rillflow_links.codecs.registry import codecs_of

    return codecs_of(resolved)


def needs(resolved: Resolved) -> Iterable[ConfigError]:
    """Return contradictions between ``[links]`` and other settings."""
    from rillflow_links.needs import links_needs

    return links_needs(resolved)


def look(facts: RecipeFacts | AnyRecipe, report: Report) -> None:
    """Say how many bytes the codecs of a recipe send."""
    from rillflow.app.facts import RecipeFacts
    from rillflow_links.expected_bytes import look_at_links

    if isinstance(facts, RecipeFacts):
        look_at_links(facts, report)


def measure(arguments: argparse.Namespace) -> int:
    """``rillflow links``: measure the links between the ranks of a recipe."""
    from rillflow.cli.commands import load
    from rillflow_links.link_report import link_lines

    for line in link_lines(load(arguments)):
        print(line, flush=True)
    return DONE


class LazySchedules(Mapping[str, "type[Schedule]"]):
    """The order ``sides``, whose class is imported when a recipe is read."""

    def __getitem__(self, name: str) -> type[Schedule]:
        from rillflow_links.sides.schedule import Sides

        return {"sides": Sides}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("sides",))

    def __len__(self) -> int:
        return 1


HELP = SHIPPED["links"]
PLUGIN = Plugin(
    commands={
        "links": Command(help=HELP["links"], run=measure, add_arguments=recipe_arguments),
        "join": Command(help=HELP["join"], run=join, add_arguments=join_arguments),
        "bridge": Command(help=HELP["bridge"], run=bridge, add_arguments=bridge_arguments),
        "merge-sides": Command(
            help=HELP["merge-sides"],
            run=merge_sides,
            add_arguments=merge_arguments,
            outlives_output=True,
        ),
    },
    sections={"links": "rillflow_links.config:LinksConfig"},
    codecs=codecs,
    needs=needs,
    look=look,
    schedules=LazySchedules(),
)

"""Plugin: bring ``[links]``, its codecs, the order ``sides`` and its merger. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rillflow.app.plugins import SHIPPED, Command, Plugin
from rillflow.cli.arguments import recipe_arguments
from rillflow.cli.failure import DONE

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


def merge_sides(arguments: argparse.Namespace) -> int:
    """``rillflow merge-sides``: see ``sides.commands``."""
    from rillflow_links.sides.commands import run_merger

    return run_merger(arguments)


def add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``merge-sides``."""
    add = parser.add_argument
    add("store", metavar="STORE", help="folder or URL that the sides name in schedule.store")
    add("--quorum", type=int, default=1, metavar="N", help="least number of sides in a merge (1)")
    told = "wait for the other sides of the last merges once a quorum is there (30)"
    add("--grace-s", type=float, default=30.0, metavar="S", help=told)
    told = "versions that a contribution may be behind (3)"
    add("--most-late", type=int, default=3, metavar="N", help=told)
    add("--lr", type=float, default=0.7, help="outer learning rate (0.7)")
    add("--momentum", type=float, default=0.9, help="outer Nesterov momentum (0.9)")
    add("--poll-s", type=float, default=1.0, metavar="S", help="pause between two looks (1)")
    add("--until", type=int, metavar="VERSION", help="end when this version is there")
    told = "compute every version again from the log, and compare all bits"
    add("--replay", action="store_true", help=told)


PLUGIN = Plugin(
    commands={
        "links": Command(help=SHIPPED["links"]["links"], run=measure, add_arguments=recipe_arguments),
        "merge-sides": Command(
            help=SHIPPED["links"]["merge-sides"],
            run=merge_sides,
            add_arguments=add_merge_arguments,
            outlives_output=True,
        ),
    },
    sections={"links": "rillflow_links.config:LinksConfig"},
    codecs=codecs,
    needs=needs,
    look=look,
    schedules=LazySchedules(),
)

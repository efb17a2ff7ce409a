"""Plugin: bring the section ``[links]``, its codecs, and remote samplers. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rillflow.app.plugins import SHIPPED, Command, Plugin
from rillflow_links.remote.arguments import bridge, bridge_arguments, join, join_arguments

if TYPE_CHECKING:
    from rillflow.app.resolved import Resolved
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


HELP = SHIPPED["links"]
PLUGIN = Plugin(
    sections={"links": "rillflow_links.config:LinksConfig"},
    codecs=codecs,
    needs=needs,
    commands={
        "join": Command(help=HELP["join"], run=join, add_arguments=join_arguments),
        "bridge": Command(help=HELP["bridge"], run=bridge, add_arguments=bridge_arguments),
    },
)

"""Plugin: bring the section ``[links]`` and the codecs that it names. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rillflow.app.plugin_sections import section_of
from rillflow.app.plugins import Plugin
from rillflow_links.config import LinksConfig

if TYPE_CHECKING:
    from rillflow.app.resolved import Resolved
    from rillflow.errors import ConfigError
    from rillflow.sharding.codec import EdgeCodecs


def codecs(resolved: Resolved) -> EdgeCodecs:
    """Return the codecs that a recipe's ``[links]`` names; an edge that is dense has none."""
    from rillflow.sharding.codec import EdgeCodecs
    from rillflow_links.codecs.registry import ACTIVATIONS, GRADIENTS, WEIGHTS

    links = section_of(resolved.recipe, "links", LinksConfig) or LinksConfig()
    return EdgeCodecs(
        weights=None if links.weights == "dense" else WEIGHTS[links.weights](links),
        gradients=None if links.gradients == "dense" else GRADIENTS[links.gradients](links),
        activations=None if links.activations == "dense" else ACTIVATIONS[links.activations](links),
    )


def needs(resolved: Resolved) -> Iterable[ConfigError]:
    """Return contradictions between ``[links]`` and other settings."""
    from rillflow_links.needs import links_needs

    return links_needs(resolved)


PLUGIN = Plugin(sections={"links": "rillflow_links.config:LinksConfig"}, codecs=codecs, needs=needs)

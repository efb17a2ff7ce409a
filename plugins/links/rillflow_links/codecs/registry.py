"""Registry: the codecs by name, made from the settings of ``[links]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rillflow.app.plugin_sections import section_of
from rillflow.app.resolved import Resolved
from rillflow.sharding.codec import Codec, CutCodec, EdgeCodecs
from rillflow_links.codecs.cut_top_k import CutTopK, adapted
from rillflow_links.codecs.dense import DenseBytes
from rillflow_links.config import LinksConfig

WEIGHTS: Mapping[str, Callable[[LinksConfig], Codec]] = {"dense": lambda _: DenseBytes()}
"""Codecs of published weights; all are exact."""
GRADIENTS: Mapping[str, Callable[[LinksConfig], Codec]] = {"dense": lambda _: DenseBytes()}
"""Codecs of gradients."""
ACTIVATIONS: Mapping[str, Callable[[LinksConfig], CutCodec]] = {
    "top_k": lambda links: CutTopK([links.activation_ratio]),
    "adatopk": lambda links: CutTopK(adapted(links.activation_ratio, links.link_seconds)),
}
"""Codecs of hidden states between pipeline stages."""


def codecs_of(resolved: Resolved) -> EdgeCodecs:
    """Return the codecs that a recipe's ``[links]`` names; an edge that is dense has none."""
    links = section_of(resolved.recipe, "links", LinksConfig) or LinksConfig()
    return EdgeCodecs(
        weights=None if links.weights == "dense" else WEIGHTS[links.weights](links),
        gradients=None if links.gradients == "dense" else GRADIENTS[links.gradients](links),
        activations=None if links.activations == "dense" else ACTIVATIONS[links.activations](links),
    )

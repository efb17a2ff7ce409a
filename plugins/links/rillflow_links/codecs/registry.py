"""Registry: the codecs by name, made from the settings of ``[links]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rillflow.app.plugin_sections import section_of
from rillflow.app.resolved import Resolved
from rillflow.sharding.codec import Codec, CutCodec, EdgeCodecs
from rillflow_links.codecs.cut_top_k import CutTopK, adapted
from rillflow_links.codecs.delta import Delta
from rillflow_links.codecs.rounded import Cast, Int8
from rillflow_links.codecs.sparse_loco import SparseLoco
from rillflow_links.codecs.top_k import Dct, TopK
from rillflow_links.config import LinksConfig

WEIGHTS: Mapping[str, Callable[[LinksConfig], Codec]] = {
    "delta": lambda links: Delta(links.full_every),
}
"""Codecs of published weights; all are exact."""
GRADIENTS: Mapping[str, Callable[[LinksConfig], Codec]] = {
    "cast": lambda _: Cast(),
    "int8": lambda _: Int8(),
    "top_k": lambda links: TopK(links.share),
    "dct": lambda links: Dct(links.share, links.lifespan),
    "sparse_loco": lambda links: SparseLoco(links.share),
}
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

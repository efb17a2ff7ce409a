"""Registry: the codecs by name, made from the settings of ``[links]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rillflow.sharding.codec import Codec, CutCodec
from rillflow_links.codecs.cut_top_k import CutTopK, adapted
from rillflow_links.codecs.dense import Dense
from rillflow_links.config import LinksConfig

WEIGHTS: Mapping[str, Callable[[LinksConfig], Codec]] = {"dense": lambda _: Dense()}
"""Codecs of published weights; all are exact."""
GRADIENTS: Mapping[str, Callable[[LinksConfig], Codec]] = {"dense": lambda _: Dense()}
"""Codecs of gradients."""
ACTIVATIONS: Mapping[str, Callable[[LinksConfig], CutCodec]] = {
    "top_k": lambda links: CutTopK([links.activation_ratio]),
    "adatopk": lambda links: CutTopK(adapted(links.activation_ratio, links.link_seconds)),
}
"""Codecs of hidden states between pipeline stages."""

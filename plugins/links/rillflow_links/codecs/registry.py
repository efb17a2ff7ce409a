"""Registry: the codecs by name, made from the settings of ``[links]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rillflow.sharding.codec import Codec
from rillflow_links.codecs.dense import Dense
from rillflow_links.config import LinksConfig

WEIGHTS: Mapping[str, Callable[[LinksConfig], Codec]] = {"dense": lambda _: Dense()}
"""Codecs of published weights; all are exact."""
GRADIENTS: Mapping[str, Callable[[LinksConfig], Codec]] = {"dense": lambda _: Dense()}
"""Codecs of gradients."""

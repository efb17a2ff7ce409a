"""Settings of slow links: the section ``links`` of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.config.schema import Section

FEW = 256
"""Smallest number of values of a tensor that a sparse codec of gradients compresses."""


class LinksConfig(Section):
    """Codecs of tensors that travel between ranks and machines."""

    weights: Literal["dense", "delta"] = Field(
        "dense",
        description="Published weights to samplers elsewhere: whole, or as exact differences to the version "
        "that the sampler has.",
    )
    full_every: int = Field(
        10, ge=1, description="With weights = delta, send whole weights with every Nth publish."
    )
    gradients: Literal["dense", "cast", "int8", "top_k", "dct", "sparse_loco"] = Field(
        "dense", description="Codec of the gradients that data-parallel ranks sum."
    )
    share: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Share of a gradient's values that top_k, dct and sparse_loco send.",
    )
    activations: Literal["dense", "top_k", "adatopk"] = Field(
        "dense",
        description="Codec of hidden states between pipeline stages: top_k keeps equally many values at "
        "every cut, adatopk more where the link is faster.",
    )
    activation_ratio: float = Field(
        10.0,
        ge=1,
        description="Hidden size over the values of a token that cross a cut, the slowest with adatopk.",
    )
    link_seconds: tuple[float, ...] = Field(
        (), description="With adatopk, seconds that equal bytes take over the link of every cut, in order."
    )
    lifespan: int = Field(
        100, ge=1, description="Optimiser steps between two computations of dct's threshold."
    )

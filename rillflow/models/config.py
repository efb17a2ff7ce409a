"""Settings of a model: one that exists, or a small new one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.config.section import Section


class NewModel(Section):
    """A small decoder made from a config, with random weights and a tokeniser of single characters."""

    architecture: str = Field("qwen2", description="A causal language model type of transformers.")
    hidden: int = Field(128, gt=0, description="Hidden size.")
    layers: int = Field(4, gt=0, description="Number of decoder layers.")
    heads: int = Field(4, gt=0, description="Query heads; they divide the hidden size.")
    kv_heads: int = Field(2, gt=0, description="Key/value heads; they divide the query heads.")
    context: int = Field(256, gt=0, description="Longest prompt plus answer, in tokens.")
    alphabet: str = Field(
        "0123456789+-*/=() .,?:ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz\n",
        min_length=1,
        description="Characters the tokeniser knows; anything else is an error.",
    )

    @property
    def intermediate(self) -> int:
        """Size of the feed-forward layer."""
        return 3 * self.hidden


class ModelConfig(Section):
    """Which model a role starts from: exactly one of ``path`` and ``new``."""

    path: str | None = Field(None, description="A directory with a Hugging Face model, or a hub name.")
    new: NewModel | None = Field(None, description="A small new model instead.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Type of the weights and the arithmetic."
    )

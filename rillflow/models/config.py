"""Settings of a model: an existing one, or a small new one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import Field

from rillflow.config.schema import Section
from rillflow.errors import ConfigError
from rillflow.placement.mesh import divisors


class NewModel(Section):
    """A small new decoder with random weights and a tokeniser of single characters."""

    architecture: str = Field("qwen2", description="A causal language model type of transformers.")
    hidden: int = Field(128, gt=0, description="Hidden size.")
    layers: int = Field(4, gt=0, description="Number of decoder layers.")
    heads: int = Field(4, gt=0, description="Query heads; they divide the hidden size.")
    kv_heads: int = Field(2, gt=0, description="Key/value heads; they divide the query heads.")
    context: int = Field(256, gt=0, description="Longest prompt and completion together, in tokens.")
    init_std: float | None = Field(
        None,
        gt=0,
        description="Standard deviation of the initial weights; left out, the architecture's default, "
        "mostly 0.02. A narrow model learns faster with 1 / sqrt(hidden).",
    )
    alphabet: str = Field(
        "0123456789+-*/=() .,?:ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz\n",
        min_length=1,
        description="Characters of the tokeniser; any other character is an error.",
    )

    @property
    def intermediate(self) -> int:
        """Size of the feed-forward layer."""
        return 3 * self.hidden


class AdapterConfig(Section):
    """An adapter that is trained in place of the weights: two small matrices for each linear layer."""

    rank: int = Field(16, gt=0, description="Rank of the adapter's matrices.")
    alpha: float = Field(32.0, gt=0, description="Scale of the adapter: alpha / rank multiplies its output.")
    kind: Literal["lora", "rslora", "dora"] = Field(
        "lora",
        description="lora; rslora, which divides alpha by the square root of the rank; dora, which also "
        "learns row magnitudes.",
    )
    targets: tuple[str, ...] = Field(
        (),
        description="Names of the layers to adapt, such as q_proj; left out, every linear layer of the "
        "decoder body.",
    )
    base: Literal["full", "int8", "4bit"] = Field(
        "full",
        description="Precision of the frozen base's linear weights: full; int8, with a scale for each output "
        "row; 4bit, NF4 as in QLoRA, which needs the extra quant.",
    )

    @property
    def untargeted(self) -> AdapterConfig:
        """The same settings without targets, which a recipe may omit and a directory names."""
        return self.model_copy(update={"targets": ()})


BASES = get_args(AdapterConfig.model_fields["base"].annotation)
"""Precisions of a frozen base."""


class ModelConfig(Section):
    """The model a role starts from: exactly one of ``path`` and ``new``."""

    path: str | None = Field(None, description="A directory with a Hugging Face model, or a hub name.")
    new: NewModel | None = Field(None, description="Make a small new model instead.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description='Data type of weights and arithmetic; left out or "auto", by device and model size.',
    )
    adapter: AdapterConfig | None = Field(None, description="Train an adapter and freeze the model.")


def misfits(new: NewModel) -> Iterator[ConfigError]:
    """Yield an error for each pair of inconsistent sizes of a new model."""
    yield from _misfit("heads", new.heads, "hidden", new.hidden)
    yield from _misfit("kv_heads", new.kv_heads, "heads", new.heads)
    if new.hidden % new.heads == 0 and new.hidden // new.heads % 2:
        yield ConfigError(
            f"policy.model.new.hidden is {new.hidden} and heads is {new.heads}",
            why=f"rotary positions need an even head size, not {new.hidden // new.heads}",
            fix=f"try hidden = {2 * new.hidden}",
        )


def _misfit(part: str, count: int, of: str, whole: int) -> Iterator[ConfigError]:
    """Yield an error if ``count`` does not divide ``whole``; it suggests the nearest divisor."""
    if whole % count:
        yield ConfigError(
            f"policy.model.new.{part} is {count} and {of} is {whole}",
            why=f"{part} must divide {of}; {whole} / {count} leaves {whole % count}",
            fix=f"try {part} = {min(divisors(whole), key=lambda size: abs(size - count))}",
        )

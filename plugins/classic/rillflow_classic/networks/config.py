"""Settings of the network of a policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from rillflow.config.schema import Section


class NetworkConfig(Section):
    """``[network]``: the network between observations and actions."""

    kind: Literal["auto", "mlp", "cnn", "lstm"] = Field(
        "auto",
        description="mlp; cnn for frames, with one convolution of 3 x 3 if they have less than 36 pixels a "
        "side; lstm after a cnn for frames and after an mlp otherwise; auto: cnn for uint8 frames, else mlp.",
    )
    hidden: tuple[PositiveInt, ...] = Field(
        (64, 64), strict=False, description="Widths of the MLP's layers; [] for none."
    )
    activation: Literal["tanh", "relu"] = Field("tanh", description="Activation of the MLP's layers.")
    shared: bool = Field(False, description="Whether policy and value share the MLP's layers.")
    lstm_size: int = Field(128, gt=0, description="Width of the LSTM.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Arithmetic of the CNN. Its bfloat16 is about twice as fast on a CPU that has it.",
    )

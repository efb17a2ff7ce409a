"""Section: the base of every config record."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of settings; an unknown key or a value of another type is an error.

    Example:
        class Optimizer(Section):
            lr: float = Field(1e-5, gt=0, description="Learning rate.")
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

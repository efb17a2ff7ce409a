"""Section: the base class of every config record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A frozen group of settings; an unknown key or a value of another type is an error.

    Example:
        class Optimizer(Section):
            lr: float = Field(1e-5, gt=0, description="Learning rate.")
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    renamed: ClassVar[Mapping[str, str]] = {}
    """New names of settings by their old names; an error about an old name gives the new one."""

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, data: object) -> object:
        """Merge a given inner section over the default that this class has for it."""
        if not isinstance(data, Mapping):
            return data
        presets = {
            name: field.default.model_dump(exclude_unset=True)
            for name, field in cls.model_fields.items()
            if isinstance(field.default, Section) and name in data and isinstance(data[name], Mapping)
        }
        return {**data, **{name: {**preset, **data[name]} for name, preset in presets.items()}}

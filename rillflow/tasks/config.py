"""Settings of a task: the source of prompts, and the held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from rillflow.config.schema import Section

TAKEN_ARGUMENTS = {
    *(
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
    ),
    *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "tokenizer_kwargs"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
}
"""Arguments of the rendering function: a variable with such a name would not reach the template."""


class TaskConfig(Section):
    """Prompts for training and held-out prompts for evaluation."""

    renamed: ClassVar[Mapping[str, str]] = {"rendered": "chat_template_applied"}

    source: str = Field(
        "arithmetic",
        description="arithmetic, reasoning-gym:NAME, or a .jsonl or .parquet file relative to the recipe.",
    )
    held_out_source: str | None = Field(
        None, description="A file of held-out prompts, instead of rows held out of the source."
    )
    held_out: int = Field(500, ge=0, description="Prompts held out of training; 0 for none.")
    size: int = Field(10_000, gt=0, description="Prompts to generate, if the source generates them.")
    digits: int = Field(2, ge=1, le=6, description="Digits of the built-in arithmetic task's numbers.")
    operators: str = Field("+-", min_length=1, description="Operators of the built-in arithmetic task.")
    too_long: Literal["error", "drop", "cut"] = Field(
        "error",
        description="Rows longer than the context: stop with an error, drop the rows, or cut the "
        "beginning of their prompts. Rows that cannot be cut are dropped. Dropped rows are "
        "counted.",
    )
    chat_template_applied: bool = Field(
        False,
        description="Whether text prompts already have the chat template applied, so that special tokens "
        "in them are read as such.",
    )
    template_arguments: dict[str, Any] = Field(
        {}, description="Variables of the chat template, such as { enable_thinking = false }."
    )

    @field_validator("template_arguments")
    @classmethod
    def _is_free(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(TAKEN_ARGUMENTS & value.keys()):
            raise ValueError(f"{name!r} is set by the rendering itself; use a variable of your template")
        return value

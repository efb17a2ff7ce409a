"""Settings of a task: the source of prompts, and the held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from rillflow.config.schema import Section
from rillflow.tasks.columns import PLACES, ColumnPlan
from rillflow.tasks.example import TAKEN_ARGUMENTS


class TaskConfig(Section):
    """Prompts for training and held-out prompts for evaluation."""

    renamed: ClassVar[Mapping[str, str]] = {"rendered": "chat_template_applied"}

    source: str = Field(
        "arithmetic",
        description="arithmetic, reasoning-gym:NAME, a .jsonl or .parquet file relative to the recipe, or a "
        "Hugging Face data set by name or directory: hf:NAME, hf:NAME:SPLIT or hf:NAME:SUBSET:SPLIT.",
    )
    split: str | None = Field(
        None, description="Split of an hf: source that names none, such as train[:1000]; left out, train."
    )
    subset: str | None = Field(None, description="Configuration of an hf: source that names none.")
    columns: dict[str, str] = Field(
        {},
        description="Columns of the data by the name that the task gives them, such as "
        '{ prompt = "question" }.',
    )
    format: Literal["sharegpt", "alpaca", "hh"] | None = Field(
        None,
        description="Layout of the data: sharegpt (conversations with from and value), alpaca (instruction, "
        "input, output) or hh (chosen and rejected as one text each); left out, the columns of a task.",
    )
    template: str | None = Field(
        None, description="Text of every prompt, with columns of the data in braces, such as {question}."
    )
    system: str | None = Field(
        None, description="System message before every prompt; text prompts become conversations."
    )
    chat: bool = Field(False, description="Whether text prompts become a user's message of a conversation.")
    held_out_source: str | None = Field(
        None, description="A source of held-out prompts, such as hf:NAME:test, instead of rows of the source."
    )
    held_out: int = Field(
        500,
        ge=0,
        description="Prompts held out of training; 0 for none. Left out, 500, or a tenth of the rows if that "
        "is less.",
    )
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
    turns: Literal["last", "all"] = Field(
        "last",
        description="Assistant turns of a conversation that supervised steps learn: the last, or all.",
    )
    clock: str | None = Field(
        None,
        description="Time that the chat template reads as now (strftime_now), such as 2026-11-28T09:30:00. "
        'Left out or "auto": the start of the run, if the template reads the time.',
    )

    @field_validator("template")
    @classmethod
    def _has_a_column(cls, value: str | None) -> str | None:
        if value is not None and not any(found[1] for found in PLACES.finditer(value)):
            raise ValueError("every prompt would be the same; write a column in braces, such as {question}")
        return value

    @property
    def plan(self) -> ColumnPlan | None:
        """How columns are made; None if the data's own are used."""
        plan = ColumnPlan(
            named=self.columns,
            template=self.template,
            system=self.system,
            chat=self.chat,
            format=self.format,
        )
        return None if plan == ColumnPlan() else plan

    @field_validator("clock", mode="before")
    @classmethod
    def _is_a_time(cls, value: Any) -> Any:
        try:
            found = datetime.fromisoformat(value) if isinstance(value, str) else value
        except ValueError:
            raise ValueError("it is no time; write one such as 2026-11-28T09:30:00") from None
        if type(found) is date:  # TOML has dates and times of its own
            found = datetime(found.year, found.month, found.day)
        return (
            found.replace(tzinfo=None).isoformat(timespec="seconds") if isinstance(found, datetime) else found
        )

    @property
    def moment(self) -> datetime | None:
        """Time that chat templates read as now; None: the machine's clock."""
        return None if self.clock is None else datetime.fromisoformat(self.clock)

    @field_validator("template_arguments")
    @classmethod
    def _is_free(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(TAKEN_ARGUMENTS & value.keys()):
            raise ValueError(f"{name!r} is set by the rendering itself; use a variable of your template")
        return value

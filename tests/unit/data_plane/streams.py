"""Stream schemas that tests share."""

from __future__ import annotations

import psutil

from rillflow.data_plane.schema import ColumnType, Schema, StageColumns

INTS = ColumnType(dtype="int64", ragged=True)
NUMBER = ColumnType(dtype="float32")


def diamond(**orders: str) -> Schema:
    """prompt -> sample -> tokens -> score, value (side by side) -> train; score also reads the prompt."""

    def stage(name: str, reads: tuple[str, ...], writes: tuple[str, ...] = ()) -> StageColumns:
        order = orders.get(name, "ready_first")
        return StageColumns(name=name, reads=reads, writes=writes, order=order)  # type: ignore[arg-type]

    return Schema(
        columns={
            "prompt": ColumnType(dtype="int64", ragged=True, per="group"),
            "tokens": INTS,
            "reward": NUMBER,
            "value": NUMBER,
        },
        stages=(
            stage("sample", ("prompt",), ("tokens",)),
            stage("score", ("prompt", "tokens"), ("reward",)),
            stage("critic", ("tokens",), ("value",)),
            stage("train", ("tokens", "reward", "value")),
        ),
    )


def processes_of(home: str) -> list[psutil.Process]:
    """Return the processes that were started with this folder as an argument."""
    return [each for each in psutil.process_iter(["cmdline"]) if home in (each.info["cmdline"] or ())]

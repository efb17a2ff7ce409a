"""Settings of a sweep: its file, one recipe over seeds, cases and a grid."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rillflow.config.schema import Section


class MedianConfig(Section):
    """Median stopping rule (Golovin and others, KDD 2017, section 3.2.2)."""

    after: int = Field(1, ge=1, description="Steps before which no run is stopped.")
    runs: int = Field(
        3, ge=1, description="Fewest other runs with results up to a step, for a run to be stopped there."
    )


class SweepConfig(Section):
    """One recipe, run with several settings and seeds."""

    recipe: str = Field(description="The recipe's TOML file, relative to the sweep's file.")
    dir: str | None = Field(
        None, min_length=1, description="Directory of the sweep; runs/sweeps/NAME of the file if left out."
    )
    seeds: int | tuple[int, ...] = Field(
        1, description="Seeds of each case, or how many: 3 stands for 0, 1 and 2."
    )
    set: dict[str, Any] = Field({}, description="Settings of every run, by dotted key.")
    grid: dict[str, tuple[Any, ...]] = Field(
        {}, description="Values of settings by dotted key; every combination of them is a case."
    )
    cases: dict[str, dict[str, Any]] = Field(
        {}, description="Named cases: settings by dotted key; with a grid, every combination of each."
    )
    at_once: int = Field(1, ge=1, description="Runs at the same time.")
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads of a run; 0 divides the usable cores by at_once. Recipes may say it.",
    )
    on: Literal["local", "ray"] = Field(
        "local", description="Run on this machine, or as tasks of a Ray cluster with a shared file system."
    )
    address: str | None = Field(
        None,
        description="Ray cluster to join, as host:port or auto; left out, one of its own on this machine.",
    )
    stop: MedianConfig | None = Field(
        None, description="Stop runs whose held-out results are below the median; left out, none is stopped."
    )

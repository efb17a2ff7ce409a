"""Settings of the rollout engine ``service``: the section ``rollout.service`` of a recipe."""

from __future__ import annotations

from pydantic import Field

from rillflow.config.schema import Section


class ServiceConfig(Section):
    """Settings of the engine service, whose rows other programs sample over HTTP."""

    host: str = Field(
        "127.0.0.1", min_length=1, description="Address that each sampler rank listens on, IPv4."
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the first sampler rank, and of the next ones from there; 0: free.",
    )
    token_file: str | None = Field(
        None,
        min_length=1,
        description="File with the token of every request; required if host is not loopback. Left out, a "
        "new token.",
    )
    check_share: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Share of the rows whose log probabilities the sampler's rank computes again; the first "
        "row of each program and version always.",
    )
    check_tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest difference of a log probability in such a row. Left out, 0.001 in float32, "
        "else 0.05 in the mean of the row.",
    )
    timeout_s: float = Field(
        600.0, gt=0, description="Longest wait in seconds for the next row before the run stops."
    )

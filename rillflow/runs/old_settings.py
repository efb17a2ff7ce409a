"""Old settings: the present names of settings in the config of a run that an older version began.

config.json ─ present ─> the same values, in the sections that recipes have now
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rillflow.runs.json_lines import JSON

_ALGORITHM = (
    "freshness",
    "async_mode",
    "on_stale",
    "syncs_per_step",
    "oversample_prompts",
    "oversample_samples",
)
_ROLLOUT = ("stream_chunks", "gather_rows", "gather_replicas", "gather_by", "keep_cache")


def present(config: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return a run's config with the order of its steps in the section ``schedule``.

    Older versions kept it in ``algorithm`` and ``rollout``.
    """
    algorithm, rollout = config.get("algorithm"), config.get("rollout")
    if "schedule" in config or not isinstance(algorithm, dict) or not isinstance(rollout, dict):
        return config
    flat: dict[str, Any] = {
        **{name: algorithm[name] for name in _ALGORITHM if name in algorithm},
        **{name: rollout[name] for name in _ROLLOUT if name in rollout},
    }
    return {
        **config,
        "algorithm": {name: value for name, value in algorithm.items() if name not in _ALGORITHM},
        "rollout": {name: value for name, value in rollout.items() if name not in _ROLLOUT},
        "schedule": _schedule(flat),
    }


def _schedule(flat: Mapping[str, Any]) -> dict[str, JSON]:
    """Return the section of settings that were flat; a setting that a run lacks had its default."""
    freshness, chunks = flat.get("freshness", 0), flat.get("stream_chunks", 1)
    samples, prompts = flat.get("oversample_samples", 1.0), flat.get("oversample_prompts", 1.0)
    if flat.get("async_mode") == "ready_first":
        stale: dict[str, JSON] = {
            "on_stale": flat.get("on_stale", "wait"),
            "syncs_per_step": flat.get("syncs_per_step", 1),
            "keep_cache": flat.get("keep_cache", False),
        }
        return {"mode": "ready_first", "freshness": freshness, **stale, "stream_chunks": chunks}
    if freshness:
        return {"mode": "ahead", "freshness": freshness, "stream_chunks": chunks}
    if max(samples, prompts) > 1:
        return {"mode": "tail_batching", "oversample_prompts": prompts, "oversample_samples": samples}
    if flat.get("gather_rows"):
        gathered = {
            name: flat[name] for name in ("gather_rows", "gather_replicas", "gather_by") if name in flat
        }
        return {"mode": "gathering", "gather_replicas": 0, "gather_by": "cache", **gathered}
    return {"mode": "streamed", "stream_chunks": chunks} if chunks > 1 else {"mode": "in_order"}

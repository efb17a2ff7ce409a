"""Graphs: render a graph as text, as Mermaid, or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rillflow.graph.graph import CONTROLLER, Edge, Graph, Stage

_SHOWN = 4
"""Number of fields that an arrow names before it only counts the rest."""


def as_json(graph: Graph) -> dict[str, Any]:
    """Return stages and edges as JSON data."""
    return {
        "name": graph.name,
        "roles": list(graph.roles),
        "stages": [{**asdict(stage), "name": stage.name} for stage in graph.stages],
        "edges": [asdict(edge) for edge in graph.edges],
        "given": list(graph.given),
    }


def as_text(graph: Graph) -> str:
    """Return one line per stage: the source of each field it reads, and the fields it writes."""
    lines = [f"{graph.name}: {len(graph.stages)} stages, roles {', '.join(graph.roles)}"]
    width = max((len(stage.name) for stage in graph.stages), default=0)
    for stage in graph.stages:
        taken = "; ".join(
            f"{_fields(edge.fields)} of {_source(graph, edge)}" for edge in graph.into(stage.index)
        )
        left = f" -> {', '.join(stage.writes)}" if stage.writes else ""
        lines.append(f"{stage.index:3}  {stage.name:<{width}}  {taken or 'nothing'}{left}")
    return "\n".join(lines)


def as_mermaid(*graphs: Graph) -> str:
    """Return a Mermaid flowchart: boxes are stages, rounded boxes formulas, arrows fields.

    A frame per graph.
    """
    if len(graphs) == 1:
        return "\n".join(["flowchart LR", *_flow(graphs[0], "")])
    lines = ["flowchart LR"]
    for number, graph in enumerate(graphs, 1):
        lines += [f"    subgraph phase{number} [{graph.name}]", *_flow(graph, f"p{number}_"), "    end"]
    return "\n".join(lines)


def _flow(graph: Graph, prefix: str) -> list[str]:
    """Return the boxes and arrows of a graph; the prefix makes node names unique."""
    lines = [f"    {prefix}{name}[/{name}/]" for name in graph.given]
    lines += [f"    {prefix}s{stage.index}{_box(stage)}" for stage in graph.stages]
    for edge in graph.edges:
        label = f"|{_fields(edge.fields)}|" if edge.fields else ""
        source = f"s{edge.source}" if edge.source >= 0 else graph.source_name(edge)
        lines.append(f"    {prefix}{source} -->{label} {prefix}s{edge.destination}")
    return lines


def _source(graph: Graph, edge: Edge) -> str:
    name = graph.source_name(edge)
    return name if edge.source < 0 else f"{edge.source} {name}"


def _box(stage: Stage) -> str:
    return f"([{stage.endpoint}])" if stage.role == CONTROLLER else f"[{stage.name}]"


def _fields(fields: tuple[str, ...]) -> str:
    if not fields:
        return "result"
    more = f" and {len(fields) - _SHOWN} more" if len(fields) > _SHOWN else ""
    return ", ".join(fields[:_SHOWN]) + more

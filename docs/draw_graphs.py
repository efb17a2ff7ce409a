"""Draw the graphs of docs/algorithms and of the planner anew, by today's roles; ``make docs`` runs this.

page ─ `rillflow graph RECIPE ...` draws it: ─> the command ─> the mermaid block below
"""

from __future__ import annotations

import io
import json
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

from rillflow.app.graphs import ENDPOINTS, signatures_of
from rillflow.app.role_table import ROLES, SCORERS
from rillflow.cli.main import main

PAGES = Path(__file__).parent / "algorithms"
GRAPHS = PAGES.parents[1] / "plugins/planner/rillflow_planner/graphs.json"
"""Steps of short forms, for the planner."""
BLOCK = re.compile(r"^`rillflow ([^`]+)` draws it:\n\n```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def redrawn(page: str) -> str:
    """A page's text with every graph as its command draws it now; recipes are relative to where we are."""
    return BLOCK.sub(lambda found: found[0].replace(found[2], drawn(found[1])), page)


def drawn(command: str) -> str:
    """What ``rillflow COMMAND`` prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = main(shlex.split(command))
    if code:
        raise SystemExit(code)
    return printed.getvalue()


def graphs_of_recipes() -> dict[str, object]:
    """The step of every shipped algorithm that samples, as ``rillflow plan --algorithm`` has it.

    ``NAME, once`` is the step with one optimiser step, ``NAME, often`` that with several, where they differ.
    """
    found: dict[str, object] = {}
    for recipe in sorted((PAGES.parents[1] / "recipes").glob("*/run.toml")):
        name, own = _last_step(f"graph {recipe} --format json")
        if found.setdefault(name, own) == own:
            for case, minibatches in (("once", 1), ("often", 2)):
                _, other = _last_step(
                    f"graph {recipe} --set algorithm.minibatches={minibatches} --format json"
                )
                if other != own:
                    found.setdefault(f"{name}, {case}", other)
    return found


def _last_step(command: str) -> tuple[str, object]:
    *_, step = json.loads(drawn(command))
    stages = [[stage["role"], stage["endpoint"]] for stage in step["stages"]]
    edges = [[edge["source"], edge["destination"], edge["fields"]] for edge in step["edges"]]
    return step["name"], {"stages": stages, "edges": edges}


def endpoints_of_roles() -> dict[str, object]:
    """The endpoints of every shipped role, by its class."""
    specs = {str(spec.role): spec for spec in (*ROLES.values(), *SCORERS.values())}
    marked = {role: signatures_of(role, spec) for role, spec in specs.items()}
    return {role: {name: asdict(each) for name, each in own.items()} for role, own in marked.items()}


def as_file(found: dict[str, object]) -> str:
    """The text of a file that holds it, a key a line."""
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    ENDPOINTS.write_text(as_file(endpoints_of_roles()), "utf-8")
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(redrawn(path.read_text("utf-8")), "utf-8")
    if GRAPHS.parent.is_dir():  # the plugin may be left out
        GRAPHS.write_text(as_file(graphs_of_recipes()), "utf-8")

"""The package ``app`` has no circle of imports, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

APP = Path(__file__).parents[2] / "rillflow" / "app"
PREFIX = "rillflow.app"


def run_imports(tree: ast.AST) -> Iterator[ast.ImportFrom | ast.Import]:
    """Yield the imports that run, now or in a function; names for type hints alone do not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield node
        else:
            yield from run_imports(node)


def imported(tree: ast.AST) -> set[str]:
    """Return the modules that a module imports."""
    modules = set[str]()
    for node in run_imports(tree):
        if isinstance(node, ast.Import):
            modules |= {each.name for each in node.names}
        elif node.module is not None:
            modules |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return modules


def app_imports() -> Mapping[str, set[str]]:
    """Return the modules of ``app`` that each of its modules imports."""
    files = {
        ".".join((PREFIX, *file.relative_to(APP).with_suffix("").parts)).removesuffix(".__init__"): file
        for file in APP.rglob("*.py")
    }
    return {name: imported(ast.parse(file.read_text())) & {*files} for name, file in files.items()}


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one circle; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_of_app_imports_itself_by_way_of_others() -> None:
    imports = app_imports()
    assert len(imports) > 40
    assert circle(imports) == []


def test_a_circle_through_a_function_is_seen() -> None:
    text = (
        "from __future__ import annotations\n\ndef late():\n    from rillflow.app.two import run\n    run()\n"
    )
    assert imported(ast.parse(text)) >= {"rillflow.app.two"}
    assert {*circle({"one": {"two"}, "two": {"one"}})} == {"one", "two"}
    hint = "if TYPE_CHECKING:\n    from rillflow.app.two import Two\n"
    assert imported(ast.parse(hint)) == set()

"""Layers: a package imports lower layers, and packages listed before it in its own layer.

The table is the one of docs/architecture.md, so the page and the code cannot differ.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.plugins import PARTS, SHIPPED

CLASSIC = "plugins/classic/rillflow_classic/"
ADAPTERS = {
    "transformers": ("rillflow/models/", "plugins/links/rillflow_links/remote/remote_model.py"),
    "tokenizers": ("rillflow/models/",),
    "rich": ("rillflow/runs/progress.py",),
    "pyarrow": ("rillflow/tasks/",),
    "datasets": ("rillflow/tasks/huggingface.py",),
    "math_verify": ("rillflow_parts/scorers/math_answers.py",),
    "reasoning_gym": ("rillflow/tasks/",),
    "psutil": (),
    "starlette": (
        *(f"rillflow/serving/{name}.py" for name in ("http_body", "request_reader")),
        "rillflow_parts/endpoint/openai_server.py",
        "rillflow_parts/watch/",
        *(f"plugins/service/rillflow_service/{name}.py" for name in ("http_app", "app", "engine_app")),
        *(f"plugins/training_service/rillflow_training_service/{name}.py" for name in ("app", "listing")),
    ),
    "verifiers": ("rillflow_parts/environments/verifiers_adapter.py",),
    "openenv": ("rillflow_parts/environments/openenv_adapter.py",),
    "openai": ("rillflow_parts/environments/verifiers_adapter.py",),
    "uvicorn": ("rillflow/serving/server.py", "plugins/service/rillflow_service/__main__.py"),
    "ray": ("rillflow/workers/ray", "rillflow_parts/sweeps/ray_commands.py"),
    "cloudpickle": ("rillflow/workers/messages.py",),
    "vllm": ("rillflow_parts/vllm/core.py",),
    **{name: (f"rillflow_parts/trackers/{name}.py",) for name in ("wandb", "tensorboard", "mlflow")},
    "google": ("plugins/training_service/rillflow_training_service/wire.py",),
    "envpool": (CLASSIC + "environments/",),
    "ale_py": (CLASSIC + "environments/",),
    "pettingzoo": (CLASSIC + "environments/",),
    "gymnasium": (CLASSIC,),
    "zmq": (CLASSIC + "streams/",),
    "PIL": (CLASSIC + "evaluation.py",),
    "fsspec": ("plugins/links/rillflow_links/",),
    "zstandard": ("plugins/links/rillflow_links/codecs/sparse.py",),
    "ot": ("plugins/merging/rillflow_merging/transport.py",),
    **{f"rillflow_{name}": (f"plugins/{name}/",) for name in SHIPPED},
}
"""Paths of the package and the plugins that may import a third-party module or a plugin."""
HEAVY = ("torch", "transformers", "tokenizers", "rich", "pyarrow", "reasoning_gym", "safetensors", "numpy")


def ranks(page: str) -> dict[str, int]:
    """Return the rank of each package in the architecture page's table; a package imports smaller ranks."""
    rows = re.findall(r"^\| \d \w+ \| ([^|]+) \|", page, flags=re.MULTILINE)
    return {
        name: rank for rank, name in enumerate(name for row in rows for name in re.findall(r"`(\w+)`", row))
    }


@pytest.fixture(scope="module")
def order(root: Path) -> dict[str, int]:
    return ranks((root / "docs/architecture.md").read_text("utf-8"))


def modules(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a file imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides where it goes"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(path: str) -> str:
    return Path(path).parts[1].removesuffix(".py")


def upward(source: Any, order: dict[str, int]) -> list[str]:
    """Return the imports of a file that go to a later package."""
    own = package_of(source.path)
    if own == "__init__":
        return []
    found = [name.split(".")[1] for name in modules(source.tree) if name.startswith("rillflow.")]
    found = [name for name in found if not name.startswith("__")]
    return [f"{source.path} imports {name}" for name in found if name != own and order[name] >= order[own]]


def uses_of(page: str) -> dict[str, set[str]]:
    """Return the parts of the architecture page's table, each with the other parts that it may import."""
    section = page.partition("| part | brings | imports |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]+\|([^|]*)\|$", section, flags=re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", imports)) for name, imports in rows}


@pytest.fixture(scope="module")
def uses(root: Path) -> dict[str, set[str]]:
    return uses_of((root / "docs/architecture.md").read_text("utf-8"))


def across(source: Any, uses: dict[str, set[str]]) -> list[str]:
    """Return the imports of parts from a file outside their own part, except for those that it uses."""
    top, own = Path(source.path).parts[:2]
    allowed = {own, *uses.get(own, ())} if top == "rillflow_parts" else set()
    found = [name.split(".")[1] for name in modules(source.tree) if name.startswith("rillflow_parts.")]
    found += ["every part" for name in modules(source.tree) if name == "rillflow_parts"]
    return [f"{source.path} imports the part {name}" for name in found if name not in allowed]


def misplaced(source: Any) -> list[str]:
    """Return the third-party imports of a file that belong in an adapter elsewhere."""
    found = {name.split(".")[0] for name in modules(source.tree)} & set(ADAPTERS)
    return [
        f"{source.path} imports {name}"
        for name in sorted(found)
        if not source.path.startswith(ADAPTERS[name])
    ]


def test_every_package_is_in_the_table(package: list[Any], order: dict[str, int]) -> None:
    found = {package_of(source.path) for source in package} - {"__init__"}
    assert found == set(order)


def test_no_import_goes_up(package: list[Any], order: dict[str, int]) -> None:
    assert [line for source in package for line in upward(source, order)] == []


def test_the_core_imports_no_part_and_parts_import_no_other(
    package: list[Any], parts: list[Any], uses: dict[str, set[str]]
) -> None:
    assert [line for source in (*package, *parts) for line in across(source, uses)] == []


def test_every_part_is_in_the_table_and_is_an_entry_point(
    parts: list[Any], uses: dict[str, set[str]], root: Path
) -> None:
    folders = {Path(source.path).parts[1] for source in parts} - {"__init__.py"}
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    assert folders == PARTS.keys() == uses.keys()
    assert project["entry-points"]["rillflow.plugins"] == {
        name: f"rillflow_parts.{name}.plugin:PLUGIN" for name in PARTS
    }


def test_third_party_names_stay_in_their_adapter(
    package: list[Any], parts: list[Any], plugins: list[Any]
) -> None:
    assert [line for source in (*package, *parts, *plugins) for line in misplaced(source)] == []


def test_a_package_file_holds_its_docstring_and_no_import(package: list[Any], parts: list[Any]) -> None:
    for source in (*package, *parts):
        if not source.path.endswith("__init__.py"):
            continue
        assert ast.get_docstring(source.tree), f"{source.path} says nothing"
        if source.path in ("rillflow/__init__.py", "rillflow/formulas/__init__.py"):
            continue  # the packages whose names are used as package.name; their imports are lazy
        at_import = [node for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        named = [
            node
            for node in at_import
            if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        ]
        assert named == [], f"{source.path} imports"


def test_every_module_says_what_lives_there(package: list[Any], parts: list[Any], plugins: list[Any]) -> None:
    assert [
        source.path for source in (*package, *parts, *plugins) if not ast.get_docstring(source.tree)
    ] == []


def test_settings_import_nothing_heavy(root: Path) -> None:
    """Imports all config files and the recipe in a new interpreter."""
    files = [file.relative_to(root) for file in (root / "rillflow").rglob("config.py")]
    names = [".".join(file.with_suffix("").parts) for file in files] + ["rillflow.app.recipe"]
    assert len(names) >= 7
    code = f"import sys, importlib\nfor name in {names}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert set(done.stdout.split()) & set(HEAVY) == set()


def test_the_scans_can_fail(source: Any, order: dict[str, int]) -> None:
    bad = source(
        "rillflow/records/bad.py",
        "from rillflow.cli import main\nimport rillflow.training.loss, transformers",
    )
    assert upward(bad, order) == [
        "rillflow/records/bad.py imports cli",
        "rillflow/records/bad.py imports training",
    ]
    assert misplaced(bad) == ["rillflow/records/bad.py imports transformers"]
    another = source("plugins/merging/rillflow_merging/bad.py", "import rillflow_planner, ot")
    assert len(misplaced(another)) == 2
    lazy = source("rillflow/training/bad.py", "def f():\n    from rillflow import rollout")
    assert upward(lazy, order) == ["rillflow/training/bad.py imports rollout"]
    part = source("rillflow/app/bad.py", "import rillflow_parts\nfrom rillflow_parts.watch import api")
    uses = {"watch": {"report"}, "other": set[str]()}
    assert across(part, uses) == [
        "rillflow/app/bad.py imports the part watch",
        "rillflow/app/bad.py imports the part every part",
    ]
    text = "from rillflow_parts.watch import api\nimport rillflow_parts.report.html"
    assert across(source("rillflow_parts/watch/a.py", text), uses) == []
    assert len(across(source("rillflow_parts/other/a.py", text), uses)) == 2
    good = source("rillflow/models/good.py", "import transformers\nfrom rillflow import errors, __version__")
    assert upward(good, order) == misplaced(good) == []
    with pytest.raises(AssertionError, match="relative import"):
        list(modules(source("rillflow/a.py", "from . import b").tree))


def test_the_table_is_read_in_order(order: dict[str, int]) -> None:
    assert (
        order["errors"]
        < order["records"]
        < order["formulas"]
        < order["models"]
        < order["training"]
        < order["cli"]
    )


def test_the_way_of_a_batch_names_ten_files_and_functions_that_exist(root: Path) -> None:
    page = (root / "docs/architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| `(\w+)` \|", page, flags=re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, 11))
    for _, file, name in rows:
        tree = ast.parse((root / file).read_text("utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert name in defined, f"{file} has no {name}"


def test_what_an_addition_changes_is_shown_in_files_that_exist(root: Path) -> None:
    page = (root / "docs/architecture.md").read_text("utf-8")
    section = page.partition("## What an addition changes")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+/[\w./]+)`", section)
    assert len(named) >= 8 and [name for name in named if not (root / name).exists()] == ["app/role_table.py"]

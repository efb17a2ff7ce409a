"""Lines: the code of plans and of the hand-written forms, counted as ``docs/size.py`` counts it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from benchmark_actors import learner_of, learning_actor, settings_of

from rillflow.workers.backend import Pool
from rillflow.workers.inline import InlineBackend
from rillflow_classic.algorithms.registry import algorithm_of
from rillflow_classic.system import CallSystem
from rillflow_classic.worker_set import WorkerSet

HERE = Path(__file__).parent
PLUGIN = HERE.parents[1] / "plugins" / "classic" / "rillflow_classic"
PLANS = {
    "a2c": ("ppo", ("plan",)),
    "a3c": ("a3c", ("plan",)),
    "ppo": ("ppo", ("plan",)),
    "dqn": ("dqn", ("plan", "train_from_replay")),
    "apex": ("apex", ("plan", "count_steps", "learn")),
}
"""Module of the hand-written form of every algorithm, and the functions of its plan."""
Lines = set[tuple[str, int]]


def size() -> ModuleType:
    """Return ``docs/size.py``."""
    spec = importlib.util.spec_from_file_location("size", HERE.parents[1] / "docs" / "size.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_lines(path: Path, first: int = 1, last: int = 10**6) -> Lines:
    """Return the lines of code of a part of a file, without imports."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    counted = size()
    imports = {
        number
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.If)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    documentation = counted.docstring_lines(tree)
    lines = text.splitlines()
    return {
        (str(path), number)
        for number in range(first, min(last, len(lines)) + 1)
        if number not in imports | documentation
        and lines[number - 1].strip()
        and not lines[number - 1].strip().startswith("#")
    }


def of_function(path: Path, name: str) -> Lines:
    """Return the lines of code of a function; its module is not imported, because Ray is set up later."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return code_lines(path, node.lineno, node.end_lineno or node.lineno)
    raise LookupError(f"{path} has no function {name}")


def with_helpers(path: Path, name: str) -> Lines:
    """Return the lines of a hand-written function and of the functions of ``actors.py`` that it calls."""
    helpers = HERE / "hand_written" / "actors.py"
    trees = {each: ast.parse(each.read_text("utf-8")).body for each in (path, helpers)}
    functions = {
        node.name: (each, node)
        for each, nodes in trees.items()
        for node in nodes
        if isinstance(node, ast.FunctionDef)
    }
    found: Lines = set()
    waiting = [name]
    while waiting:
        each, node = functions.pop(waiting.pop(), (path, None))
        if node is not None:
            found |= of_function(each, node.name)
            waiting += [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
    return found


def ran_while(work: Callable[[], Any]) -> Lines:
    """Return the lines of the functions of the operators that run while some work is done, in any thread."""
    ran: set[CodeType] = set()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            ran.add(frame.f_code)

    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    places = tuple(str(PLUGIN / name) for name in ("operators", "system.py", "worker_set.py"))
    found: Lines = set()
    for code in ran:
        if code.co_filename.startswith(places) and code.co_name != "<module>":
            lines, first = inspect.getsourcelines(code)
            found |= code_lines(Path(code.co_filename), first, first + len(lines) - 1)
    return found


def run_inline(name: str) -> None:
    """Make a few items of a plan in this process."""
    backend = InlineBackend()
    found, settings = algorithm_of(name), settings_of(name)
    pools = {"actors": 2, **({} if found.pools is None else found.pools(settings))}
    backend.open([Pool(name=pool, size=count, world=1) for pool, count in pools.items()])
    actors = WorkerSet(backend, "actors", partial(learning_actor, name, 4, 8))
    system = CallSystem(actors, {"policy": learner_of(name)})
    for _ in islice(found.plan(system, settings), 3):
        pass
    backend.close()


def lines_table() -> str:
    """Return the table of code lines."""
    rows = [
        "| algorithm | plan | by hand | ratio | plan with shared | by hand with shared | operators in all |",
        "|---|---|---|---|---|---|---|",
    ]
    shared = code_lines(HERE / "hand_written" / "actors.py")
    replay = code_lines(HERE / "hand_written" / "replay.py")
    files = (PLUGIN / "operators").glob("*.py")
    whole = sum(size().code(path.read_text("utf-8")).total() for path in files)
    for name, (module, functions) in PLANS.items():
        names = vars(sys.modules[algorithm_of(name).plan.__module__])
        own = {
            each
            for function in functions
            for each in of_function(Path(inspect.getsourcefile(names[function]) or ""), function)
        }
        hand = with_helpers(HERE / "hand_written" / f"{module}.py", "train")
        ran = own | ran_while(partial(run_inline, name))
        rows.append(
            f"| {name} | {len(own)} | {len(hand)} | {len(hand) / len(own):.1f} | {len(ran)} "
            f"| {len(hand | (shared | replay if name == 'apex' else shared))} | {whole} |"
        )
    return "\n".join(rows)

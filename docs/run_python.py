"""Runs the Python of a page or a notebook: its cells in order, as one program in a folder of its own.

    python docs/run_python.py docs/notebooks/first_run.ipynb     writes what its cells give into it
    python docs/run_python.py --check docs/python.md             changes nothing; a cell that fails ends it
    python docs/run_python.py --check README.md --inside FOLDER  the same, in a folder that is there

A notebook is run as Jupyter does it: the text of a cell can be looked up, and the value of its last
expression is shown. Jupyter itself is not needed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import linecache
import os
import re
import sys
import tempfile
from code import InteractiveInterpreter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Notebook(InteractiveInterpreter):
    """One namespace; an error in a cell is raised."""

    def __init__(self) -> None:
        module = ModuleType("__main__")
        sys.modules["__main__"] = module
        super().__init__(vars(module))
        self.shown: list[object] = []

    def showtraceback(self) -> None:
        """Let an error through."""
        raise

    def run(self, text: str, number: int) -> list[dict[str, Any]]:
        """What a cell gives, as a notebook's file has it."""
        name, self.shown, said = f"<cell {number}>", [], io.StringIO()
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        body = ast.parse(text, name).body
        last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
        sys.displayhook = self.shown.append
        with contextlib.redirect_stdout(said):
            self.runcode(compile(ast.Module(body, []), name, "exec"))
            self.runcode(compile(ast.Interactive(last), name, "single"))
        outputs: list[dict[str, Any]] = []
        if said.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": lines(said.getvalue())})
        for value in self.shown:
            if value is not None:
                result = {"execution_count": number, "metadata": {}, "output_type": "execute_result"}
                outputs.append({"data": data_of(value), **result})
        return outputs


def data_of(value: object) -> dict[str, list[str]]:
    """A value as text, and as HTML where it has some."""
    found = {"text/plain": lines(repr(value))}
    if "_repr_html_" in dir(value):
        found = {"text/html": lines(value._repr_html_()), **found}  # type: ignore[attr-defined]
    return found


def lines(text: str) -> list[str]:
    """A text as a notebook's file has it."""
    return text.splitlines(keepends=True)


@contextlib.contextmanager
def entered(inside: Path | None) -> Iterator[None]:
    """Make a folder, or else a new one, the present one; restore what cells change of the process."""
    before, main, shown = Path.cwd(), sys.modules["__main__"], sys.displayhook
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(inside or folder)
        try:
            yield
        finally:
            os.chdir(before)
            sys.modules["__main__"], sys.displayhook = main, shown


def run_file(path: Path, *, check: bool, inside: Path | None = None) -> None:
    """Run a page's blocks, or a notebook's cells, whose outputs are then written or, to check, compared."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        with entered(inside):
            notebook = Notebook()
            for number, block in enumerate(BLOCK.findall(text), 1):
                notebook.run(block, number)
        return
    document = json.loads(text)
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    with entered(inside):
        notebook = Notebook()
        for number, cell in enumerate(cells, 1):
            outputs = notebook.run("".join(cell["source"]), number)
            kinds = [[each["output_type"] for each in found] for found in (outputs, cell["outputs"])]
            if check and kinds[0] != kinds[1]:
                raise SystemExit(f"{path}, cell {number}: gives {kinds[0]}, and {kinds[1]} are in the file")
            cell.update(outputs=outputs, execution_count=number)
    if not check:
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run every file that is named."""
    parser = argparse.ArgumentParser(description="Run the Python of pages and notebooks.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="compare a notebook's outputs, write nothing")
    parser.add_argument("--inside", type=Path, metavar="FOLDER", help="run here, not in a new folder")
    arguments = parser.parse_args(argv)
    for path in arguments.files:
        run_file(path.absolute(), check=arguments.check, inside=arguments.inside)
    return 0


if __name__ == "__main__":
    sys.exit(main())

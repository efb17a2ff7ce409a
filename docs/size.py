"""Count the lines of code of every package, part and plugin: ``make size`` prints, ``make docs`` writes them.

    python docs/size.py            # print the tables
    python docs/size.py --write    # put them into docs/architecture.md as well

A line of code has a token that is neither a comment nor part of a docstring.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rillflow"
PAGE = Path(__file__).parent / "architecture.md"
TABLE = re.compile(r"(?<=<!-- written by make docs -->\n\n)(\|.*\n)+")
PARTS = ROOT / "rillflow_parts"
PART_TABLE = re.compile(r"(?<=<!-- parts, written by make docs -->\n\n)(\|.*\n)+")
PLUGIN_TABLE = re.compile(r"(?<=<!-- plugins, written by make docs -->\n\n)(\|.*\n)+")
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code(text: str) -> Counter[str]:
    """Return the lines of code of a Python file, without indentation, and how often each occurs."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    every = text.splitlines()
    return Counter(every[line - 1].strip() for line in lines - docstring_lines(ast.parse(text)))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of statements that are only a string: docstrings of modules, functions, attributes."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def sizes(package: Path = PACKAGE) -> dict[str, tuple[int, int]]:
    """Return files and lines of code by package, the largest first; modules outside of any are one entry."""
    files, lines = Counter[str](), Counter[str]()
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package).parts
        name = inner[0] if len(inner) > 1 else "top level"
        files[name] += 1
        lines[name] += code(path.read_text("utf-8")).total()
    return {name: (files[name], count) for name, count in lines.most_common()}


def part_sizes(parts: Path = PARTS) -> dict[str, tuple[int, int]]:
    """Return files and lines of code by part, the largest first."""
    return {name: counts for name, counts in sizes(parts).items() if name != "top level"}


def plugin_sizes(plugins: Path = ROOT / "plugins") -> dict[str, tuple[int, int]]:
    """Return files and lines of code by plugin, without its tests, the largest first."""
    found = {}
    for package in plugins.glob("*/rillflow_*/__init__.py"):
        files, lines = (sum(each) for each in zip(*sizes(package.parent).values(), strict=True))
        found[f"plugins/{package.parts[-3]}"] = (files, lines)
    return dict(sorted(found.items(), key=lambda plugin: -plugin[1][1]))


def table(found: dict[str, tuple[int, int]], title: str = "package") -> str:
    """Return the sizes as a Markdown table."""
    rows = [f"| `{name}` | {files} | {lines:,} |" for name, (files, lines) in found.items()]
    files, lines = (sum(each) for each in zip(*found.values(), strict=True))
    head = [f"| {title} | files | lines of code |", "|---|---:|---:|"]
    return "\n".join([*head, *rows, f"| together | {files} | {lines:,} |"]) + "\n"


def main() -> None:
    """Print the tables; with ``--write`` put them into the page."""
    core, parts, plugins = sizes(), part_sizes(), plugin_sizes()
    tables = {TABLE: table(core), PART_TABLE: table(parts, "part"), PLUGIN_TABLE: table(plugins, "plugin")}
    everything = sum(lines for counts in (core, parts, plugins) for _, lines in counts.values())
    sys.stdout.write("\n".join([*tables.values(), f"everything: {everything:,} lines of code\n"]))
    if "--write" in sys.argv[1:]:
        page = PAGE.read_text("utf-8")
        for place, rows in tables.items():
            page = place.sub(rows, page)
        PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()

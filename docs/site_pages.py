"""Site: copy every page of the repository into one folder, for a generator of sites (`make site`).

    pages of the repository ──┬─> build/pages, at their path in the repository, so links stay as written
    files that a page links ──┘   a source file becomes a page with its code, a folder a list of its pages
    $formula$ ──────────────────> MathML, which browsers draw without a script

A generator reads one folder only, and pages in docs/ also link to recipes, plugins, results and sources.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "plugins", "recipes", "benchmarks", "examples", "clusters")
CODE = re.compile(
    r"^ *(?P<fence>`{3,}|~{3,}).*?^ *(?P=fence)|(?P<marks>`+).+?(?P=marks)", re.MULTILINE | re.DOTALL
)
"""Blocks and spans of code, which stay as they are."""
LINK = re.compile(r"(\]\(\s*<?)([^)\s>#]+)")
FORMULA = re.compile(r"\$\$(?P<block>.+?)\$\$|(?<![\\\w$])\$(?P<inline>[^$\n]+?)\$(?!\w)", re.DOTALL)
PICTURES = {".svg", ".png", ".jpg"}
LANGUAGES = {".py": "python", ".toml": "toml", ".js": "js", ".yaml": "yaml", ".sbatch": "bash"}


def write_pages(folder: Path) -> None:
    """Write the pages of the repository, and the files that they link, into a folder that is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {path: path.read_text("utf-8") for path in _pages()}
    linked = {target for page, text in pages.items() for target in _linked(page, text)}
    linked = {path for path in linked - pages.keys() if path / "README.md" not in pages}
    made = {_name(path): _converted(path, text) for path, text in pages.items()}
    made |= {_page_of(path): _shown(path) for path in linked if path.suffix not in PICTURES}
    for name, text in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    for path in linked:
        if path.suffix in PICTURES:
            (folder / _name(path)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / _name(path))


def _pages() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    for name in FOLDERS:
        yield from (path for path in (ROOT / name).rglob("*.md") if "node_modules" not in path.parts)


def _converted(page: Path, text: str) -> str:
    """Return a page with links to the pages made of source files, and with formulas as MathML."""

    def pointed(match: re.Match[str]) -> str:
        path = _resolved(page, match[2])
        if path is None or path.suffix in {".md", *PICTURES}:
            return match[0]
        return match[1] + os.path.relpath(ROOT / _page_of(path), page.parent)

    return _outside_code(text, lambda prose: FORMULA.sub(_formula, LINK.sub(pointed, prose)))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return a text whose parts outside code are changed."""
    parts, end = list[str](), 0
    for code in CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def _formula(match: re.Match[str]) -> str:
    source = match["block"] or match["inline"]
    return str(convert(source.strip(), display="block" if match["block"] else "inline"))


def _linked(page: Path, text: str) -> Iterator[Path]:
    """Yield the files and folders of the repository that a page links to."""
    for match in LINK.finditer(CODE.sub("", text)):
        path = _resolved(page, match[2])
        if path is not None:
            yield path


def _resolved(page: Path, target: str) -> Path | None:
    """Return the file or folder that a link names; None if it is on another site or does not exist."""
    path = Path(os.path.normpath(page.parent / unquote(target)))
    return path if "://" not in target and path.is_relative_to(ROOT) and path.exists() else None


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _page_of(path: Path) -> str:
    """Return the name of the page that shows a source file or a folder."""
    return _name(path / "README.md") if path.is_dir() else f"{_name(path)}.md"


def _shown(path: Path) -> str:
    """Return a page with the code of a file, or with the pages of a folder."""
    if path.is_dir():
        lines = [f"- [{_title(each)}]({each.name})" for each in sorted(path.glob("*.md"))]
        return "\n".join([f"# {path.name.capitalize()}", "", *lines, ""])
    fence = "~" * 12
    head = ["---", "search:", "  exclude: true", "---", "", f"# {_name(path)}", ""]
    language = LANGUAGES.get(path.suffix, "text")
    return "\n".join([*head, f"{fence} {language}", path.read_text("utf-8").rstrip(), fence, ""])


def _title(page: Path) -> str:
    first = next((line for line in page.read_text("utf-8").splitlines() if line.startswith("# ")), page.stem)
    return first.removeprefix("# ")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))

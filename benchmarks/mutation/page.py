"""The page of a study, written from its lines only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEAD = """# Mutation study

<!-- written by python benchmarks/mutation --page from the JSONL and TOML files of its name -->
"""


OUT_OF_DATE = "**Out of date**: a third of the code, or more, has changed since this commit.\n"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a study, with the last one of each mutant."""
    found = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return list({line["name"]: line for line in found}.values())


def page(lines: Sequence[dict[str, Any]], equivalent: Mapping[str, str], *, is_old: bool) -> str:
    """Return the page: share of detected mutants, packages, operators, survivors, equivalent mutants.

    Args:
        lines: lines of the study.
        equivalent: reasons of mutants that change nothing, by name.
        is_old: whether the study is out of date (``age.is_out_of_date``); the page then says so.
    """
    if not lines:
        return HEAD + "\nNo mutant was tried yet.\n"
    lines, ahead = in_turn(lines)
    counted = [line for line in lines if line["seen_by"] or line["name"] not in equivalent]
    argued = [line for line in lines if not line["seen_by"] and line["name"] in equivalent]
    seen = sum(bool(line["seen_by"]) for line in counted)
    low, high = interval(seen, len(counted))
    commit, seed = lines[0]["commit"], lines[0]["seed"]
    paths = lines[0].get("within", [])  # a study of the whole package may have lines without it
    tests = lines[0].get("tests", [])  # and a study of all tests without these
    out = [
        HEAD,
        *([OUT_OF_DATE] if is_old else ()),
        f"Commit {commit}, `python benchmarks/mutation --mutants {len(lines)} --seed {seed}"
        + "".join(f" {each}" for each in ["--within", *paths] if paths)
        + "".join(f" {each}" for each in ["--tests", *tests] if tests)
        + "`:",
        f"{len(lines)} random mutants of {', '.join(paths) or 'the package and its plugins'},"
        + " each tried once."
        + (
            f" ({ahead} later ones of the draw were tried before their turn and do not count.)"
            if ahead
            else ""
        ),
        f"{len(argued)} of them change nothing that can be seen (argued below).",
        f"Tests saw {seen} of the other {len(counted)}: **{seen / max(1, len(counted)):.0%}**"
        f" (95% interval {low:.0%} to {high:.0%}).\n",
        "Lines are drawn uniformly, then an operator of the line, then one of its mutants. A mutant runs",
        "against tests that run its line, up to a budget of processor time, not against the whole suite.\n",
        *shares("package", counted, lambda line: line["file"].split("/")[1].removesuffix(".py")),
        *shares("operator", counted, lambda line: line["operator"]),
        "## Survivors\n",
        "| place | operator | before | after |\n|---|---|---|---|",
        *(
            f"| {line['file']}:{line['line']} | {line['operator']} | {code(line['before'])}"
            f" | {code(line['after'])} |"
            for line in counted
            if not line["seen_by"]
        ),
        "\n## Equivalent\n",
        "| place | before | after | why no test can see it |\n|---|---|---|---|",
        *(
            f"| {line['file']}:{line['line']} | {code(line['before'])} | {code(line['after'])} |"
            f" {equivalent[line['name']]} |"
            for line in argued
        ),
    ]
    return "\n".join(out) + "\n"


def in_turn(lines: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return the lines up to the first mutant of the draw without one, and the number of lines after it."""
    by_place = {line["place"]: line for line in lines}
    first_gap = next(place for place in range(len(by_place) + 1) if place not in by_place)
    return [by_place[place] for place in range(first_gap)], len(by_place) - first_gap


def shares(title: str, lines: Sequence[dict[str, Any]], key: Any) -> list[str]:
    """Return a table of mutants and detected mutants, by a key of the line."""
    out = [f"| {title} | mutants | seen | share |\n|---|---|---|---|"]
    for name in sorted({key(line) for line in lines}):
        own = [bool(line["seen_by"]) for line in lines if key(line) == name]
        out.append(f"| {name} | {len(own)} | {sum(own)} | {sum(own) / len(own):.0%} |")
    return [*out, ""]


def interval(seen: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share (Wilson 1927)."""
    if not count:
        return 0.0, 1.0
    z, share = 1.959964, seen / count
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


def code(text: str) -> str:
    """Return code as a table cell of at most 80 characters."""
    line = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return f"`{line if len(line) <= 80 else line[:77] + '...'}`"

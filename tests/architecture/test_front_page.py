"""The tables of the front page and of docs/support.md match the numbers of the result pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRONT = (ROOT / "README.md").read_text("utf-8")
SUPPORT = (ROOT / "docs/support.md").read_text("utf-8")


def cells(page: str, row: str) -> list[list[str]]:
    """Return the cells after the first one of every table row of a result page with this name."""
    lines = (ROOT / "benchmarks/results" / page).read_text("utf-8").splitlines()
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [found[1:] for found in split if found[0] == row]


def shown_ratios(what: str, peer: str, page: str = SUPPORT) -> list[float]:
    """Return the ratios of a row of a page."""
    for line in page.splitlines():
        if line.startswith("|") and what in line and peer in line:
            return [float(cell) for cell in line.strip("| ").split("|")[-1].split(",")]
    raise LookupError(f"the page has no row of {what} against {peer}")


@pytest.mark.parametrize("page", [FRONT, SUPPORT], ids=["README", "support"])
def test_ratios_to_trl(page: str) -> None:
    steps = [float(row[-1]) for row in cells("grpo_step.md", "TRL GRPOTrainer")]
    assert shown_ratios("grpo_step.md", "TRL", page) == steps
    long, _, short, _ = (float(row[-1]) for row in cells("dpo_step.md", "TRL DPOTrainer"))
    assert shown_ratios("dpo_step.md", "TRL", page) == [long, short]
    (theirs,), (ours,) = (cells("grpo_step_gpu.md", engine) for engine in ("TRL GRPOTrainer", "Rillflow"))
    assert shown_ratios("grpo_step_gpu.md", "TRL", page) == [round(float(theirs[2]) / float(ours[2]), 1)]


def test_ratios_of_generation() -> None:
    """Equal lengths come first, the 256 log-normal rows third, in float32 and then in bfloat16."""
    native, vllm = cells("generation.md", "native"), cells("generation.md", "vLLM")
    to_generate = [float(row[-1].removesuffix("x")) for row in native]
    assert shown_ratios("equal lengths", "`generate`") == to_generate[::3]
    assert shown_ratios("256 rows", "`generate`") == to_generate[2::3]
    speeds = [[float(row[0].replace(",", "")) for row in rows] for rows in (native, vllm)]
    ratios = [ours / theirs for ours, theirs in zip(*speeds, strict=True)]
    assert shown_ratios("equal lengths", "vLLM") == pytest.approx(ratios[::3], abs=0.005)


def test_ratio_of_resharding() -> None:
    (ours, *_), (whole, *_) = cells("resharding.md", "ours")[0], cells("resharding.md", "gather the model")[0]
    assert shown_ratios("resharding.md", "gather") == [round(float(whole) / float(ours), 1)]


def test_families_are_counted() -> None:
    page = (ROOT / "benchmarks/results/families.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page if line.startswith("|")]
    tried = [row for row in rows if len(row) == 4 and row[0] not in ("type", "---")]
    trained = [row for row in tried if not row[1].startswith("no")]
    assert f"{len(tried)} families" in SUPPORT and f"{len(trained)} train;" in SUPPORT
    kinds = {
        "native engine and vLLM": (True, True),
        "native engine only": (True, False),
        "vLLM only": (False, True),
        "neither yet": (False, False),
    }
    for kind, sampled in kinds.items():
        found = re.search(rf"^\| {kind} \| (.*) \|$", SUPPORT, re.M)
        assert found is not None
        names = found[1].replace("DeepSeek V2 and V3", "DeepSeek V2, DeepSeek V3").split(", ")
        expected = [row for row in trained if (row[2].startswith("yes"), row[3].startswith("yes")) == sampled]
        assert len(names) == len(expected), f"{kind}: {[row[0] for row in expected]}"


def test_every_algorithm_page_is_linked() -> None:
    pages = {path.name for path in (ROOT / "docs/algorithms").glob("*.md")} - {"README.md"}
    index = (ROOT / "docs/algorithms/README.md").read_text("utf-8")
    assert {page for page in pages if f"algorithms/{page}" not in SUPPORT} == set()
    assert {page for page in pages if f"({page}" not in index} == set()
    assert "docs/algorithms/README.md" in FRONT and "docs/support.md" in FRONT

"""The documentation site: every link and heading resolves, and no formula is left as source."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("latex2mathml")

ROOT = Path(__file__).parents[2]


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    config = (ROOT / "mkdocs.yml").read_text().replace("build/pages", str(folder / "pages"))
    (folder / "mkdocs.yml").write_text(config)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_page_is_in_the_site(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    subprocess.run([sys.executable, str(ROOT / "docs/site_pages.py"), str(pages)], check=True)
    done = built(tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site/docs/algorithms/grpo.html").read_text()
    assert "<math" in page and not re.search(r"\$\S[^<]*\$", page)
    code = (tmp_path / "site/rillflow/algorithms/grpo.py.html").read_text()
    assert "def" in code and "GRPO" in code, "a linked source file is a page"
    assert "GRPO" in (tmp_path / "site/search/search_index.json").read_text()

    (pages / "README.md").write_text("[gone](nowhere.md)")
    assert built(tmp_path).returncode != 0, "a broken link fails the build"

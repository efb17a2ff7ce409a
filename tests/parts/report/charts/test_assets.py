"""The shared scripts: the library is the published one, and the modules join to one script."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from rillflow_parts.report.charts import assets

PUBLISHED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""SHA-256 of the files in uplot-1.6.32.tgz of the npm registry, whose own digest there is
sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==."""
OWN = [*assets.FOLDER.glob("*.js")]
REPORT = assets.FOLDER.parent / "report.js"
_NAME = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
_IMPORTED = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";$', re.MULTILINE)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_library_is_shipped_as_it_was_published(name: str) -> None:
    found = (assets.FOLDER / "vendor" / name).read_bytes()
    assert hashlib.sha256(found).hexdigest() == PUBLISHED[name]


def test_the_modules_of_a_report_join_to_one_script() -> None:
    texts = [*map(assets.asset, assets.CHARTS), REPORT.read_text("utf-8")]
    joined = assets.joined(texts)
    assert not re.search(r"^(import|export)\b", joined, re.MULTILINE)
    assert "</script" not in joined.lower() and "</script" not in assets.asset(assets.LIBRARY).lower()
    names = _NAME.findall("\n".join(texts))
    assert len(names) > 40 and len(names) == len(set(names))


def test_every_import_names_something_that_its_module_exports() -> None:
    require_exports([*OWN, REPORT])


def require_exports(files: Sequence[Path]) -> None:
    """Require that each import of some scripts names an export of another one."""
    exports = {
        file.name: set(
            re.findall(
                r"^export (?:async )?(?:function|const|let|class) (\w+)",
                file.read_text("utf-8"),
                re.MULTILINE,
            )
        )
        for file in files
    }
    for file in files:
        for names, source in _IMPORTED.findall(file.read_text("utf-8")):
            assert set(re.findall(r"\w+", names)) <= exports[source], f"{file.name} from {source}"


def test_a_report_joins_each_module_after_those_that_it_imports() -> None:
    for place, name in enumerate(assets.CHARTS):
        needed = {source for _, source in _IMPORTED.findall(assets.asset(name))}
        assert needed <= set(assets.CHARTS[:place])


def test_no_script_makes_markup_or_code_of_a_text() -> None:
    assert len(OWN) > 5
    require_plain([*OWN, REPORT])


def require_plain(files: Sequence[Path]) -> None:
    """Require that files of a page have no markup or code from texts, and at most 500 lines."""
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\bon\w+=\""
    for file in files:
        assert not re.search(banned, file.read_text("utf-8")), file.name
        assert len(file.read_text("utf-8").splitlines()) <= 500

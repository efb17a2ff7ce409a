"""Plugins outside the package: modules and metadata in a temporary folder, as pip installs them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rillflow.app.plugins import discovered

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a distribution as pip does, with a module unless the text is None."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def put(name: str, text: str | None) -> None:
        module = f"plugin_of_test_{name}"
        if text is not None:
            (folder / f"{module}.py").write_text(text)
        metadata = folder / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[rillflow.plugins]\n{name} = {module}:PLUGIN\n")
        discovered.cache_clear()

    yield put
    discovered.cache_clear()
    for name in [name for name in sys.modules if name.startswith("plugin_of_test_")]:
        del sys.modules[name]

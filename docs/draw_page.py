"""Take the pictures of `rillflow watch`: ``python docs/draw_page.py``, with playwright and chromium.

made-up runs ─ rillflow watch ─ browser ─> docs/pictures/*.png
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.clients.sample_runs import write_samples  # noqa: E402

PICTURES = ROOT / "docs/pictures"
RUNS = "runs=lr-1e-5,lr-5e-5"
VIEWS = {
    "watch-curves": (RUNS, "canvas", 1280, 760, "light"),
    "watch-rollouts": (
        f"view=rollouts&{RUNS}&q=remainder&step=100-200&sort=reward",
        "mark",
        1280,
        560,
        "light",
    ),
    "watch-tokens": (
        "view=rollout&runs=agent&at=30&epoch=2&prompt=1&sample=1",
        ".tokens i",
        1280,
        520,
        "dark",
    ),
    "watch-narrow": (f"{RUNS}&axes=log", "canvas", 400, 720, "dark"),
}
"""Pictures: the address, what must be drawn, width, height, and colours."""


def main() -> None:
    """Write the runs, start the server, and take every picture."""
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        runs, cache = Path(folder) / "runs", Path(folder) / "cache"
        write_samples(runs)
        command = [
            sys.executable,
            "-m",
            "rillflow.cli.main",
            "watch",
            str(runs),
            "--cache",
            str(cache),
            "--port",
            "0",
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert server.stdout is not None
        found = re.search(r"http://\S+\?token=\S+", server.stdout.readline())
        if found is None:
            raise SystemExit("rillflow watch printed no address")
        with sync_playwright() as started:
            browser = started.chromium.launch(
                executable_path=browser_path, args=["--no-sandbox"] * (os.geteuid() == 0)
            )
            for name, (query, wanted, width, height, scheme) in VIEWS.items():
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(found[0])
                page.goto(f"{found[0].partition('?')[0]}?{query}")
                picture(page, wanted, PICTURES / f"{name}.png")
                page.close()
            browser.close()
        server.terminate()
        server.wait()


def picture(page: Page, wanted: str, file: Path) -> None:
    """Write a picture once the view is drawn."""
    page.wait_for_selector(wanted, timeout=60_000)
    page.wait_for_timeout(2000)
    file.parent.mkdir(exist_ok=True)
    page.screenshot(path=file)


if __name__ == "__main__":
    main()

"""The page of `rillflow watch`, and the report, in a real browser, wide and narrow."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import rillflow
from rillflow.records.metrics import Mean
from rillflow.runs.formatting import visible
from rillflow.runs.run_directory import RunDirectory
from tests.clients.sample_runs import HOSTILE, write_samples

playwright = pytest.importorskip("playwright.sync_api")
ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
STEPS = 60
BOTH = "runs=lr-1e-5,lr-5e-5"
WIDTHS = [1400, 400]
PAINTED = """() => [...document.querySelectorAll('canvas')].map(canvas => {
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(data.buffer)).size;
})"""
"""Number of colours in every canvas; 1 for an empty one."""
SERIES = """async () => {
  const series = await import('/assets/series.js'), numbers = await import('/assets/numbers.js');
  const dom = await import('/assets/dom.js'), state = await import('/assets/state.js');
  const single = [...Array(100).keys()], ramp = single.map(x => x % 7);
  const tens = [...Array(10).keys()].map(x => 10 * x + 5);
  return {
    constant: series.smoothed(single, single.map(() => 3), 10, 1),
    start: series.smoothed([1, 2], [4, 8], 3, 1),
    gap: series.smoothed([1, 2, 3, 4], [4, 8, null, 6], 3, 1),
    far: series.smoothed([0, 1000], [4, 8], 3, 1),
    buckets: series.smoothed(tens, tens.map(() => 1), 10, 1),
    nearest: [-5, 0, 1.4, 1.6, 3, 9].map(at => series.nearest([0, 1, 2, 3], [5, 6, null, 8], at)),
    automatic: [30, 400, 10000].map(series.automatic),
    broken: series.broken({x: [1, 2, 3], y: [1, 1e300, 3]}, [{first: 1, last: 1}, {first: 2, last: 3}]),
    visible: dom.visible(String.fromCharCode(...Array(0x2100).keys())),
    numbers: [0, 0.01234, 12345, 1.2e-5, NaN, -Infinity].map(numbers.number),
    address: state.readState(state.addressOf({
      ...state.readState(''), runs: NAMES, q: 'a,b&c=100%', from: 1.5,
    })),
    counted: [1, 2].map(count => numbers.counted(count, 'token')),
  };
}"""


@dataclass
class Watched:
    """A page in the browser, and everything that went wrong in it."""

    page: Any
    url: str
    problems: list[str] = field(default_factory=list)

    def open(self, query: str = "", *, wait: str = "canvas") -> Any:
        """Open a view, and wait until it is drawn."""
        self.page.goto(f"{self.url}/{'?' if query else ''}{query}")
        self.page.wait_for_selector(wait)
        return self.page

    def told(self, kind: str, text: str) -> None:
        """Note an error of the console; ``answered`` notes answers with an error."""
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.problems.append(text)

    def answered(self, status: int, url: str) -> None:
        """Note an answer with an error; a prompt is unknown until the index has its run."""
        if status >= 400 and "/api/prompt" not in url:
            self.problems.append(f"{status} {url}")

    def healthy(self) -> None:
        """Check that nothing failed, nothing ran that a model wrote, and nothing is wider than the window."""
        assert self.problems == []
        assert "own" not in self.page.title().split("·")[0]
        width = self.page.evaluate("document.documentElement.scrollWidth")
        assert width <= self.page.viewport_size["width"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    write_samples(made, steps=STEPS)
    return made


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the server; yield its address with the token."""
    pytest.importorskip("rillflow_parts.watch.server")
    cache = tmp_path_factory.mktemp("cache")
    command = [
        sys.executable,
        "-m",
        "rillflow.cli.main",
        "watch",
        str(folder),
        "--port",
        "0",
        "--cache",
        str(cache),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    found = None
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line):
            break
    assert found is not None, "the server printed no address"
    yield found[0]
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no chromium")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"] * (os.geteuid() == 0))
        yield found
        found.close()


def opened(browser: Any, url: str, width: int) -> Watched:
    page = browser.new_page(viewport={"width": width, "height": 1000})
    page.set_default_timeout(60_000)
    watched = Watched(page=page, url=url)
    page.on("console", lambda told: watched.told(told.type, told.text))
    page.on("response", lambda answer: watched.answered(answer.status, answer.url))
    page.on("pageerror", lambda error: watched.problems.append(str(error)))
    return watched


@pytest.fixture(params=WIDTHS)
def each_width(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Watched]:
    watched = signed_in(browser, address, request.param)
    yield watched
    watched.page.close()


@pytest.fixture
def wide(browser: Any, address: str) -> Iterator[Watched]:
    watched = signed_in(browser, address, 1400)
    yield watched
    watched.page.close()


def signed_in(browser: Any, address: str, width: int) -> Watched:
    watched = opened(browser, address.partition("/?")[0], width)
    watched.page.goto(address)
    return watched


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true. The page's policy forbids playwright's way, which evaluates texts."""
    end = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"still false after 60 s: {expression}"
        page.wait_for_timeout(50)


def drag(page: Any, place: int = 1) -> None:
    """Drag over the middle of a chart."""
    over = page.locator(".u-over").nth(place)
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60, steps=5)
    page.mouse.up()


def test_curves_of_two_runs_are_drawn_side_by_side(each_width: Watched) -> None:
    page = each_width.open(BOTH)
    page.wait_for_selector("section[data-metric='reward/score/mean'] canvas")
    assert min(page.evaluate(PAINTED)) > 10
    legend = page.locator("section[data-metric='reward/score/mean'] .legend").inner_text()
    assert "lr-1e-5" in legend and "lr-5e-5" in legend
    assert (
        "bold: moving average, 2 steps"
        in page.locator("section[data-metric='reward/score/mean']").inner_text()
    )
    each_width.healthy()


def test_the_newest_run_is_shown_at_first_and_the_token_leaves_the_address(wide: Watched) -> None:
    wide.page.wait_for_selector("canvas")
    assert "token" not in wide.page.url
    assert len(wide.page.locator(".runs li.chosen").all()) == 1
    wide.healthy()


def test_a_zoom_is_in_the_address_and_reload_and_back_restore_views(wide: Watched) -> None:
    page = wide.open(f"{BOTH}&x=seconds&filter=policy")
    before = page.url
    drag(page)
    until(page, "new URLSearchParams(location.search).has('from')")
    zoomed = page.url
    values = re.findall(r"(?:from|to)=([\d.]+)", zoomed)
    assert len(values) == 2 and 0 < float(values[0]) < float(values[1]) < STEPS * 3
    ranges = (
        "() => [...document.querySelectorAll('.controls input[type=number]')].map(each => Number(each.value))"
    )
    assert page.evaluate(ranges) == [pytest.approx(float(value), rel=1e-4) for value in values]
    page.reload()
    page.wait_for_selector("canvas")
    assert page.url == zoomed
    assert page.locator("section[data-metric]").count() == 3
    page.go_back()
    assert page.url == before
    until(page, "document.querySelector('.controls input[type=number]')?.value === ''")
    wide.healthy()


def test_controls_change_the_address_and_the_curves(wide: Watched) -> None:
    page = wide.open(BOTH)
    page.get_by_label("Smoothing").select_option("10")
    page.get_by_label("Axes").select_option("loglog")
    page.get_by_label("Over").select_option("tokens")
    until(
        page, "document.querySelector('[data-metric=\"reward/score/mean\"]')?.innerText.includes('10 steps')"
    )
    assert {"span=10", "axes=loglog", "x=tokens"} <= set(page.url.partition("?")[2].split("&"))
    page.locator("section[data-metric='policy/kl/mean'] button").click()
    assert page.locator("section[data-metric='policy/kl/mean']").bounding_box()["width"] > 900
    page.locator(".runs input[data-run=agent]").check()
    until(
        page,
        "document.querySelector('[data-metric=\"policy/kl/mean\"] .legend')?.innerText.includes('agent')",
    )
    assert "runs=lr-1e-5,lr-5e-5,agent" in page.url
    page.get_by_label("From").fill("5000")
    page.get_by_label("From").press("Enter")
    until(page, "location.search.includes('from=5000')")
    wide.healthy()


def test_a_curve_that_is_0_by_construction_is_not_drawn(wide: Watched) -> None:
    page = wide.open("runs=agent&filter=mismatch", wait="section[data-metric='mismatch/weight/mean']")
    until(page, "document.body.innerText.includes('Not measured in agent')")
    assert page.locator("canvas").count() == 0
    wide.healthy()


def test_a_text_is_found_marked_filtered_and_paged(each_width: Watched) -> None:
    page = each_width.open(f"view=rollouts&{BOTH},agent&run=lr-5e-5", wait="article")
    page.get_by_label("Text").fill("HENCE")
    page.get_by_role("button", name="Search").click()
    page.wait_for_selector("mark")
    assert "q=HENCE" in page.url
    assert {each.lower() for each in page.locator("mark").all_inner_texts()} == {"hence"}
    assert re.search(r"\d+ rows, found in", page.locator("[role=status].hint").inner_text())
    page.get_by_role("link", name="Next").click()
    until(page, "location.search.includes('offset=50')")
    page.get_by_label("Reward from").fill("0.5")
    page.get_by_label("Steps").fill("10-20")
    page.get_by_role("button", name="Search").click()
    until(page, "location.search.includes('step=10-20') && !location.search.includes('offset')")
    until(
        page,
        "[...document.querySelectorAll('article .badge')].every(each => each.innerText === 'reward 1.00')",
    )
    steps = {
        int(found[1])
        for text in page.locator("article .facts a").all_inner_texts()
        if (found := re.match(r"step (\d+)", text))
    }
    assert steps and steps <= set(range(10, 21))
    each_width.healthy()


def test_a_hostile_answer_is_text_and_its_tokens_have_values(each_width: Watched) -> None:
    page = each_width.open("view=rollout&runs=agent&at=12&epoch=1&prompt=3&sample=0", wait=".tokens i")
    body = page.locator("main").inner_text()
    shown = HOSTILE.replace("\u202e", "<U+202E>")
    assert shown in body.replace("\n", "") and "\u202e" not in body
    assert page.locator("main script, main img").count() == 0
    inserted = page.locator(".tokens .inserted").all_inner_texts()
    assert (
        "calculator" in "".join(inserted)
        and page.locator(".tokens .given").first.inner_text() == "Is 221 prime?"
    )
    page.locator(".answer.tokens i").first.hover()
    assert re.search(
        r"token 2 .*probability [\d.]+%, log probability -[\d.e-]+, version 1\d",
        page.locator(".token-reading").inner_text(),
    )
    page.locator(".answer.tokens").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".answer.tokens .at").count() == 1
    page.get_by_label("Colour tokens by").select_option("version")
    until(page, "location.search.includes('colour=version')")
    colours = page.evaluate(
        "new Set([...document.querySelectorAll('.answer.tokens i')].map(one => one.style.background)).size"
    )
    assert colours == 2
    each_width.healthy()


def test_a_prompt_over_time_leads_to_its_answers(each_width: Watched) -> None:
    page = each_width.open("view=prompt&runs=lr-1e-5&prompt=1")
    assert "What is 17 * 23?" in page.locator("main").inner_text()
    page.get_by_role("link", name="sample 2").first.click()
    page.wait_for_selector(".tokens i")
    assert f"at={STEPS}" in page.url and "sample=2" in page.url
    page.go_back()
    page.wait_for_selector("canvas")
    each_width.healthy()


def test_differences_and_timeline_are_drawn(each_width: Watched) -> None:
    page = each_width.open(f"view=configs&{BOTH}", wait="table")
    text = page.locator("main").inner_text()
    assert "policy.lr" in text and "algorithm.steps" not in text
    page.goto(f"{each_width.url}/?view=timeline&{BOTH}&first=3&last=5&scale=4")
    page.wait_for_selector(".lane-track i")
    titles = page.locator(".lane-track i").evaluate_all("bars => bars.map(bar => bar.title)")
    assert any(title.startswith("policy.update, step 4: ") for title in titles)
    assert any("waits for" in title for title in titles)
    each_width.healthy()


def test_a_growing_run_is_drawn_without_a_reload(wide: Watched, folder: Path) -> None:
    def grow(run: RunDirectory, first: int, last: int) -> None:
        for step in range(first, last + 1):
            run.log_metrics(step, "grpo", {"reward/score/mean": Mean(total=step / 100, count=1)})

    with RunDirectory.open(folder / "live", {"algorithm": {"steps": 100}}) as run:
        grow(run, 1, 5)
        page = wide.open("runs=lr-1e-5&filter=reward/score")
        page.wait_for_selector(".runs input[data-run=live]")
        page.locator(".runs input[data-run=lr-1e-5]").uncheck()
        page.locator(".runs input[data-run=live]").check()
        output = "document.querySelector('[data-metric=\"reward/score/mean\"] output')?.innerText"
        until(page, f"{output} === '0.0500'")
        grow(run, 6, 9)
        until(page, f"{output} === '0.0900'")
        assert "9 of 100 steps" in page.locator(".runs").inner_text()
    wide.healthy()


def test_errors_say_what_to_do(wide: Watched) -> None:
    page = wide.open("runs=nothing&view=configs", wait=".bad")
    assert "there is no run 'nothing'" in page.locator("main").inner_text()
    page.context.clear_cookies()
    page.goto(wide.url)
    assert "open the address that rillflow watch printed" in page.locator("body").inner_text()


def test_smoothing_numbers_and_hidden_characters_are_what_the_page_says(wide: Watched) -> None:
    names = ["a, b", "100%", "%2C", "a&b=c", "übung"]
    found = wide.page.evaluate(SERIES.replace("NAMES", json.dumps(names)))
    read = found["address"]
    assert (read["runs"], read["q"], read["from"], read["to"]) == (names, "a,b&c=100%", 1.5, None)
    assert found["constant"] == pytest.approx([3.0] * 100)
    assert found["start"] == pytest.approx([4.0, (4 * 0.5 * 0.5 + 8 * 0.5) / (0.5 * 0.5 + 0.5)])
    assert found["gap"] == [*found["start"], None, 6.0]
    assert found["far"][1] == pytest.approx(8.0)
    assert found["buckets"] == pytest.approx([1.0] * 10)
    assert found["nearest"] == [0, 0, 1, 1, 3, 3]
    assert found["automatic"] == [0, 10, 200]
    assert found["broken"]["x"] == [1, 1.5, 2, 3] and found["broken"]["y"] == [1, None, None, 3]
    assert found["numbers"] == ["0", "0.0123", "12,345", "1.2e-5", "not a number", "-infinite"]
    assert found["visible"] == visible("".join(map(chr, range(0x2100))))
    assert found["counted"] == ["1 token", "2 tokens"]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_draws_itself_from_one_file(browser: Any, folder: Path, width: int) -> None:
    report = opened(browser, rillflow.open_run(folder / "agent").report().as_uri(), width)
    page = report.page
    page.goto(report.url)
    page.wait_for_selector("canvas")
    assert min(page.evaluate(PAINTED)) > 5
    drag(page)
    until(page, "location.hash.includes('from=')")
    page.reload()
    page.wait_for_selector("canvas")
    assert page.get_by_label("From").input_value() != ""
    page.get_by_label("Filter").fill("entropy")
    assert page.locator(".curves > .card:visible h3").all_inner_texts() == ["Entropy"]
    assert page.locator("noscript").count() > 5
    report.healthy()
    page.close()


def test_a_notebook_draws_the_first_curves_of_a_run(browser: Any, folder: Path, tmp_path: Path) -> None:
    shown = tmp_path / "notebook.html"
    shown.write_text(
        f"<!doctype html><title>notebook</title>{rillflow.open_run(folder / 'lr-1e-5')._repr_html_()}"
    )
    notebook = opened(browser, shown.as_uri(), 900)
    notebook.page.goto(notebook.url)
    frame = notebook.page.frame_locator("iframe")
    frame.locator("canvas").nth(1).wait_for()
    assert frame.locator("h3").all_inner_texts() == ["Held-out accuracy", "Reward"]
    notebook.healthy()
    notebook.page.close()

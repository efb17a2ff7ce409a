"""report.html: one file, complete, safe and small, whatever the run contains."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rillflow.errors import RunDirectoryError
from rillflow.records.metrics import Max, Mean
from rillflow.runs.reader import Evaluation, SpanRecord
from rillflow.runs.run_directory import RunDirectory
from rillflow_parts.report.chart import MAX_POINTS
from rillflow_parts.report.charts.assets import LIBRARY, asset
from rillflow_parts.report.html import style
from rillflow_parts.report.write import write_report
from tests.unit.written_rollouts import write_rollouts

MakeRun = Callable[..., Path]
HOSTILE = "</script><script>alert('x')</script><img src=x onerror=\"alert(1)\">"
ROW = {"epoch": 0, "prompt_id": 0, "sample": 0, "tokens": [1], "logprobs": [-0.5], "versions": [0]}


class Page(HTMLParser):
    """Counts tags and collects texts; fails on unbalanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.attributes: set[str] = set()
        self.charts: list[dict[str, Any]] = []
        self.links: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes |= {name for name, _ in attrs}
        self.charts += [json.loads(value or "") for name, value in attrs if name == "data-chart"]
        self.links += [(tag, value or "") for name, value in attrs if name == "href"]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def report(run: Path) -> tuple[str, Page]:
    text = write_report(run).read_text(encoding="utf-8")
    return text, Page(text)


def test_the_report_tells_the_run(make_run: MakeRun) -> None:
    run = make_run()
    text, page = report(run)
    for expected in (
        "quickstart",
        "finished",
        "0.500 → 0.878",
        "It rose by 0.378; the intervals do not overlap.",
        "rillflow run recipes/arithmetic/run.toml",
        "Supervised loss",
        "Policy loss",
        "Gradient norm: warm_start",
        "Held-out accuracy",
        "They agree.",
        "policy.generate",
        "evaluation, checkpoints and the rest",
        "Rewards of 40,960 rows",
        "Step 21",
        "Best of step 60",
        "Longest",
        "Other metrics (5)",
        '"seed": 0',
        '"torch": "2.13.0"',
    ):
        assert expected in page.text, expected
    assert page.tags["script"] == 2  # the chart library, and the page's own
    assert len(page.charts) == 19  # 14 curves, 5 other metrics
    assert page.tags["svg"] == 1  # the timeline
    assert "<h2>First and last samples</h2>" in text
    assert (run / "report.html").stat().st_size < 200_000
    assert "rollout/tokens/sum" in text


def test_a_gap_that_was_never_measured_is_not_drawn(tmp_path: Path) -> None:
    for name, gap in (("same", 0.0), ("compared", 1e-7)):
        with RunDirectory.open(tmp_path / name, {}) as run:
            run.log_metrics(1, "grpo", {"mismatch/logprob_gap/max": Max(value=gap)})
        page = write_report(tmp_path / name).read_text("utf-8")
        assert ("Sampler against trainer" in page) == bool(gap)
        assert ("They agree." in page) == bool(gap)


def test_what_nothing_compared_is_named_and_not_drawn(tmp_path: Path) -> None:
    never = {"mismatch/logprob_gap/max": Max(value=0.0), "mismatch/weight/mean": Mean(total=1.0, count=1)}
    first = {"mismatch/first_ratio/max": Max(value=1e-7)}
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.log_metrics(1, "grpo", {**never, **first})
    _, page = report(tmp_path / "run")
    assert len(page.charts) == 1 and "First minibatch against the sampler" in page.text
    assert "Not measured, so not drawn: mismatch/logprob_gap/max, mismatch/weight/mean." in page.text


def test_the_first_minibatch_against_the_sampler_is_drawn(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for step in (1, 2):
            run.log_metrics(step, "grpo", {"mismatch/first_ratio/max": Max(value=step * 1e-7)})
    _, page = report(tmp_path / "run")
    assert "First minibatch against the sampler" in page.text and "algorithm.ratio_tolerance" in page.text
    assert "|ratio - 1|" in page.text and "2.0e-7" in page.text


def test_a_score_has_one_name_on_the_page(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        looks = ((0, 0.0, True), (2, 0.4, False))
        for step, reward, is_accuracy in looks:
            found = Evaluation(count=20, mean_reward=reward, correct=0, is_accuracy=is_accuracy)
            run.log_evaluation(step, found)
            run.log_metrics(step + 1, "grpo", {"reward/score/mean": Mean(total=reward, count=1)})
    _, page = report(tmp_path / "run")
    assert "Held-out mean reward" in page.text and "accuracy" not in page.text.lower().split("config")[0]


def test_axes_are_named_and_wide_things_show_that_they_scroll(make_run: MakeRun) -> None:
    text, page = report(make_run())
    assert page.charts and text.count('<figcaption class="axis-x">step</figcaption>') == len(page.charts)
    assert "nats per token" in page.text and "share of ratios" in page.text
    scroll = style()[style().index(".scroll {") :].split("}")[0]
    assert "overflow-x: auto" in scroll and "var(--edge)" in scroll


def test_the_report_needs_nothing_but_itself(make_run: MakeRun) -> None:
    text, page = report(make_run())
    comment = asset(LIBRARY).splitlines()[0]  # the chart library's name and its home page
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text.replace(comment, ""))
    assert not page.attributes & {"src", "srcset"}
    assert page.links and all(tag == "a" and not link.startswith("/") for tag, link in page.links)
    assert not page.tags.keys() & {"link", "img", "iframe", "object"}


def test_nothing_of_the_run_becomes_markup(tmp_path: Path) -> None:
    with RunDirectory.open(
        tmp_path / "a&b <i>", {"policy": {"model": {"path": HOSTILE}}, HOSTILE: HOSTILE}
    ) as run:
        run.log_start({"command": ["rillflow", HOSTILE], "device": HOSTILE})
        for step in (1, 2):
            run.log_span(SpanRecord(step=step, stage=HOSTILE, start_s=0, duration_s=0, rows=0, tokens=0))
            run.log_metrics(step, HOSTILE, {HOSTILE: Mean(total=1.0, count=1)})
            row = {**ROW, "prompt": HOSTILE, "completion": HOSTILE, "finish": HOSTILE, "outcome": HOSTILE}
            chat = [{"role": HOSTILE, "content": HOSTILE}]
            texts = {"token_texts": [HOSTILE], "message": HOSTILE, "reward": float(step)}
            write_rollouts(run.path, step, [row, {**row, "prompt": chat, **texts}])
    text, page = report(tmp_path / "a&b <i>")
    assert page.tags["script"] == 2
    assert "img" not in page.tags
    assert not {name for name in page.attributes if name.startswith("on")}
    assert page.text.count("alert('x')") > 10
    assert "<script>alert" not in text


def test_a_long_run_stays_small_and_every_curve_thin(make_run: MakeRun) -> None:
    run = make_run(steps=900)
    text, page = report(run)
    lengths = [len(curve["x"]) for chart in page.charts for curve in chart["curves"]]
    assert 900 > MAX_POINTS >= max(lengths) > MAX_POINTS // 2
    assert len(text) < 900_000


def test_long_samples_are_cut_and_say_so(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        count = 5000
        long = {"tokens": [1] * count, "logprobs": [-0.5] * count, "versions": [0] * count}
        for finish, texts in (("stop", ["a "] * count), ("length", [])):
            row = {
                **ROW,
                **long,
                "prompt": "p" * 9000,
                "completion": finish * count,
                "finish": finish,
                "reward": 1.0,
            }
            write_rollouts(
                run.path, 1 if texts else 2, [{**row, "sample": i, "token_texts": texts} for i in range(30)]
            )
    text, page = report(tmp_path / "run")
    assert "… 4,700 more tokens" in page.text
    assert "more characters" in page.text
    assert "cut off at the limit" in page.text
    assert len(text) < 200_000


@pytest.mark.parametrize("steps", [0, 1, 20, 21])
def test_a_run_stopped_anywhere_has_a_report(make_run: MakeRun, steps: int) -> None:
    run = make_run(steps=steps)
    (run / "finished.json").unlink()
    _, page = report(run)
    assert ("no step yet" if steps == 0 else f"not finished: {steps} steps") in page.text


def test_a_directory_that_was_only_opened_has_a_report(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run", {}).close()
    _, page = report(tmp_path / "run")
    assert "no step yet" in page.text
    assert "Nothing was evaluated." in page.text


def test_numbers_that_are_not_finite_leave_a_gap_and_are_said(tmp_path: Path) -> None:
    values = [1.0, math.nan, math.inf, 2.0, 1e308, 3.0]
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for step, value in enumerate(values, start=1):
            metrics = {
                "policy/loss/mean": Mean(total=value, count=1),
                "mismatch/logprob_gap/max": Max(value=abs(value)),
            }
            run.log_metrics(step, "grpo", metrics)
    _, page = report(tmp_path / "run")
    assert "2 values are not finite, the first at step 2." in page.text
    assert "Too large for float32 rounding" in page.text
    (loss,) = (chart["curves"][0]["y"] for chart in page.charts if chart["y_name"] == "loss")
    assert loss == [1, None, None, 2, None, 3]


def test_only_the_report_is_written(make_run: MakeRun) -> None:
    run = make_run()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert write_report(run) == run / "report.html"
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after.pop(run / "report.html")
    assert after == before


def test_a_live_run_can_be_looked_at(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.log_metrics(1, "grpo", {"reward/score/mean": Mean(total=1.0, count=2)})
        with (run.path / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 2, "pha')
        _, page = report(run.path)
    assert "not finished: 1 steps" in page.text


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stage_has_one_colour_on_the_page(make_run: MakeRun) -> None:
    run = make_run()
    write_report(run)
    page = (run / "report.html").read_text()
    colours: dict[str, set[str]] = {}
    for colour, stage in re.findall(r'class="key (k\d+)">([a-z_]+\.[a-z_]+)<', page):
        colours.setdefault(stage, set()).add(colour)
    assert {"policy.generate", "policy.update", "reward.score"} <= set(colours)
    assert all(len(each) == 1 for each in colours.values()), colours
    assert len({*map(min, colours.values())}) == len(colours), "and no other stage has it"
    assert page.count('class="key k') > len(colours), "in the bars of time and in the timeline"


def test_speeds_with_and_without_prompts_have_two_names(make_run: MakeRun) -> None:
    run = make_run()
    write_report(run)
    page = (run / "report.html").read_text()
    assert "<th>tokens/s with prompts</th>" in page and "<th>tokens/s</th>" not in page
    assert '"y_name":"sampled tokens per second"' in html.unescape(page)


def test_what_matters_most_is_larger_and_names_its_metric(make_run: MakeRun) -> None:
    run = make_run()
    write_report(run)
    cards = re.findall(r'<section class="card( lead)?"><header><h3>([^<]*)</h3>(.*?)</section>', page_of(run))
    assert [title for lead, title, _ in cards if lead] == ["Held-out accuracy", "Reward"]
    for lead, title, body in cards:
        assert ('"height":320' in html.unescape(body)) is bool(lead), title
    (entropy,) = [body for _, title, body in cards if title == "Entropy"]
    assert '<p class="metric">policy/entropy/mean</p>' in entropy, "the name in the live page and the docs"


def test_the_report_links_to_its_directory_and_to_the_pages_of_its_curves(make_run: MakeRun) -> None:
    run = make_run()
    page = page_of(run)
    assert f'<a href="./">{run.resolve()}</a>' in page
    (link,) = re.findall(r'<a href="([^"]*)">docs/first_day.md</a>', page)
    assert (run / link).resolve() == Path(__file__).resolve().parents[3] / "docs" / "first_day.md"


def test_a_printed_report_keeps_its_colours_and_its_width() -> None:
    printed = style().partition("@media print")[2]
    for rule in (
        "print-color-adjust: exact",
        ".chart canvas {position: static; width: auto !important; max-width: 100%",
    ):
        assert rule in printed
    assert ".grid-cards {grid-template-columns: repeat(2,minmax(0,1fr))}" in printed


def page_of(run: Path) -> str:
    """Return the run's report."""
    write_report(run)
    return (run / "report.html").read_text()

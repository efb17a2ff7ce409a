"""Plugin: attach ``rillflow report`` and ``rillflow timeline``, and write every run's report."""

from __future__ import annotations

from pathlib import Path

from rillflow.app.plugins import PARTS, Command, Plugin
from rillflow.cli.arguments import run_argument
from rillflow_parts.report import commands


class Reports:
    """Reports of runs, for ``launch`` and ``open_run``; see ``rillflow.app.reports``."""

    def write(self, run: Path) -> Path:
        """Write a run's report, and return its path."""
        from rillflow_parts.report.write import write_report

        return write_report(run)

    def comparison(self, run: Path) -> str:
        """Return a run's measured seconds next to its plan's; empty for a run without a plan."""
        from rillflow.runs.run_data import load
        from rillflow_parts.report.predicted import compare, render_comparison

        compared = compare(load(run))
        return "" if compared is None else render_comparison(compared)

    def curves(self, run: Path) -> str:
        """Return the report's first two curves as an element for notebooks."""
        from rillflow.runs.run_data import load
        from rillflow_parts.report.curves import cards
        from rillflow_parts.report.html import el, page

        shown = page(str(run), [el("div", cards(load(run))[:2], class_="grid-cards")])
        return el("iframe", srcdoc=shown, style="width: 100%; height: 25em; border: 0")


HELP = PARTS["report"]
PLUGIN = Plugin(
    commands={
        "report": Command(help=HELP["report"], run=commands.report, add_arguments=run_argument),
        "timeline": Command(
            help=HELP["timeline"], run=commands.timeline, add_arguments=commands.timeline_arguments
        ),
    },
    services={"reports": Reports},
)

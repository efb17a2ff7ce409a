"""Plugin: attach ``rillflow doctor``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from rillflow.app.plugins import PARTS, Command, Plugin
from rillflow.cli.failure import DONE, FAILED


def doctor(arguments: argparse.Namespace) -> int:
    """``rillflow doctor``: report this machine's state, as a run would find it."""
    from rillflow_parts.doctor.doctor import Health, examine

    del arguments
    findings = examine(Path())
    for finding in findings:
        print(f"{finding.health:<5} {finding.name:<14} {finding.what}")
        if finding.fix:
            print(f"      {'':<14} fix: {finding.fix}")
    return FAILED if any(finding.health is Health.FAIL for finding in findings) else DONE


PLUGIN = Plugin(
    commands={
        "doctor": Command(help=PARTS["doctor"]["doctor"], run=doctor, add_arguments=lambda _: None),
    }
)

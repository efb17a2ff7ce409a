"""What fusing saves, predicted and measured, and the note on updates that ran one after the other."""

from __future__ import annotations

import pytest

from rillflow_parts.fusion.fused_calls import FusedCalls
from rillflow_parts.fusion.gains import fused_metrics, unfused_note
from tests.unit.runs.test_passes import alone, fused


def test_the_gain_of_fused_passes_is_predicted_and_measured() -> None:
    found = fused_metrics(fused())
    assert found["fused/gain/mean"].value == pytest.approx(0.4)
    assert found["fused/measured_gain/mean"].value == pytest.approx(1 / 3)
    assert not unfused_note(fused())


def test_a_pipeline_without_a_partner_has_no_gain() -> None:
    assert fused_metrics([alone("policy")]) == {} and not unfused_note([alone("policy")])


def test_updates_in_turn_despite_the_setting_are_told_once() -> None:
    records, told = [alone("critic", 0.0, 0.012), alone("policy", 20.0, 0.012)], list[str]()
    calls = FusedCalls(("policy", "critic"), ("policy", "critic"), told.append)
    for _ in range(2):
        assert list(calls.metrics(records)) == ["fused/gain/mean"]
    (note,) = told
    assert note.startswith("critic.update and policy.update run one after the other") and "1.2%" in note

"""Every number among the loss settings has bounds; a value just outside is refused by name."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rillflow.formulas.config import PolicyLossConfig, ValueLossConfig
from rillflow.formulas.preferences import PairLossConfig
from rillflow.formulas.unpaired import UnpairedLossConfig
from rillflow.graph.loss import LossSection

BOUNDS: list[tuple[type[LossSection], str, list[float], list[float]]] = [
    (PolicyLossConfig, "clip_low", [0, 1], [-0.01, 1.01]),
    (PolicyLossConfig, "clip_high", [0, 1e3], [-0.01]),
    (PolicyLossConfig, "dual_clip", [0, 1.01], [-0.01, 0.5, 1]),
    (PolicyLossConfig, "constant", [0, 1], [-1]),
    (PolicyLossConfig, "kl", [0, 10], [-0.01]),
    (PolicyLossConfig, "kl_bound", [1.01, 4e8], [1, 0, 4.01e8]),
    (PolicyLossConfig, "entropy", [0, 10], [-0.01]),
    (ValueLossConfig, "clip", [0, 10], [-0.01]),
    (PairLossConfig, "beta", [0.01], [0, -0.01]),
    (PairLossConfig, "label_smoothing", [0, 0.49], [-0.01, 0.5]),
    (PairLossConfig, "nll", [0, 10], [-0.01]),
    (PairLossConfig, "gamma", [0, 10], [-0.01]),
    (UnpairedLossConfig, "beta", [0.01], [0, -0.01]),
    (UnpairedLossConfig, "good_weight", [0, 10], [-0.01]),
    (UnpairedLossConfig, "bad_weight", [0, 10], [-0.01]),
]
NEEDS: dict[str, dict[str, object]] = {"gamma": {"kind": "simpo"}}


@pytest.mark.parametrize(("section", "name", "inside", "outside"), BOUNDS, ids=lambda each: str(each)[:24])
def test_a_number_beyond_its_bounds_is_refused(
    section: type[LossSection], name: str, inside: list[float], outside: list[float]
) -> None:
    for value in inside:
        section.model_validate({name: value, **NEEDS.get(name, {})})
    for value in outside:
        with pytest.raises(ValidationError, match=name):
            section.model_validate({name: value, **NEEDS.get(name, {})})


@pytest.mark.parametrize("section", [PolicyLossConfig, ValueLossConfig, PairLossConfig, UnpairedLossConfig])
def test_no_number_is_left_out(section: type[LossSection]) -> None:
    numbers = {
        name for name, field in section.model_fields.items() if field.annotation in (int, float, float | None)
    }
    assert numbers == {name for found, name, _, _ in BOUNDS if found is section}

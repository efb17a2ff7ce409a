"""Damped Gauss-Newton steps within bounds."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from rillflow_planner.calibration import least_squares

LOW, HIGH = np.array([-1.0, -1.0]), np.array([1.0, 1.0])


def to(*target: float) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Return the best point for a target, and every point that was tried."""
    tried: list[NDArray[np.float64]] = []

    def residuals(place: NDArray[np.float64]) -> NDArray[np.float64]:
        tried.append(place.copy())
        return place - np.array(target)

    return least_squares(residuals, np.array([5.0, -7.0]), LOW, HIGH), tried


def test_the_first_point_is_the_start_within_the_bounds() -> None:
    assert to(0.25, 0.5)[1][0].tolist() == [1.0, -1.0]


@pytest.mark.parametrize(("target", "best"), [((0.25, 0.5), (0.25, 0.5)), ((3.0, -0.5), (1.0, -0.5))])
def test_the_best_point_lies_within_the_bounds(
    target: tuple[float, float], best: tuple[float, float]
) -> None:
    assert to(*target)[0].tolist() == pytest.approx(best, abs=1e-3)

"""What a rank has to hold before weights cross, and what lies beside a slice that comes back."""

from __future__ import annotations

import pytest
import torch

from rillflow.errors import WeightError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement, Split
from rillflow.weights.layout import Weight
from rillflow.weights.plan import reshard_plan
from rillflow.weights.resharding import require_shapes


def test_a_rank_whose_share_is_empty_needs_no_tensor() -> None:
    """One row over two ranks: the first has it, the second nothing."""
    weights = {"bias": Weight(name="bias", shape=(1, 4), dtype=torch.float32)}
    layout = {"bias": Placement(Mesh.of(tp=2), {"tp": Split(0)})}
    plan = reshard_plan(weights, layout, layout)
    require_shapes({}, plan, layout, 1)
    with pytest.raises(WeightError, match="rank 0 has no bias"):
        require_shapes({}, plan, layout, 0)

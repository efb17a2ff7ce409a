"""The bound on one token's divergence does not change an ordinary run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from small_recipe import RECIPE, REWARD
from whole_runs import numbers, ran

LEARNS = ("algorithm.steps=4", "algorithm.loss.kl=0.05", "policy.lr=1e-2", "evaluate=none")
LEARNS += ("policy.model.new.layers=1",)


def weights(run: Path) -> list[bytes]:
    newest = max((run / "checkpoints").iterdir())
    return [file.read_bytes() for file in sorted((newest / "policy").glob("*.safetensors"))]


def values(run: Path, name: str) -> list[float]:
    """Return a metric of the steps that sampled."""

    def value(metric: dict[str, Any]) -> float:
        return metric["mean"] if "mean" in metric else metric["largest_share"]

    return [value(step[name]) for step in numbers(run) if name in step]


def test_an_ordinary_run_has_the_bits_of_one_without_a_bound(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE.replace("NAME", "grpo"))
    (tmp_path / "reward.py").write_text(REWARD)
    default = ran(tmp_path / "run.toml", "default", *LEARNS)
    unbounded = ran(tmp_path / "run.toml", "unbounded", *LEARNS, "algorithm.loss.kl_bound=4e8")
    assert values(default, "policy/kl/mean")[-1] > 1e-3, "the policy has left its reference"
    assert values(default, "policy/clamped/share") == [0.0] * 4
    assert numbers(default) == numbers(unbounded) and weights(default) == weights(unbounded)
    assert all(0 < share < 1 for share in values(default, "policy/kl/largest_share")[1:])

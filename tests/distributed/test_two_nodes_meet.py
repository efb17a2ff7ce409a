"""An everyday test of a step on two nodes of a real cluster; the slow tests are in test_two_nodes.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))
from machines import PORT, SHARED, machines, ray_up, why_not
from small_recipe import RECIPE, REWARD

SETTINGS = ["placement.pools={ main = 2 }", "warm_start=none", "evaluate=none", "algorithm.steps=1"]
LEAN = {"RAY_prestart_worker_first_driver": "0"}
"""Ray starts no processes besides the ranks."""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_step_on_two_nodes_has_the_bits_of_one(tmp_path: Path) -> None:
    """On one node the two ranks are threads; other tests show that threads and processes give equal bits."""
    (tmp_path / "run.toml").write_text(RECIPE.replace("NAME", "grpo"))
    (tmp_path / "reward.py").write_text(REWARD)
    one = [*SETTINGS, "placement.backend=inline", f"run.dir={tmp_path}/one"]
    loaded = load_recipe(tmp_path / "run.toml", one)
    launch(loaded, quiet=True)
    with machines(tmp_path) as (first, other):
        ray_up(first, env=LEAN)
        ray_up(other, first, env=LEAN)
        on_both = [*SETTINGS, f"placement.address={first.address}:{PORT}"]
        words = [word for setting in on_both for word in ("--set", setting)]
        first.run("rillflow", "run", f"{SHARED}/run.toml", "--dir", f"{SHARED}/two", *words)
    (start,) = json.loads((tmp_path / "two/environment.json").read_text("utf-8"))["starts"]
    assert {each["address"] for each in start["nodes"].values()} == {first.address, other.address}
    lines = [json.loads((tmp_path / run / "metrics.jsonl").read_text("utf-8")) for run in ("one", "two")]
    first_norm, second_norm = (line["metrics"]["train/grad_norm/mean"] for line in lines)
    assert first_norm == second_norm and first_norm["mean"] > 0, "something was learned"
    one_node, two_nodes = (
        load_file(tmp_path / run / "checkpoints/step-000001/policy/model.safetensors")
        for run in ("one", "two")
    )
    assert one_node.keys() == two_nodes.keys()
    assert all(torch.equal(one_node[name], two_nodes[name]) for name in one_node)

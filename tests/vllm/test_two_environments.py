"""A trainer without vLLM samples through a server in another environment, made by make test-vllm."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rillflow.cli.main import main
from rillflow.runs import layout
from rillflow.runs.reader import rollout_columns

sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))
from small_recipe import RECIPE, REWARD

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here"),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment with vLLM"),
]


def test_a_run_needs_no_vllm_where_a_server_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    recipe = tmp_path / "run.toml"
    recipe.write_text(RECIPE.replace("NAME", "grpo").replace("hidden = 32", "hidden = 128"))
    served = ["--set", "rollout.engine=vllm", "--set", f"rollout.server={json.dumps(str(PYTHON))}"]
    assert main(["check", str(recipe), *served]) == 0
    assert "rollout.server" in capsys.readouterr().out
    found = []
    for name, settings in (("native", []), ("served", served)):
        assert main(["run", str(recipe), "--dir", str(tmp_path / name), "--quiet", *settings]) == 0
        run = tmp_path / name
        found.append([rollout_columns(run, step)["tokens"] for step in layout.rollout_files(run)])
    assert found[0][0] == found[1][0] and len(found[0]) == len(found[1]) == 2


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.timeout(900)
def test_two_ranks_that_share_the_weights_sample_what_the_native_engine_samples(tmp_path: Path) -> None:
    """Each has a server; the weights are resharded between training and generation."""
    (tmp_path / "reward.py").write_text(REWARD)
    recipe = tmp_path / "run.toml"
    recipe.write_text(RECIPE.replace("NAME", "grpo").replace("hidden = 32", "hidden = 128"))
    two = ["placement.pools={ main = 2 }", "placement.rollout_parallel={ tp = 2 }", "run.threads=1"]
    two.append("placement.train_parallel={ main = { fsdp = 2 } }")
    served = ["rollout.engine=vllm", f"rollout.server={json.dumps(str(PYTHON))}"]
    found = []
    for name, settings in (("native", two), ("served", [*two, *served])):
        words = [word for each in settings for word in ("--set", each)]
        assert main(["run", str(recipe), "--dir", str(tmp_path / name), "--quiet", *words]) == 0
        run = tmp_path / name
        found.append([rollout_columns(run, step)["tokens"] for step in layout.rollout_files(run)])
    assert found[0][0] == found[1][0] and len(found[0]) == len(found[1]) == 2

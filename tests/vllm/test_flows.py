"""Whole runs with vLLM: in the trainer's process, in a pool of the sampler, and as a server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.errors import WeightError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model, save_model
from rillflow.runs import layout
from rillflow.runs.reader import read_metrics, rollout_columns
from rillflow.workers.backend import RankDied

sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))
sys.path.insert(0, str(Path(__file__).parent))
from damaged import KINDS
from small_recipe import RECIPE, REWARD

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` has an environment with it"
)
ALIKE = ["policy.lr=1e-3", "algorithm.loss.kl=0", "algorithm.minibatches=1"]
VLLM = ['rollout.engine="vllm"']
SERVED = [*VLLM, f"rollout.server={json.dumps(sys.executable)}"]
APART = ['placement.roles={ sampler = "answers" }', "placement.pools={ main = 1, answers = 1 }"]
INLINE = "placement.backend=inline"


def written(folder: Path) -> Path:
    """Write the small recipe with a hidden size for which vLLM runs on a CPU."""
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    path = folder / "run.toml"
    path.write_text(RECIPE.replace("NAME", "grpo").replace("hidden = 32", "hidden = 128"))
    return path


def ran(folder: Path, *settings: str) -> list[Any]:
    """Run; return the tokens of every rollout."""
    loaded = load_recipe(written(folder), [f"run.dir={json.dumps(str(folder / 'run'))}", *ALIKE, *settings])
    launch(loaded, quiet=True)
    return tokens(folder / "run")


def tokens(run: Path) -> list[Any]:
    return [rollout_columns(run, step)["tokens"] for step in layout.rollout_files(run)]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ran(tmp_path_factory.mktemp("native") / "run")


def share_alike(found: list[Any], expected: list[Any]) -> float:
    """Return the share of rows, over all steps, with the same tokens."""
    pairs = [
        pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)
    ]
    return sum(one == other for one, other in pairs) / len(pairs)


@pytest.mark.parametrize(
    "form",
    [VLLM, SERVED, [*VLLM, *APART, INLINE], [*SERVED, *APART, INLINE]],
    ids=["here", "served", "apart", "served, apart"],
)
def test_a_run_samples_what_the_native_engine_samples(
    form: Sequence[str], tmp_path: Path, native: list[Any]
) -> None:
    """Every step's weights arrive: rounding, which training amplifies, changes few tokens."""
    found = ran(tmp_path / "run", *form)
    assert found[0] == native[0] and share_alike(found, native) > 0.9
    steps = [each.metrics for each in read_metrics(tmp_path / "run/run") if each.phase == "grpo"]
    gaps = [each["mismatch/logprob_gap/max"].value for each in steps]
    assert len(gaps) == 2 and max(gaps) < 1e-5


@pytest.mark.parametrize("form", [[], SERVED[1:]], ids=["here", "served"])
@pytest.mark.parametrize("damage", [each.capitalize() for each in KINDS])
def test_weights_that_did_not_arrive_whole_sample_nothing(
    damage: str, form: Sequence[str], tmp_path: Path
) -> None:
    if form and damage != "Transposed":
        pytest.skip("one of them shows that a server is asked")
    with pytest.raises(WeightError, match=r"does not sample with version \d+: a token of a fixed text"):
        ran(tmp_path / "run", f'rollout.engine="damaged_engine:{damage}"', "policy.lr=0.03", *form)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return settings for training an adapter with a base on disk."""
    new = NewModel(hidden=128, layers=4, heads=4, kv_heads=2, context=16, alphabet="0123456789+=")
    made = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())
    save_model(made, folder := tmp_path_factory.mktemp("base") / "model")
    named = ["policy.model.new=none", f"policy.model.path={json.dumps(str(folder))}"]
    return [*named, "policy.model.adapter={ rank = 4 }", "policy.lr=1e-2", "warm_start.lr=3e-2"]


@pytest.mark.parametrize("form", [VLLM, [*SERVED, *APART, INLINE]], ids=["here", "served, apart"])
def test_an_adapter_is_sampled_with_beside_its_base(
    form: Sequence[str], tmp_path: Path, base: Sequence[str]
) -> None:
    found, expected = ran(tmp_path / "vllm", *base, *form), ran(tmp_path / "native", *base)
    assert found[0] == expected[0] and share_alike(found, expected) > 0.9


@pytest.mark.parametrize("damage", ["NoAdapter", "StaleAdapter", "ScaledAdapter"])
def test_an_adapter_that_was_not_loaded_samples_nothing(
    damage: str, tmp_path: Path, base: Sequence[str]
) -> None:
    with pytest.raises(WeightError, match=r"does not sample with version \d+: a token of a fixed text"):
        ran(tmp_path / "run", *base, f'rollout.engine="damaged_engine:{damage}"', "rollout.server=none")


def test_a_run_whose_server_dies_says_so_and_goes_on_when_it_is_run_again(tmp_path: Path) -> None:
    import damaged_engine

    damaged_engine.KILLS.append(3)  # after the evaluation and a step
    how = ['rollout.engine="damaged_engine:Killed"', *SERVED[1:], "run.checkpoint_every=1"]
    how.append("run.restarts=0")
    with pytest.raises(RankDied, match=r"has lost its engine: vLLM's server .* ended by SIGKILL"):
        ran(tmp_path / "run", *how)
    before = len(read_metrics(tmp_path / "run/run"))
    assert damaged_engine.KILLS == [] and before == 4
    found = ran(tmp_path / "run", *how)
    assert len(found) == 2 and len(read_metrics(tmp_path / "run/run")) == 5


def test_ready_first_rows_run_on_through_publishes(tmp_path: Path) -> None:
    ahead = [
        'schedule={mode="ahead",freshness=1}',
        'schedule.mode="ready_first"',
        INLINE,
        "algorithm.steps=3",
    ]
    assert len(ran(tmp_path / "run", *SERVED, *APART, *ahead)) == 3


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize(("form", "answers"), [(VLLM, 1), (SERVED, 2)], ids=["here", "served, two"])
def test_it_has_a_pool_of_its_own_on_ray(
    form: Sequence[str], answers: int, tmp_path: Path, native: list[Any]
) -> None:
    """Starts in a new process: vLLM, already loaded here, has imported Ray before it could be protected."""
    path, pools = written(tmp_path), f"placement.pools={{ main = 1, answers = {answers} }}"
    settings = [f"run.dir={json.dumps(str(tmp_path / 'run'))}", *ALIKE, *form, APART[0], pools]
    command = [
        sys.executable,
        "-c",
        "import sys; from rillflow.cli.main import main; sys.exit(main())",
        "run",
    ]
    given = [part for each in settings for part in ("--set", each)]
    subprocess.run([*command, str(path), *given], check=True, timeout=280)
    found = tokens(tmp_path / "run")
    assert found[0] == native[0] and share_alike(found, native) > 0.9

"""Another rollout engine replaces the native one by one setting, or is refused at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rillflow.app.engines import engine_notes
from rillflow.app.facts import RecipeFacts
from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.errors import ConfigError, WeightError
from rillflow.runs import layout
from rillflow.runs.reader import rollout_columns

sys.path.insert(0, str(Path(__file__).parent))
import own_engine
from damaged import KINDS

RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 80
held_out = 10
[policy]
model.new = { hidden = 32, layers = 2, heads = 4, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 4
[algorithm]
name = "grpo"
steps = 2
prompts_per_step = 5
samples_per_prompt = 3
[reward]
function = "reward.py:small"
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""


def facts_of(loaded: Resolved) -> RecipeFacts:
    return RecipeFacts(resolved=loaded)


def ran(folder: Path, *settings: str) -> list[str]:
    """Run; return every written rollout."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    run = folder / "run"
    loaded = load_recipe(folder / "run.toml", [f"run.dir={json.dumps(str(run))}", *settings])
    launch(loaded, quiet=True)
    return [rollout_columns(run, step) for step in layout.rollout_files(run)]


def test_an_engine_of_ones_own_samples_by_one_setting(tmp_path: Path) -> None:
    """It loads each version once, wakes before it samples and sleeps before anything trains."""
    own_engine.ASKED.clear()
    found = ran(tmp_path / "own", 'rollout.engine="own_engine:Noting"', 'algorithm.loss.correction="none"')
    assert found == ran(tmp_path / "native")
    judged, step = ["wake", "generate"], ["generate", "sleep"]
    weights = own_engine.ASKED[1].split()[2]
    assert [
        *("wake", f"load 0 {weights}", "generate"),
        *("wake", *step),
        *("wake", f"load 1 {weights}", *step),
        *("wake", f"load 2 {weights}", judged[1], "sleep"),
    ] == own_engine.ASKED
    assert int(weights) > 10


@pytest.mark.parametrize(
    ("engine", "settings", "what", "why"),
    [
        ("own_engine:Halting", [], "cannot sample the most likely token", "evaluate.temperature is 0"),
        (
            "own_engine:Halting",
            ["evaluate.temperature=1", "algorithm.name=remax"],
            "cannot sample the most likely token",
            "remax calls policy.greedy",
        ),
        (
            "own_engine:Noting",
            ["rollout.top_p=0.9"],
            "cannot restrict sampling",
            "top_k, top_p or min_p",
        ),
        (
            "own_engine:Noting",
            ['schedule={mode="tail_batching",oversample_prompts=2}'],
            "add and abort rows",
            "starts more rows than it trains",
        ),
        ("own_engine:Noting", ["rollout.deterministic=true"], "fixed shapes", "deterministic is true"),
        ("own_engine:Notting", [], "no engine", "own_engine has no 'Notting'"),
        ("own_engine:NoEngine", [], "no engine", "it has no can"),
        ("no_such_package:Engine", [], "cannot be imported", "no_such_package"),
        ("natve", [], "no engine", "no installed plugin brings"),
    ],
)
def test_what_an_engine_cannot_do_is_said_before_anything_starts(
    engine: str, settings: list[str], what: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        ran(tmp_path, f'rollout.engine="{engine}"', *settings)
    assert what in caught.value.what and why in caught.value.why
    assert not (tmp_path / "run" / layout.METRICS).exists()


def test_an_agent_needs_an_engine_that_takes_rows_in_and_out(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    agent = ["rollout.agent.function=agent.py:solve", "evaluate=none"]
    with pytest.raises(ConfigError, match="cannot add and abort rows while others run"):
        engine_notes(
            facts_of(load_recipe(tmp_path / "run.toml", [*agent, "rollout.engine=own_engine:Noting"]))
        )


def test_an_adapter_needs_an_engine_that_runs_it_beside_its_base(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    adapted = ["policy.model.new=none", "policy.model.path=base", "policy.model.adapter.rank=4"]
    own = load_recipe(tmp_path / "run.toml", [*adapted, "rollout.engine=own_engine:Noting"])
    with pytest.raises(ConfigError, match="cannot run an adapter on its base model"):
        engine_notes(facts_of(own))
    assert engine_notes(facts_of(load_recipe(tmp_path / "run.toml", adapted))) == []


@pytest.mark.parametrize(
    ("settings", "correction", "said"),
    [
        ([], "tis", "truncated importance weights correct the difference"),
        (['algorithm.loss.correction="none"'], "none", "nothing corrects the difference"),
        (["algorithm.loss.correction=icepop"], "icepop", "correction is icepop"),
        (
            ["algorithm.old_logprobs=sampler", "algorithm.minibatches=2"],
            "none",
            "nothing corrects the difference",
        ),
        (["algorithm.old_logprobs=sampler"], "tis", "truncated importance weights correct the difference"),
    ],
)
def test_other_arithmetic_has_truncated_weights_and_says_what_loosens(
    settings: Sequence[str], correction: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    native = load_recipe(tmp_path / "run.toml", settings)
    own = load_recipe(tmp_path / "run.toml", [*settings, "rollout.engine=own_engine:Copying"])
    assert native.recipe.algorithm.loss.correction == (correction if correction != "tis" else "none")
    assert own.recipe.algorithm.loss.correction == correction
    (note,) = engine_notes(facts_of(own))
    assert said in note and "must be 1 in the mean" in note and "not bit for bit" in note
    assert engine_notes(facts_of(native)) == []


def test_what_loosens_is_said_as_the_run_begins(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(REWARD)
    settings = [f"run.dir={json.dumps(str(tmp_path / 'run'))}", "rollout.engine=own_engine:Copying"]
    loaded = load_recipe(tmp_path / "run.toml", settings)
    launch(loaded)
    shown = "".join(capfd.readouterr()).replace("\n", " ")
    assert shown.index("computes different log probabilities than the trainer") < shown.index("grpo 1/2")


APART = (
    "placement.pools={ main = 1, answers = 1 }",
    'placement.roles={ sampler = "answers" }',
    "placement.backend=inline",
)


@pytest.mark.parametrize("apart", [(), APART], ids=["together", "apart"])
def test_a_copy_that_says_what_the_trainer_says_is_sampled_with(apart: Sequence[str], tmp_path: Path) -> None:
    """A canary runs after each publish and changes nothing else."""
    plain = ['algorithm.loss.correction="none"', "policy.lr=0.03", *apart]
    found = ran(tmp_path / "own", 'rollout.engine="own_engine:Copying"', *plain)
    assert found == ran(tmp_path / "native", *plain)


@pytest.mark.parametrize("apart", [(), APART], ids=["together", "apart"])
@pytest.mark.parametrize("damage", [each.capitalize() for each in KINDS])
def test_weights_that_did_not_arrive_whole_sample_nothing(
    damage: str, apart: Sequence[str], tmp_path: Path
) -> None:
    with pytest.raises(
        WeightError, match="does not sample with version 1: a token of a fixed text"
    ) as caught:
        ran(tmp_path, f'rollout.engine="own_engine:{damage}"', "policy.lr=0.03", *apart)
    assert "the largest difference is" in caught.value.why and "more than 0.001" in caught.value.why
    steps = (tmp_path / "run" / layout.METRICS).read_text().splitlines()
    assert len(steps) <= 1, "nothing was trained on what it said"


def test_an_engine_from_nothing_trains_and_says_what_the_trainer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example has 60 lines of code; the check after each publish compares its log probabilities."""
    plain = ('rollout.engine="own_engine_example:PlainEngine"', "policy.lr=0.03", "algorithm.steps=3")
    source = Path(__file__).parents[2] / "examples" / "own_engine.py"
    (tmp_path / "own_engine_example.py").write_text(source.read_text("utf-8"))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = ran(tmp_path / "own", *plain)
    assert len(found) == 3 and all(len(step["completion"]) == 15 for step in found)

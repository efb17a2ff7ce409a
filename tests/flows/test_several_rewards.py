"""Several rewards in one run, weighed in the recipe or in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rillflow
from rillflow.cli.main import main
from rillflow.errors import ConfigError, RewardError

NEW = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "context": 16, "alphabet": "0123456789+="}
RECIPE: dict[str, Any] = {
    "run": {"seed": 3, "threads": 1},
    "policy": {"lr": 1e-3, "model": {"new": NEW}},
    "rollout": {"max_tokens": 3},
    "algorithm": {"name": "grpo", "prompts_per_step": 2, "samples_per_prompt": 2, "steps": 1},
    "evaluate": {"problems": 2},
}
PROMPTS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]
REWARDS = """
def brief(completions):
    return [1 - len(text) / 3 for text in completions]


def odd(completions, answer):
    return [float(len(text) % 2) if right != "1" else None for text, right in zip(completions, answer)]
"""


def train(folder: Path, reward: Any = None, **settings: Any) -> rillflow.Run:
    (folder / "rewards.py").write_text(REWARDS)
    return rillflow.train(
        RECIPE, prompts=PROMPTS, reward=reward, dir=folder / "run", settings=settings, quiet=True, fresh=True
    )


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_python_s_list_mixes_functions_with_what_a_recipe_can_name(tmp_path: Path) -> None:
    def flat(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    run = train(tmp_path, [(flat, 2.0), "rewards.py:brief"])
    for row in run.rollouts():
        assert set(row.parts) == {"flat", "brief"}
        assert row.reward == pytest.approx(2 + row.parts["brief"], abs=1e-6)
    assert run.settings["reward"]["functions"] == {"rewards.py:brief": 1.0}  # type: ignore[index,call-overload]


def test_a_replay_reads_functions_that_changed_since_from_the_run(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "run.toml").write_text(
        """
        run.threads = 1
        task = { held_out = 0, size = 8, digits = 1, operators = "+" }
        reward.functions = { "rewards.py:brief" = 1.0, "rewards.py:odd" = 0.5 }
        rollout.max_tokens = 3
        algorithm = { name = "grpo", prompts_per_step = 2, samples_per_prompt = 2, steps = 1 }
        [policy.model.new]
        hidden = 16
        layers = 1
        heads = 2
        kv_heads = 1
        context = 16
        alphabet = "0123456789+="
        """
    )
    assert main(["run", "run.toml", "--dir", "run"]) == 0
    (tmp_path / "rewards.py").write_text(REWARDS.replace("1 -", "5 -"))
    assert main(["replay", "run"]) == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reward.functions": {}}, "at least one function"),
        ({"reward.functions": {"rewards.py:odd": 1.0}, "reward.url": "http://a/b"}, "sets functions and url"),
        ({"reward.judge": {}}, "neither model nor url"),
        ({"reward.judge": {"model": "judge", "model_name": "x"}}, "reward.judge.url is not set"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        train(tmp_path, **settings)


def test_two_rewards_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text(REWARDS)
    with pytest.raises(RewardError, match=r"the rewards have the names \['odd', 'odd'\]"):
        train(tmp_path, **{"reward.functions": {"rewards.py:odd": 1.0, "more.py:odd": 1.0}})

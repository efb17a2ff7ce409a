"""Runs: a classic recipe is run, stopped, killed, resumed, shown and swept like every other recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from starlette.testclient import TestClient

import rillflow
from rillflow.cli.main import main
from rillflow.errors import ConfigError, RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.json_lines import read_lines
from rillflow.runs.outcome import rate_setting
from rillflow.runs.run_data import load
from rillflow.serving.token import Token
from rillflow_parts.watch.indexing import IndexingProcess
from rillflow_parts.watch.server import application
from rillflow_parts.watch.watched_runs import WatchedRuns

RECIPE: dict[str, Any] = {
    "kind": "classic",
    "environment": {"id": "CartPole-v1", "provider": "gymnasium", "run": "inline"},
    "network": {"hidden": [8]},
    "algorithm": {"name": "ppo", "steps": 10},
    "workers": {"slots": 4, "steps": 16},
    "evaluate": {"every": 4, "episodes": 4, "success": 100.0, "video": False},
    "run": {"checkpoint_every": 4, "threads": 1},
}
TOML = """
kind = "classic"
[environment]
id = "CartPole-v1"
provider = "gymnasium"
run = "inline"
[network]
hidden = [8]
[algorithm]
name = "ppo"
steps = 10
[workers]
slots = 4
steps = 16
[evaluate]
every = 4
episodes = 4
success = 100.0
video = false
[run]
checkpoint_every = 4
threads = 1
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small recipe; the working directory is its folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.toml"
    file.write_text(TOML)
    return file


def content(run: Path) -> list[dict[str, Any]]:
    """Return metrics and evaluations without times."""
    found = [
        dict(line.data)
        for name in (layout.METRICS, layout.EVALUATIONS)
        for line in read_lines(run / name).lines
    ]
    for each in found:
        each.pop("time_s")
        each["metrics"] = {
            name: value
            for name, value in each.get("metrics", {}).items()
            if not name.startswith(("time/", "actor/idle", "throughput/"))
        }
    return found


def weights(run: Path, step: int) -> dict[str, Any]:
    """Return everything in a checkpoint, as lists."""
    folder = run / layout.CHECKPOINTS / f"step-{step:06d}"
    files = {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
    return {
        f"{file}:{name}": value.tolist() for file, found in files.items() for name, value in found.items()
    }


def test_a_run_writes_what_every_run_writes(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(recipe)]) == 0
    said, run = capsys.readouterr().out, Path("runs/small")
    assert "ppo 10/10" in said and "Mean return" in said and "step-000010" in said
    assert [line.data["step"] for line in read_lines(run / layout.METRICS).lines] == [*range(1, 11)]
    looks = [line.data for line in read_lines(run / layout.EVALUATIONS).lines]
    assert [look["step"] for look in looks] == [0, 4, 8, 10]
    assert all(look["measure"] == "mean_return" and look["count"] == 4 for look in looks)
    assert layout.kept_steps(run / layout.CHECKPOINTS)[-2:] == [8, 10]
    assert json.loads((run / layout.FINISHED).read_text())["steps"] == 10
    page = (run / layout.REPORT).read_text()
    assert "Mean return on 4 episodes" in page and "Episode return" in page
    assert "environment steps" in page and "frames per second" in page and "best return" in page
    steps = sum(
        line.data["metrics"]["actor/steps/sum"]["sum"] for line in read_lines(run / layout.METRICS).lines
    )  # type: ignore[index, call-overload, misc]
    facts = json.loads((run / "summary.json").read_text())["episodes"]
    assert facts["steps"] == steps and facts["per_second"] > 0
    assert facts["best"]["mean_reward"] == max(look["mean_reward"] for look in looks)
    assert f"Environment steps  {steps:,} (" in said and "Best return        " in said
    assert "play it:         rillflow play runs/small" in said
    assert main(["verify", str(run)]) == 0
    assert main(["timeline", str(run)]) == 0
    assert main(["run", str(recipe)]) == 0
    assert "is finished" in capsys.readouterr().out


DQN = {"algorithm.name": "dqn", "algorithm.learning_starts": 100, "algorithm.updates": 2}
SMALL_DQN = ("algorithm.dqn.learning_starts=100", "algorithm.dqn.updates=2")
TWO: dict[str, Any] = {
    "environment": {"id": "MultiAgentCartPole-v0", "run": "inline"},
    "policies": {"ppo": "agent_[02]", "dqn": "agent_[13]"},
    "algorithm": {"name": "two_trainers", "steps": 10, "dqn": {"learning_starts": 100, "updates": 2}},
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="ppo"),
        pytest.param({"environment.normalise_observations": True}, id="normalised"),
        pytest.param({"network.kind": "lstm", "algorithm.minibatches": 2}, id="lstm"),
        pytest.param(DQN, id="dqn"),
        pytest.param(TWO, id="two trainers"),
    ],
)
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    recipe: Path, settings: dict[str, Any]
) -> None:
    whole = rillflow.train(recipe, dir="whole", quiet=True, settings=settings)

    def stop(result: Any) -> None:
        if result.step == 6:
            result.run.stop()

    part = rillflow.train(recipe, dir="part", quiet=True, callbacks=[stop], settings=settings)
    assert len(part.metrics) == 6 and not part.is_finished
    part = rillflow.train(recipe, dir="part", quiet=True, settings=settings)
    assert part.is_finished
    assert content(part.path) == content(whole.path)
    assert weights(part.path, 10) == weights(whole.path, 10)
    assert weights(whole.path, 8) != weights(whole.path, 10)


@pytest.mark.parametrize(
    ("place", "inference", "transport"),
    [
        ("inline", "policy", "shared_memory"),
        *(
            pytest.param(place, inference, transport, marks=pytest.mark.slow)
            for place in ("inline", "process")
            for inference in ("actor", "policy", "trainer")
            for transport in ("shared_memory", "tcp")
        ),
    ],
)
def test_a_plan_runs_on_every_stream(tmp_path: Path, place: str, inference: str, transport: str) -> None:
    settings = {"workers.place": place, "workers.inference": inference, "workers.transport": transport}
    settings |= {"algorithm.steps": 6, "workers.actors": 2, "workers.ring": 2}  # type: ignore[dict-item]
    run = rillflow.train(RECIPE, dir=tmp_path / "run", settings=settings, quiet=True)
    assert run.is_finished
    assert [each["actor/steps/sum"] > 0 for each in run.metrics] == [True] * 6
    assert {each["actor/lag/mean"] for each in run.metrics} == {0.0}


def test_a_dict_is_a_recipe(tmp_path: Path) -> None:
    run = rillflow.train(RECIPE, dir=tmp_path / "run", settings={"algorithm.steps": 2}, quiet=True)
    assert run.is_finished and run.settings["kind"] == "classic"
    assert "episode/return/mean" in run.metrics[-1]
    assert run.evaluations[-1].name == "mean return"
    assert rillflow.open_run(run.path).report().is_file()


def test_an_algorithm_and_an_environment_of_the_users_run(tmp_path: Path) -> None:
    """The examples of the guide; the return rises from below 0 to nearly that of the shortest way."""
    examples = Path(__file__).parents[1] / "examples"
    settings = {"algorithm": {"name": "reinforce.py:REINFORCE", "steps": 100, "lr": 3e-3}}
    run = rillflow.train(examples / "corridor.toml", dir=tmp_path / "run", settings=settings, quiet=True)
    assert run.evaluations[0].value < 0.0 and run.evaluations[-1].value > 0.4
    assert rillflow.open_run(run.path).is_finished


def test_fresh_sets_the_old_run_aside(recipe: Path) -> None:
    assert main(["run", str(recipe), "--set", "algorithm.steps=2", "--quiet"]) == 0
    assert main(["run", str(recipe), "--set", "algorithm.steps=1", "--quiet", "--fresh"]) == 0
    assert Path("runs/small.old-1").is_dir()
    assert len(read_lines(Path("runs/small") / layout.METRICS).lines) == 1


def test_more_steps_continue_a_finished_run_and_another_environment_does_not(recipe: Path) -> None:
    rillflow.train(recipe, dir="run", quiet=True, settings={"algorithm.steps": 4})
    assert len(rillflow.train(recipe, dir="run", quiet=True, settings={"algorithm.steps": 6}).metrics) == 6
    with pytest.raises(RunDirectoryError, match=r"workers\.slots"):
        rillflow.train(recipe, dir="run", quiet=True, settings={"algorithm.steps": 8, "workers.slots": 2})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"algorithm.name": "pppo"}, "did you mean 'ppo'"),
        ({"algorithm.steps": 0}, "algorithm.steps is 0"),
        ({"algorithm.lrr": 1.0}, "did you mean 'lr'"),
        ({"workers.ring": 0}, "workers.ring is 0"),
        ({"workers.slot": 2}, "did you mean 'slots'"),
        ({"environment.id": "CartPole-v9"}, "did you mean"),
        ({"workers.inference": "policy"}, "workers.transport"),
        ({"workers.place": "ray", "workers.transport": "shared_memory"}, "tcp"),
        ({"policies.left": "agent_["}, "policies.left"),
        ({"network.kind": "cnn"}, "cnn"),
        ({"environment.id": "missing.py:Env"}, "relative to the recipe's folder"),
        ({"environment.id": "collections:Counter"}, "derive the class from gymnasium.Env"),
        ({"algorithm.name": "dqn", "environment.id": "Pendulum-v1"}, "finitely many actions"),
        (
            {"algorithm.name": "dqn", "algorithm.replay.capacity": 32},
            "set algorithm.replay.capacity to at least 1000",
        ),
        ({"policies.left": "agent_0"}, "the environment's only agent matches no policy"),
        ({"policies.a": "agent_0", "policies.b": ".*"}, "one policy for all agents"),
        ({"algorithm.name": "two_trainers"}, 'it trains the policies ["dqn", "ppo"]'),
        ({"workers.trainers": 2}, 'workers.place is "inline" and workers.trainers is 2'),
        ({"workers.executor": "static", "workers.place": "process"}, 'set workers.place = "inline"'),
    ],
)
def test_a_setting_that_cannot_be_run_is_one_clear_error(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        rillflow.train(RECIPE, dir=tmp_path / "run", settings=settings, quiet=True)
    assert told in str(error.value)
    assert not (tmp_path / "run" / layout.METRICS).exists()


def test_arguments_of_language_models_are_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="prompts is given"):
        rillflow.train(recipe, prompts=["1 + 1 ="])
    assert main(["run", str(recipe), "--plan", "plan.toml"]) == 2
    assert main(["check", str(recipe), "--memory"]) == 2


def test_commands_about_language_models_say_so(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rillflow.train(recipe, dir="run", quiet=True, settings={"algorithm.steps": 1, "evaluate.episodes": 0})
    for words in (
        ["ask", "run", "hello"],
        ["evaluate", "run"],
        ["replay", "run"],
        ["serve", "run"],
        ["merge-adapter", "run", "--out", "merged"],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "trains no language model" in said and "rillflow play run" in said
        assert "rillflow_classic.load('run')" in said and "Traceback" not in said
    with pytest.raises(ConfigError, match="rillflow play run"):
        rillflow.open_run("run").checkpoint()
    model = {"policy": {"model": {"path": "run"}}, "task": {"source": "arithmetic"}}
    with pytest.raises(ConfigError, match="trains no language model"):
        rillflow.train({**model, "algorithm": {"name": "grpo", "steps": 1}}, dir="other", quiet=True)


def test_the_advice_names_a_rate_that_the_recipe_has(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(
        TOML.replace('id = "CartPole-v1"\nprovider = "gymnasium"', 'id = "MultiAgentCartPole-v0"')
    )
    words = [f"{key}={json.dumps(value)}" for key, value in TWO["policies"].items()]
    settings = ["algorithm.name=two_trainers", "algorithm.steps=1", "evaluate.episodes=1", *SMALL_DQN]
    settings += [f"policies.{word}" for word in words]
    assert main(["run", str(recipe), "--dir", "run", *(w for s in settings for w in ("--set", s))]) == 0
    said = capsys.readouterr().out
    assert "policy.lr" not in said and "samples" not in said, "this kind of recipe has neither"
    assert rate_setting(load(Path("run"))) == "algorithm.ppo.lr"


def test_play_shows_the_returns_and_films(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pygame")
    run = rillflow.train(recipe, dir="run", quiet=True, settings={"algorithm.steps": 1})
    assert main(["play", "run", "--video", "episode.webp"]) == 0
    said = capsys.readouterr().out
    assert run.evaluations[-1].text in said and said.count("episode ") == 4
    assert Path("episode.webp").read_bytes()[:4] == b"RIFF"
    assert main(["play", "run", "--episodes", "2", "--sample", "--seed", "1", "--checkpoint", "1"]) == 0
    assert "sampled actions" in capsys.readouterr().out
    for words in (["--video", "episode.webp"], ["--video", "a.mp4"], ["--episodes", "0"]):
        assert main(["play", "run", *words]) == 2
    assert "fix:" in capsys.readouterr().err


def test_check_shows_settings_and_spaces_and_graph_draws_the_plan(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(recipe)]) == 0
    said = capsys.readouterr().out
    assert "Discrete(2)" in said and "algorithm.steps = 10  (small.toml)" in said and "ready" in said
    assert main(["graph", str(recipe)]) == 0
    assert "actors.sample" in capsys.readouterr().out
    assert main(["graph", str(recipe), "--format", "mermaid"]) == 0
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_sweep_ranks_cases_by_their_returns(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweep.toml").write_text(
        'recipe = "small.toml"\nseeds = [0, 1]\nat_once = 2\n[grid]\n"algorithm.lr" = [1e-3, 1e-6]\n'
    )
    assert main(["sweep", "sweep.toml"]) == 0
    said = capsys.readouterr().out
    assert "lr=0.001" in said and "mean return" in said
    assert main(["sweep", "sweep.toml", "--table"]) == 0
    run = next(Path("runs/sweeps").glob("*/lr=0.001/seed-1"))
    assert main(["report", str(run)]) == 0
    assert "Episode return, 2 seeds" in (run / layout.REPORT).read_text()


def test_a_video_of_an_episode_is_in_the_report(recipe: Path) -> None:
    pytest.importorskip("pygame")
    run = rillflow.train(
        recipe, dir="run", quiet=True, settings={"algorithm.steps": 1, "evaluate.video": True}
    )
    files = list((run.path / layout.MEDIA).iterdir())
    assert [file.name for file in files] == ["episode-after-step-1.webp"]
    assert files[0].read_bytes()[:4] == b"RIFF"
    assert "data:image/webp;base64," in (run.path / layout.REPORT).read_text()


def test_the_local_page_lists_a_run_and_draws_it(recipe: Path, tmp_path: Path) -> None:
    rillflow.train(recipe, dir="runs/one", quiet=True, settings={"algorithm.steps": 4})
    token = Token(text="a-token-of-some-length", is_new=True)
    app = application(WatchedRuns([Path("runs")]), IndexingProcess(tmp_path / "cache"), token, 8100)
    head = {"Authorization": f"Bearer {token.text}"}
    page = TestClient(app, base_url="http://127.0.0.1:8100", headers=head)
    (run,) = page.get("/api/runs").json()
    assert (run["algorithm"], run["state"], run["steps"], run["of_steps"]) == ("ppo", "finished", 4, 4)
    assert run["headline"]["name"] == "mean return"
    found = page.get("/api/runs/one").json()
    assert found["config"]["environment.id"] == "CartPole-v1" and not found["problems"]
    asked = {"runs": "one", "metrics": "episode/return/mean"}
    assert page.get("/api/curves", params=asked).json()["curves"][0]["x"]


def test_a_tracker_has_the_returns(recipe: Path) -> None:
    tracker = f"{Path(__file__).parents[3]}/examples/own_tracker.py:CsvTracker"
    settings = {"algorithm.steps": 2, "run.trackers.csv": {"class": tracker}}
    run = rillflow.train(recipe, dir="run", quiet=True, settings=settings)
    sent = (run.path / layout.TRACKERS / "numbers.csv").read_text()
    assert "2,episode/return/mean," in sent and "mean_reward" in sent

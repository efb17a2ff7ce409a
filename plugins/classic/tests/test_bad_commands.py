"""Bad commands: ``check`` and ``run`` refuse what cannot run with one error, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.cli.main import main
from rillflow.runs import layout

FAULTY = Path(__file__).with_name("faulty.py")
TOML = """
kind = "classic"
[environment]
id = "CartPole-v1"
provider = "gymnasium"
run = "inline"
[network]
hidden = [8]
[workers]
slots = 4
steps = 16
[algorithm]
name = "ppo"
steps = 2
[evaluate]
episodes = 0
video = false
[run]
threads = 1
"""
DQN = 'algorithm.name = "dqn"'
SMALL = (DQN, "algorithm.batch_size = 8", "algorithm.learning_starts = 20")
SAC = ('environment.id = "Pendulum-v1"', 'algorithm.name = "sac"')
TEAM = (
    f'environment.id = "{FAULTY}:Team"',
    'policies = { ppo = ".*", dqn = "nobody" }',
    'algorithm.name = "two_trainers"',
)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small recipe; the working directory is its folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.toml"
    file.write_text(TOML)
    return file


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ((*SMALL, "algorithm.replay.capacity = 67"), "capacity is 67, and a fragment has 68 rows"),
        ((*SMALL, 'network.kind = "lstm"'), "a transition of the buffer has no state of the LSTM"),
        (('algorithm.name = "apex"', 'network.kind = "lstm"'), "no state of the LSTM"),
        ((*SAC, 'network.kind = "cnn"'), "SAC's actor and critics are MLPs without convolutions"),
        ((*SAC, 'network.activation = "tanh"'), "network.activation = 'tanh', which SAC does not read"),
        ((*SAC, "network.shared = true"), "network.shared = true, which SAC does not read"),
        ((*SAC, 'network.precision = "bfloat16"'), "precision = 'bfloat16', which SAC does not read"),
        ((DQN, "algorithm.replay.capacity = 1000"), "first update needs 1000 transitions"),
        ((DQN, "algorithm.replay.capacity = 1_000_000_000_000"), "set algorithm.replay.capacity to at most"),
        (('algorithm.name = "apex"', "algorithm.shards = 30", "algorithm.replay.capacity = 2000"), "2040"),
        (("workers.trainers = 5", 'workers.place = "process"'), "set workers.trainers to at most 4"),
        (("algorithm.minibatches = 65",), "algorithm.minibatches is 65, and an update has 64 rows"),
        (("algorithm.minibatches = 5", 'network.kind = "lstm"'), "an update has 4 slots"),
        (
            ('algorithm.name = "impala"', 'workers.transport = "shared_memory"', "workers.batch = 3"),
            "workers.batch is 3, and the stream holds 2 fragments",
        ),
        (('algorithm.name = "impala"', 'workers.executor = "static"'), 'set workers.executor = "pull"'),
        (TEAM, "policies.dqn is 'nobody', and no agent goes to this policy"),
        (("network.hidden = [8, 0]",), "network.hidden[1] is 0"),
        (("population.perturb = {}",), "it must have 1 or more entries"),
        (("population.perturb = { lr = [0, 1e-2] }",), "population.perturb.lr is [0.0, 0.01]"),
        (('algorithm.name = "nowhere:MINE"',), "'nowhere' cannot be imported"),
        (('algorithm.name = "collections:Counter"',), "collections has no ClassicAlgorithm"),
        (('environment.id = "CartPole-v7"',), "did you mean 'CartPole-v1'?"),
    ],
)
def test_check_and_run_refuse_a_recipe_before_it_starts(
    recipe: Path, capsys: pytest.CaptureFixture[str], command: str, settings: tuple[str, ...], told: str
) -> None:
    assert main([command, str(recipe), *(word for each in settings for word in ("--set", each))]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and told in said and said.count("why: ") == 1 and "fix: " in said
    assert "where: " not in said and "Traceback" not in said
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "settings",
    [
        (*SMALL, "algorithm.replay.capacity = 68"),
        (*SMALL, "algorithm.replay.capacity = 76", "algorithm.num_steps = 3"),
        ("algorithm.minibatches = 64",),
        ("algorithm.minibatches = 4", 'network.kind = "lstm"'),
    ],
)
def test_the_smallest_sizes_that_are_not_refused_run(recipe: Path, settings: tuple[str, ...]) -> None:
    words = [word for each in (*settings, "algorithm.steps = 4") for word in ("--set", each)]
    assert main(["run", str(recipe), "--quiet", *words]) == 0
    assert (Path("runs/small") / layout.FINISHED).is_file()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raises", ("Counter.step of slot 0 raised ZeroDivisionError", "faulty.py:")),
        ("four", ("Counter.step of slot 0 returned 4 values instead of 5", "faulty.py, line ")),
        ("exits", ("Counter.step of slot 0 raised SystemExit: 3",)),
        ("nan", ("the environment of slot 0 returned the observation nan",)),
    ],
)
def test_a_faulty_environment_ends_a_run_with_an_error_about_its_class(
    recipe: Path, capsys: pytest.CaptureFixture[str], fault: str, told: tuple[str, ...]
) -> None:
    words = f'environment.id = "{FAULTY}:Counter"', f'environment.arguments = {{ fault = "{fault}" }}'
    assert main(["run", str(recipe), *(word for each in words for word in ("--set", each))]) == 1
    said = capsys.readouterr().err
    assert all(each in said for each in told)
    assert "lanes.py" not in said and "vector.py" not in said, (
        "the user's class is wrong, and not this package"
    )


def test_a_host_that_is_not_this_machine_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--set", "workers.transport=tcp", "--set", "workers.host=nowhere.invalid")
    assert main(["run", str(recipe), *words]) == 1
    assert "workers.host is 'nowhere.invalid'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_actor_that_always_dies_ends_a_run_with_streams(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f'environment.id = "{FAULTY}:Counter"', 'environment.arguments = { fault = "dies" }']
    words += ['workers.place = "process"', 'workers.transport = "shared_memory"']
    assert main(["run", str(recipe), *(word for each in words for word in ("--set", each))]) == 1
    assert "worker 0 of 'actors' was lost 4 times in a row" in capsys.readouterr().err

"""Plugins: distributions on the path add commands; the error of a missing or broken one says what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.plugins import SHIPPED, commands, install_line, installed, missing, predict_steps, training
from rillflow.app.recipe import load_recipe, open_recipe
from rillflow.cli.main import COMMANDS, main
from rillflow.errors import ConfigError

GREETING = """
from rillflow.app.plugins import Command, Plugin

def greet(arguments):
    print(f"hello {arguments.name}")
    return 0

def arguments(parser):
    parser.add_argument("name")

PLUGIN = Plugin(commands={"COMMAND": Command(help="greet somebody", run=greet, add_arguments=arguments)})
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a distribution as pip does, with a module unless the text is None."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, text: str | None) -> None:
        module = f"plugin_of_test_{name}"
        if text is not None:
            (tmp_path / f"{module}.py").write_text(text)
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[rillflow.plugins]\n{name} = {module}:PLUGIN\n")
        installed.cache_clear()

    yield put
    installed.cache_clear()
    for name in [name for name in sys.modules if name.startswith("plugin_of_test_")]:
        del sys.modules[name]


def test_a_command_of_an_installed_plugin_runs(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("greeter", GREETING.replace("COMMAND", "greet"))
    assert "greeter" in installed()
    assert main(["greet", "Ada"]) == 0
    assert capsys.readouterr().out == "hello Ada\n"


def test_a_plugin_whose_folder_is_gone_is_not_installed(install: Install) -> None:
    install("gone", None)
    assert "gone" not in installed()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_dependency", ("cannot be loaded", "no_such_dependency")),
        ("from rillflow.app.plugins import NoSuchName", ("cannot be loaded", "NoSuchName")),
        ("", ("cannot be loaded", "no attribute 'PLUGIN'")),
        ("PLUGIN = 3", ("is not a Plugin", "its type is int")),
    ],
)
def test_a_broken_plugin_ends_a_command_of_plugins_with_2_and_no_other(
    install: Install, capsys: pytest.CaptureFixture[str], text: str, words: tuple[str, ...]
) -> None:
    install("broken", text)
    with pytest.raises(ConfigError, match="the plugin broken"):
        installed()
    assert main(["verify", "no_such_run"]) == 2
    assert "broken" not in capsys.readouterr().err, "the package's own commands load no plugin"
    assert main(["greet", "Ada"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in (*words, "the plugin broken", "fix: ")) and "Traceback" not in said


@pytest.mark.parametrize("name", ["run", "greet"])
def test_two_commands_of_one_name_are_refused(
    install: Install, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    install("first", GREETING.replace("COMMAND", "greet"))
    install("second", GREETING.replace("COMMAND", name))
    assert main(["greet", "Ada"]) == 2
    assert f"adds the command {name}" in capsys.readouterr().err


def test_the_error_of_a_missing_plugin_names_the_line_that_installs_it() -> None:
    said = str(missing("--cluster", "planner"))
    assert "--cluster needs the plugin planner" in said and "it is not installed" in said
    assert install_line("planner") in said and "pip install ./plugins/planner" in said


def test_the_command_of_a_missing_plugin_exits_with_2(
    without_plugins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict_steps() is None
    names = [name for of_plugin in SHIPPED.values() for name in of_plugin]
    assert list(commands(taken=COMMANDS)) == names
    for name in names:
        for words in ([], ["--model", "a"], ["run.toml", "--cluster", "b", "--debug"], ["--", "-x"]):
            assert main([name, *words]) == 2
            assert f"rillflow {name} needs the plugin" in capsys.readouterr().err
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0 and "not installed" in capsys.readouterr().out


def test_serve_train_without_the_plugin_exits_with_2(
    without_plugins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="needs the plugin training_service"):
        training("rillflow serve --train")
    assert main(["serve", "model", "--train"]) == 2
    said = capsys.readouterr().err
    assert "rillflow serve --train needs the plugin" in said and install_line("training_service") in said


@pytest.fixture
def without_plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Find no distribution: the path has no metadata."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    installed.cache_clear()
    yield
    installed.cache_clear()


KIND = """
from rillflow.app.plugins import Plugin

class Loaded:
    def __init__(self, path, data, overrides):
        self.path, self.data, self.overrides = path, data, overrides

PLUGIN = Plugin(recipes={"toy": Loaded})
"""


def test_the_kind_of_a_recipe_names_the_plugin_that_loads_it(install: Install, tmp_path: Path) -> None:
    install("toys", KIND)
    file = tmp_path / "toy.toml"
    file.write_text('kind = "toy"\nsize = 1\n')
    loaded: Any = open_recipe(file, ["size=2"])
    assert (loaded.path, loaded.data) == (file, {"kind": "toy", "size": 1})
    assert [(each.dotted, each.value) for each in loaded.overrides] == [("size", 2)]
    with pytest.raises(ConfigError, match="trains no language model"):
        load_recipe(file)


def test_an_unknown_kind_is_an_error_with_the_nearest_name(install: Install) -> None:
    install("toys", KIND)
    with pytest.raises(ConfigError, match="did you mean 'toy'"):
        open_recipe({"kind": "toyy"})


def test_the_kind_of_a_missing_plugin_is_an_error_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rillflow.app.plugins.installed", dict)
    with pytest.raises(ConfigError, match=r"pip install 'rillflow\[classic\]'"):
        open_recipe({"kind": "classic"})

"""Plugins: distributions on the path add commands; the error of a missing or broken one says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.plugins import (
    PARTS,
    SHIPPED,
    commands,
    discovered,
    installed,
    missing,
    other_kind,
    service,
)
from rillflow.app.recipe import load_recipe, open_recipe
from rillflow.cli.main import COMMANDS, main
from rillflow.errors import ConfigError, install_package, install_plugin
from tests.unit.app.conftest import Install

GREETING = """
from rillflow.app.plugins import Command, Plugin

def greet(arguments):
    print(f"hello {arguments.name}")
    return 0

def arguments(parser):
    parser.add_argument("name")

PLUGIN = Plugin(commands={"COMMAND": Command(help="greet somebody", run=greet, add_arguments=arguments)})
"""


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
        ("1 / 0", ("cannot be loaded", "ZeroDivisionError", "plugin_of_test_broken.py:1")),
        ("raise SystemExit(3)", ("cannot be loaded", "SystemExit: 3")),
    ],
)
def test_a_broken_plugin_ends_a_command_of_plugins_with_2_and_no_other(
    install: Install, capsys: pytest.CaptureFixture[str], text: str, words: tuple[str, ...]
) -> None:
    install("broken", text)
    assert "broken" not in installed() and "the plugin broken" in str(discovered().broken["broken"])
    assert main(["report", "no_such_run"]) == 2
    assert "broken" not in capsys.readouterr().err, "the package's own commands load no plugin"
    assert main(["greet", "Ada"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in (*words, "the plugin broken", "fix: ")) and "Traceback" not in said


def test_a_command_of_a_plugin_runs_beside_a_broken_plugin(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("broken", "1 / 0")
    install("greeter", GREETING.replace("COMMAND", "greet"))
    assert main(["greet", "Ada"]) == 0
    assert capsys.readouterr().out == "hello Ada\n"


def test_a_broken_plugin_is_installed_again_from_where_it_came(install: Install) -> None:
    install("broken", "import no_such_dependency")
    fix = discovered().broken["broken"].fix
    assert fix.endswith("pip uninstall plugin_of_test_broken"), "no plugin of this project"


def test_a_broken_plugin_of_this_project_is_installed_again_from_the_clone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint(name="merging", value="rillflow.app.plugins:NO_SUCH_NAME", group="rillflow.plugins")
    monkeypatch.setattr("rillflow.app.plugins.entry_points", lambda **_: [point])
    discovered.cache_clear()
    assert discovered().broken["merging"].fix == f"install it again: {install_plugin('merging')}"


@pytest.mark.parametrize("name", ["run", "greet"])
def test_two_commands_of_one_name_are_refused(
    install: Install, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    install("first", GREETING.replace("COMMAND", "greet"))
    install("second", GREETING.replace("COMMAND", name))
    assert main(["greet", "Ada"]) == 2
    assert f"adds the command {name}" in capsys.readouterr().err


def test_a_run_of_another_kind_names_the_command_that_uses_it(install: Install) -> None:
    use = "from rillflow.app.plugins import Plugin\nPLUGIN = Plugin(uses={'odd': 'rillflow play RUN'})\n"
    install("odd", use)
    assert other_kind("runs/a", "odd").fix == "rillflow play runs/a"
    assert "rillflow play" not in other_kind("odd.toml", "odd", is_run=False).fix


def test_the_error_of_a_missing_plugin_names_the_line_that_installs_it() -> None:
    said = str(missing("--cluster", "planner"))
    assert "--cluster needs the plugin planner" in said and "it is not installed" in said
    assert f"fix: {install_plugin('planner')}" in said


def test_the_command_of_a_missing_plugin_exits_with_2(
    without_plugins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for brought in (*PARTS.values(), *SHIPPED.values()) for name in brought]
    assert list(commands(taken=COMMANDS)) == names
    for name in names:
        for words in ([], ["--model", "a"], ["run.toml", "--cluster", "b", "--debug"], ["--", "-x"]):
            assert main([name, *words]) == 2
            assert f"rillflow {name} needs the p" in capsys.readouterr().err
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0 and "not installed" in " ".join(capsys.readouterr().out.split())


def test_the_error_of_a_missing_part_installs_the_package_again() -> None:
    said = str(missing("rillflow watch", "watch"))
    assert "rillflow watch needs the part watch" in said and f"fix: {install_package()}" in said


def test_the_service_of_a_missing_plugin_names_the_line_that_installs_it(without_plugins: None) -> None:
    with pytest.raises(
        ConfigError, match="rillflow serve --train needs the plugin training_service"
    ) as caught:
        service("training", "rillflow serve --train")
    assert caught.value.fix == install_plugin("training_service")


@pytest.fixture
def without_plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Find no distribution: the path has no metadata."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    discovered.cache_clear()
    yield
    discovered.cache_clear()


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
    with pytest.raises(ConfigError, match=re.escape(install_plugin("classic"))):
        open_recipe({"kind": "classic"})

"""What a plugin brings, by the modules of examples/own_plugin: no file of the core is changed."""

from __future__ import annotations

import json
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from rillflow.app.check import check
from rillflow.app.facts import RecipeFacts
from rillflow.app.launch import launch
from rillflow.app.plugin_sections import as_kept, known_settings
from rillflow.app.plugins import discovered
from rillflow.app.recipe import load_recipe
from rillflow.app.recorded_recipe import recipe_of
from rillflow.app.resolved import Resolved
from rillflow.app.sections import recipe_class
from rillflow.config.schema import walk
from rillflow.errors import ConfigError, RunDirectoryError, install_package, install_plugin
from rillflow.runs.changes import allowed_changes
from rillflow.runs.json_lines import read_json
from rillflow.runs.run_data import load
from rillflow.runs.run_directory import RunDirectory
from tests.unit.app.conftest import Install

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_plugin"
RECIPE = """
[run]
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 40
held_out = 5
[policy]
model.new = { hidden = 16, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 3
[algorithm]
name = "grpo"
steps = 2
prompts_per_step = 4
samples_per_prompt = 2
"""
LINES = "run.lines={ file = 'lines.txt' }"


def documented(install: Install, folder: Path, name: str) -> None:
    """Install a plugin of the example, with the modules beside it."""
    points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    for file in EXAMPLE.glob("*.py"):
        (folder / "site" / file.name).write_text(file.read_text())
    module, _, plugin = points["rillflow.plugins"][name].partition(":")
    install(name, f"from {module} import {plugin}")


def loaded(folder: Path, *settings: str) -> Resolved:
    (folder / "run.toml").write_text(RECIPE)
    return load_recipe(folder / "run.toml", [f"run.dir={json.dumps(str(folder / 'run'))}", *settings])


def run(recipe: Resolved) -> Path:
    launch(recipe, quiet=True)
    return recipe.directory


def test_an_observer_with_settings_of_its_own(install: Install, tmp_path: Path) -> None:
    documented(install, tmp_path, "lines")
    assert "run.lines.file" in {key.dotted for key in walk(recipe_class())}
    recipe = loaded(tmp_path, LINES)
    assert check(recipe).topics["lines"] == ["a line for each step of grpo"]
    assert 'run.lines.file = "lines.txt"  (--set)' in check(recipe).topics["settings"]
    run(recipe)
    lines = (recipe.directory / "lines.txt").read_text().splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert steps == ["step 1 grpo True", "step 2 grpo True"]
    assert lines[0] == "start" and lines[-1] == "finished" and "evaluation 2 5" in lines
    config = read_json(recipe.directory / "config.json")
    assert config["run"]["lines"] == {"file": "lines.txt"}  # type: ignore[index,call-overload]
    run(loaded(tmp_path, "run.lines={ file = 'more.txt' }", "algorithm.steps=3"))  # a resume may change it
    assert (recipe.directory / "more.txt").read_text().splitlines()[1] == "step 3 grpo True"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "run.lines={ fil = 'x' }",
            ("[run.lines] has no key 'fil'", "did you mean"),
        ),
        ("run.lines={ file = 3 }", ("run.lines.file is 3", "a text in quotes")),
        ("run.lines={ file = 'metrics.jsonl' }", ('run.lines.file is "metrics.jsonl"', "the run writes it")),
    ],
)
def test_settings_of_a_plugin_are_refused_as_those_of_the_core(
    install: Install, tmp_path: Path, setting: str, words: tuple[str, ...]
) -> None:
    documented(install, tmp_path, "lines")
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, setting)
    said = str(caught.value)
    assert all(word in said for word in words), said


def test_a_scorer_of_a_plugin_needs_no_file(install: Install, tmp_path: Path) -> None:
    documented(install, tmp_path, "brief")
    recipe = loaded(tmp_path, "reward.function=brief", "algorithm.steps=1")
    (function,) = RecipeFacts(resolved=recipe).functions
    assert str(function) == "brief_scores.py:brief"
    config = read_json(run(recipe) / "config.json")
    assert list(config["sources"]) == ["reward"]  # type: ignore[arg-type]


def test_an_order_of_the_steps_needs_no_file_of_the_core(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documented(install, tmp_path, "announced")
    recipe = loaded(tmp_path, "schedule={ mode = 'announced', word = 'starts' }", "algorithm.steps=1")
    launch(recipe)
    assert "grpo starts" in capsys.readouterr().out


ENGINE = """
from rillflow.app.plugins import EngineSource, Plugin

def look(facts):
    return [f"mine samples {facts.recipe.algorithm.name}"]

PLUGIN = Plugin(
    engines={
        "NAME": EngineSource(path="engine_of_test:Mine", options="engine_of_test:options", look=look)
    }
)
"""
ENGINE_MODULE = """
from rillflow.rollout.native.engine import NativeEngine

MADE = []

def options(setting):
    return {"note": setting.role}

class Mine(NativeEngine):
    def __init__(self, *args, note, **options):
        super().__init__(*args, **options)
        MADE.append(note)
"""


def test_an_engine_of_a_plugin_is_made_on_the_rank_with_its_options(install: Install, tmp_path: Path) -> None:
    (tmp_path / "site" / "engine_of_test.py").write_text(ENGINE_MODULE)
    install("mine", ENGINE.replace("NAME", "mine"))
    recipe = loaded(tmp_path, "rollout.engine=mine", "algorithm.steps=1")
    assert "mine samples grpo" in check(recipe).notes
    run(recipe)
    assert import_module("engine_of_test").MADE == ["sampler"]
    install("taken", ENGINE.replace("NAME", "native"))
    with pytest.raises(ConfigError, match="adds the engine native") as caught:
        check(recipe)
    assert caught.value.why == "the core already has this name"


def test_an_unknown_engine_is_told_with_the_nearest_name(install: Install, tmp_path: Path) -> None:
    install("mine", ENGINE.replace("NAME", "mine"))
    (problem,) = {str(each) for each in check(loaded(tmp_path, "rollout.engine=mined")).problems}
    assert "which is no engine" in problem and "did you mean 'mine'" in problem


SPARE = """
from pydantic import Field
from rillflow.app.plugins import Plugin
from rillflow.workers.config import PlacementConfig

class NAMEPlacement(PlacementConfig):
    NAME: int = Field(0, ge=0, description="Ranks that wait.")

    def pool_of(self, role):
        return super().pool_of(role) if not self.NAME else "main"

def calls(resolved, trained, say):
    from rillflow.controller.step_executor import StepCalls
    from rillflow.records.metrics import Mean

    class NAMECalls(StepCalls):
        def call(self, group, endpoint, args, options):
            say(f"NAME {group.role}.{endpoint} of {', '.join(trained)}")
            return super().call(group, endpoint, args, options)

        def metrics(self, passes):
            return {"NAME/passes/mean": Mean(total=len(passes), count=1)}

    return NAMECalls() if resolved.recipe.placement.NAME else None

PLUGIN = Plugin(settings={"placement.NAME": "plugin_of_test_NAME:NAMEPlacement"}, calls=calls)
"""


def test_plugins_add_settings_to_a_section_of_the_core(install: Install, tmp_path: Path) -> None:
    path = run(loaded(tmp_path, "algorithm.steps=1"))
    for name in ("spare", "idle"):
        install(name, SPARE.replace("NAME", name))
    recipe = loaded(tmp_path, "placement.spare=2").recipe
    assert recipe.placement.model_dump(include={"spare", "idle", "pools"}) == {
        "spare": 2,
        "idle": 0,
        "pools": {"main": 1},
    }
    with pytest.raises(ConfigError, match=r"placement\.spare is -1"):
        loaded(tmp_path, "placement.spare=-1")
    again = run(loaded(tmp_path))
    assert again == path and "spare" not in read_json(path / "config.json")["placement"]  # type: ignore[index,call-overload,operator]


def test_a_plugin_submits_the_calls_of_a_step(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("spare", "idle"):
        install(name, SPARE.replace("NAME", name))
    recipe = loaded(tmp_path, "placement.spare=2", "algorithm.steps=1")
    launch(recipe)
    assert "spare policy.update of policy" in capsys.readouterr().out
    (line,) = (recipe.directory / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["metrics"]["spare/passes/mean"]["mean"] == 0
    both = loaded(tmp_path, "placement.spare=2", "placement.idle=2")
    with pytest.raises(ConfigError, match=r"(spare|idle)Calls and \w+Calls both submit"):
        launch(both, quiet=True)


CODECS_MODULE = """
import torch

SENT = []

class Rounded:
    def encode(self, tensor, state):
        wanted = tensor + state.get("error", torch.zeros_like(tensor))
        sent = wanted.bfloat16()
        state["error"] = wanted - sent.float()
        return sent.contiguous().flatten().view(torch.uint8)

    def decode(self, payload, into, state):
        into.copy_(payload.view(torch.bfloat16).view(into.shape))

class Changed:
    def encode(self, tensor, state):
        new, old = tensor.flatten().view(torch.uint8), state.get("base")
        state["base"] = new.clone()
        places = torch.arange(len(new)) if old is None else (new != old).nonzero()[:, 0]
        SENT.append(len(places))
        return torch.cat([places.view(torch.uint8), new[places]])

    def decode(self, payload, into, state):
        count = len(payload) // 9
        places = payload[: 8 * count].clone().view(torch.int64)
        into.flatten().view(torch.uint8)[places] = payload[8 * count :]
"""
CODECS = """
from rillflow.app.plugins import Plugin

def codecs(resolved):
    from codecs_of_test import Changed, Rounded
    from rillflow.sharding.codec import EdgeCodecs

    return EdgeCodecs(weights=Changed() if "EDGE" == "weights" else None,
                      gradients=Rounded() if "EDGE" == "gradients" else None)

PLUGIN = Plugin(codecs=codecs)
"""


def weights_of(run: Path) -> bytes:
    newest = max((run / "checkpoints").iterdir())
    return (newest / "policy" / "model.safetensors").read_bytes()


def test_codecs_of_a_plugin_encode_weights_and_gradients(install: Install, tmp_path: Path) -> None:
    (tmp_path / "site" / "codecs_of_test.py").write_text(CODECS_MODULE)
    (tmp_path / "digits.py").write_text(
        "def low(prompts, completions, **columns):\n"
        "    return [float(sum(each < '5' for each in text)) for text in completions]\n"
    )
    pools = ("placement.pools={ main = 2, answers = 1 }", "placement.roles={ sampler = 'answers' }")

    def trained(name: str, *settings: str) -> bytes:
        words = (*pools, "placement.backend=inline", "algorithm.steps=4", f"run.dir={tmp_path / name}")
        words = (*words, "reward.function=digits.py:low")
        return weights_of(run(loaded(tmp_path, *words, *settings)))

    plain = trained("plain")
    install("sent", CODECS.replace("EDGE", "weights"))
    assert trained("sent") == plain
    sent = import_module("codecs_of_test").SENT
    assert len(sent) > 4 and sent[0] > max(sent[-4:]) > 0
    install("summed", CODECS.replace("EDGE", "gradients"))
    whole = trained("whole")
    assert whole != plain
    trained("cut", "algorithm.steps=2", "policy.schedule=constant")
    assert trained("cut") == whole, "a checkpoint has the codec's state"
    install("again", CODECS.replace("EDGE", "weights"))
    with pytest.raises(ConfigError, match="the plugins again and sent both bring a codec of weights"):
        trained("twice")


RAISING = """
from rillflow.app.plugins import Plugin

class Bad:
    def start(self): pass
    def step(self, step, phase, metrics): raise ValueError("no route")
    def evaluation(self, step, found): pass
    def finish(self, state): raise SystemError("never called: it was dropped")

def observers(run):
    return [Bad()]

def broken(run):
    return 1 / 0

PLUGIN = Plugin(observers=NAME)
"""


def test_an_observer_that_fails_never_stops_a_run(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("bad", RAISING.replace("NAME", "observers"))
    install("worse", RAISING.replace("NAME", "broken"))
    recipe = loaded(tmp_path)
    launch(recipe)
    said = capsys.readouterr().out
    assert said.count("Bad failed, and the run goes on without it: ValueError: no route") == 1
    assert "the plugin worse does not watch the run, which goes on without it: ZeroDivisionError" in said
    assert ("never called" not in said and "step 2" in said) or "grpo 2/2" in said


SECTION = """
from rillflow.app.plugins import Plugin
PLUGIN = Plugin(sections={"KEY": "PATH"})
"""


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("policy.lr", "this key is a setting of the core"),
        ("nowhere.at.all", "there is no section nowhere"),
    ],
)
def test_a_section_at_a_wrong_place_is_refused(
    install: Install, tmp_path: Path, key: str, words: str
) -> None:
    install("odd", SECTION.replace("KEY", key).replace("PATH", "rillflow.app.sections:CriticConfig"))
    with pytest.raises(ConfigError, match=words):
        loaded(tmp_path)


def test_two_plugins_with_one_section_are_refused(install: Install, tmp_path: Path) -> None:
    text = SECTION.replace("KEY", "run.same").replace("PATH", "rillflow.app.sections:CriticConfig")
    install("first", text)
    install("second", text)
    with pytest.raises(ConfigError, match=r"adds the section run\.same"):
        loaded(tmp_path)


def test_a_section_that_cannot_be_imported_is_told_where_a_recipe_has_it(
    install: Install, tmp_path: Path
) -> None:
    install("odd", SECTION.replace("KEY", "run.odd").replace("PATH", "no_such_module_of_settings:Odd"))
    assert loaded(tmp_path).recipe.run.seed == 0
    with pytest.raises(ConfigError, match="no_such_module_of_settings"):
        loaded(tmp_path, "run.odd.size=1")


def test_a_section_of_a_plugin_that_is_not_installed_names_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rillflow.app.plugins.entry_points", lambda **_: [])
    discovered.cache_clear()
    try:
        for setting, line in (
            ("rollout.service.port=1", install_plugin("service")),
            ("run.trackers.wandb={}", install_package()),
            ("placement.fused=[]", install_package()),
        ):
            with pytest.raises(ConfigError, match="is not installed") as caught:
                loaded(tmp_path, setting)
            assert caught.value.fix == line
        with pytest.raises(ConfigError, match="needs the plugin service"):
            raise check(loaded(tmp_path, "rollout.engine=service")).problems[0]
    finally:
        discovered.cache_clear()


def test_a_broken_plugin_is_told_beside_an_unknown_section(install: Install, tmp_path: Path) -> None:
    install("broken", "1 / 0")
    assert loaded(tmp_path).recipe.run.seed == 0
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        loaded(tmp_path, "run.mine.size=1")


def test_a_run_directory_from_before_or_after_a_plugin_is_read_and_resumed(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = "rollout.service={ port = 3 }"
    path = run(loaded(tmp_path, service))
    kept = read_json(path / "config.json")["rollout"]["service"]  # type: ignore[index,call-overload]
    defaults = SECTION.replace("KEY", "run.later").replace("PATH", "rillflow.app.sections:CriticConfig")
    install("later", defaults)
    again = run(loaded(tmp_path, service, "algorithm.steps=3"))
    assert again == path, "a new section with its defaults"
    monkeypatch.setattr("rillflow.app.plugins.entry_points", lambda **_: [])
    discovered.cache_clear()
    old = read_json(path / "config.json")
    assert "service" not in known_settings(old)["rollout"]
    now = as_kept(known_settings(old), loaded(tmp_path).recipe, path)
    assert now["rollout"]["service"] == kept and kept["port"] == 3
    assert recipe_of(load(path)).recipe.algorithm.name == "grpo"


@pytest.mark.parametrize("steps", ["algorithm.steps=2", "schedule={ mode = 'ahead', freshness = 1 }"])
def test_a_run_from_before_a_setting_resumes_unless_the_setting_has_another_value(
    tmp_path: Path, steps: str
) -> None:
    recipe = loaded(tmp_path, steps).recipe
    settings = recipe.model_dump(mode="json")
    old = {name: value for name, value in settings.items() if name not in ("evaluate", "schedule")}
    old["task"] = {name: value for name, value in settings["task"].items() if name not in ("turns", "clock")}
    order = {"freshness": recipe.schedule.steps_ahead, "async_mode": "in_order"}
    old["algorithm"] = {**settings["algorithm"], **order}
    with RunDirectory.open(tmp_path / "old", old):
        pass
    assert allowed_changes(tmp_path / "old", as_kept(settings, recipe, tmp_path / "old"), ()) == []
    other = loaded(tmp_path, steps, "task.turns=all").recipe
    changed = as_kept(other.model_dump(mode="json"), other, tmp_path / "old")
    with pytest.raises(RunDirectoryError, match=r"config: task\.turns: '\(not set\)' -> 'all'"):
        allowed_changes(tmp_path / "old", changed, ())

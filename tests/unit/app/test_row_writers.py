"""Columns of plugins and what writes rows with the policy: recorded, given to rewards, kept on a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.app.check import check
from rillflow.app.facts import RecipeFacts
from rillflow.app.launch import launch
from rillflow.errors import ConfigError, RolloutError
from rillflow.runs.json_lines import read_json
from rillflow.runs.reader import read_rollouts
from tests.unit.app.conftest import Install
from tests.unit.app.test_extending import documented, loaded, run

SCORES = """
def few(prompts, completions, num_sampled, **columns):
    return [float(each) for each in num_sampled]
"""


def scored(folder: Path) -> str:
    (folder / "scores.py").write_text(SCORES)
    return "reward.function=scores.py:few"


def test_a_column_of_a_plugin_is_recorded_and_a_reward_gets_it(install: Install, tmp_path: Path) -> None:
    documented(install, tmp_path, "counted")
    recipe = loaded(tmp_path, scored(tmp_path))
    assert check(recipe).problems == []
    for row in read_rollouts(run(recipe), 2):
        assert row.columns["num_sampled"] == row.reward == len(row.sampled) > 0


def test_without_the_plugin_such_a_reward_is_refused(tmp_path: Path) -> None:
    (problem,) = check(loaded(tmp_path, scored(tmp_path))).problems
    assert "needs a column 'num_sampled'" in problem.what


def test_data_with_a_column_of_a_plugin_is_refused(install: Install, tmp_path: Path) -> None:
    documented(install, tmp_path, "counted")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "num_sampled": 3}\n' * 2)
    recipe = loaded(tmp_path, "task.source=rows.jsonl", "task.held_out=0", scored(tmp_path))
    (problem,) = check(recipe).problems
    assert "has the column 'num_sampled'" in problem.what and "rename" in problem.fix


COLUMN = """
from rillflow.app.plugins import Plugin, RowColumn

def values(setting, rows):
    return VALUES

PLUGIN = Plugin(columns={"odd": RowColumn(path="plugin_of_test_odd:values", example=0)})
"""


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ("[1]", "has no value of JSON for each of 8 rows"),
        ("[float('nan')] * len(rows)", "Out of range float values"),
        ("[object()] * len(rows)", "not JSON serializable"),
    ],
)
def test_a_column_that_is_none_stops_the_run(install: Install, tmp_path: Path, values: str, why: str) -> None:
    install("odd", COLUMN.replace("VALUES", values))
    with pytest.raises(RolloutError, match="the column 'odd' of a plugin") as stopped:
        launch(loaded(tmp_path, "evaluate=none"), quiet=True)
    assert why in str(stopped.value)


WRITER = """
from pathlib import Path

from rillflow.app.plugins import Plugin
from rillflow.app.row_writers import RowWriter, WriterCode
from rillflow.config.schema import Section
from rillflow.rewards.function import FunctionPath, parse_function
from rillflow.rollout.engine_wrapper import EngineWrapper


class TwiceConfig(Section):
    text: str


class Twice(RowWriter):
    engine = "plugin_of_test_twice:TwiceEngine"
    reward = FunctionPath(file=Path(__file__), name="points")

    @property
    def code(self):
        return WriterCode(function=parse_function("twice.py:said", self.base), named="twice")

    def options(self, setting, model):
        return {"said": model.tokenizer.encode(self.config.text)}

    def look(self, facts, report):
        report.say("twice", [self.config.text])


class TwiceEngine(EngineWrapper):
    def __init__(self, *args, said, **given):
        super().__init__(*args, **given)
        self._said, self._rows = said, {}

    @property
    def has_work(self):
        return bool(self._waiting) or self._inner.has_work

    def load(self, version, weights):
        self._inner.load(version, weights)

    def step(self):
        while self._waiting:
            start, sampling = self._waiting.popleft()
            self._rows[start.row] = start
            self._inner.add(start, sampling)
        ended = []
        for row in self._inner.step():
            if self._rows[row.row] is not None and sum(row.loss_mask) < 2:
                self._rows[row.row] = None
                self._inner.add(row.inserted(self._said))
            else:
                ended.append(row)
        return ended

    def _taken_out(self, row):
        self._inner.abort(row)
        return self._rows.pop(row)

    def _clear(self):
        self._waiting.clear()


def points(prompts, completions, **columns):
    return [float(len(each)) for each in completions]


PLUGIN = Plugin(
    sections={"rollout.twice": "plugin_of_test_twice:TwiceConfig"},
    writers={"rollout.twice": "plugin_of_test_twice:Twice"},
)
"""
TWICE = ("rollout.twice.text='+'", 'rollout.stop=["1","2","3","4","5","6","7","8","9","0"]')


@pytest.fixture
def twice(install: Install, tmp_path: Path) -> None:
    install("twice", WRITER)
    (tmp_path / "twice.py").write_text("def said(): ...\n")


@pytest.mark.usefixtures("twice")
def test_a_writer_of_a_plugin_writes_the_rows_of_a_recipe_with_its_section(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, *TWICE, "algorithm.steps=1")
    assert check(recipe).topics["twice"] == ["+"] and check(recipe).problems == []
    assert check(recipe, runs_code=False).topics["not run (--no-code)"] == [
        "reward: plugin_of_test_twice.py:points",
        "rollout.twice: twice",
    ]
    facts = RecipeFacts(resolved=recipe)
    assert [each.name for each in facts.functions] == ["points"] and not facts.named_functions
    assert facts.longest == 16, "such a row may fill the context"
    path = run(recipe)
    said = [row for row in read_rollouts(path, 1) if len(row.sampled) < len(row.tokens) - 4]
    assert said, "rows with the text of the writer, which is not sampled"
    config = read_json(path / "config.json")
    assert "twice" in config["sources"]  # type: ignore[operator]
    (tmp_path / "twice.py").write_text("def said(): return 1\n")
    launch(loaded(tmp_path, *TWICE, "algorithm.steps=2"), quiet=True)


@pytest.mark.usefixtures("twice")
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("reward.model=judge", "reward.model is 'judge', and rollout.twice writes the rows"),
        ("placement.rollout_parallel={tp=2}", "rollout_parallel.tp is 2, and rollout.twice writes the rows"),
        ("rollout.replay_routing=true", "replay_routing is true, and rollout.twice writes the rows"),
    ],
)
def test_what_contradicts_a_writer_is_refused(tmp_path: Path, setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loaded(tmp_path, *TWICE, setting)

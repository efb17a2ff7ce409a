"""Runs of sides: one alone is a plain run; real processes that are killed and return end in one model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.errors import ConfigError, RillflowError
from rillflow_links.sides.merger import Merger, read_records
from rillflow_links.sides.outer import OuterSettings
from rillflow_links.sides.packed import read_version
from rillflow_links.sides.replay import replay
from rillflow_links.sides.rules import MergeRule
from rillflow_links.sides.side_state import SideState
from rillflow_links.sides.store import SideStore
from tests.flows.warm import Command

pytestmark = pytest.mark.timeout(1800)
LIMIT_S = 600.0
"""Longest wait for an event; a busy machine takes minutes for a run."""
RECIPE = """
[run]
threads = 1
checkpoint_every = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 40
held_out = 5
[policy]
schedule = "constant"
lr = 1e-3
model.new = { hidden = 16, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 3
[reward]
function = "digits.py:low"
[algorithm]
name = "grpo"
steps = 4
prompts_per_step = 4
samples_per_prompt = 2
"""
REWARD = """
def low(prompts, completions, **columns):
    return [float(sum(each < "5" for each in text)) for text in completions]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "digits.py").write_text(REWARD)
    return tmp_path


def side(folder: Path, name: str, **changed: object) -> str:
    settings = {"store": str(folder / "store"), "name": name, "inner_steps": 2, "grace_s": LIMIT_S, **changed}
    words = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    return f'schedule={{ mode = "sides", {", ".join(words)} }}'


def run(folder: Path, name: str, *settings: str) -> Path:
    recipe = load_recipe(folder / "run.toml", [f"run.dir={json.dumps(str(folder / name))}", *settings])
    launch(recipe, quiet=True)
    return recipe.directory


def weights_of(run: Path) -> bytes:
    return (max((run / "checkpoints").glob("step-*")) / "policy" / "model.safetensors").read_bytes()


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def merging(folder: Path, outer: OuterSettings, rule: MergeRule) -> Iterator[SideStore]:
    """Merge in a thread; its error ends the test."""
    store, ends, errors = SideStore(str(folder / "store")), threading.Event(), list[Exception]()

    def merge() -> None:
        try:
            merger = Merger(store, rule, outer)
            while not ends.wait(0.01):
                merger.poll()
        except RillflowError as error:
            errors.append(error)

    thread = threading.Thread(target=merge)
    thread.start()
    try:
        yield store
    finally:
        ends.set()
        thread.join()
    assert not errors


def test_one_side_alone_has_the_bits_of_a_plain_run_also_if_it_stops_between(folder: Path) -> None:
    (folder / "run.toml").write_text(RECIPE + "[warm_start]\nsteps = 2\n")
    plain = weights_of(run(folder, "plain"))
    with merging(folder, OuterSettings(lr=1, momentum=0), MergeRule()) as store:
        path = run(folder, "alone", side(folder, "alone"))
        assert weights_of(path) == plain
        assert store.newest() == 2
    told = [each for each in metrics_of(path) if "links/sides/version/max" in each]
    assert [each["links/sides/version/max"]["max"] for each in told] == [1, 2]
    assert all(each["links/sides/failed/mean"]["mean"] == 0 for each in told)
    assert all(each["links/sides/sent_bytes/mean"]["mean"] > 0 for each in told)
    other = folder / "other"
    other.mkdir()
    for name in ("run.toml", "digits.py"):
        (other / name).write_text((folder / name).read_text())
    with merging(other, OuterSettings(lr=1, momentum=0), MergeRule()) as store:
        run(other, "cut", side(other, "cut"), "algorithm.steps=3")
        assert weights_of(run(other, "cut", side(other, "cut"))) == plain
        assert [each["contributions"][0]["step"] for each in read_records(store)[1:]] == [4, 6]
        assert replay(store, lambda _: None)


def test_a_new_side_samples_with_the_version_it_begins_with(folder: Path) -> None:
    pools = ("placement.pools={ main = 2, answers = 1 }", "placement.roles={ sampler = 'answers' }")
    with merging(folder, OuterSettings(), MergeRule(grace_s=0)) as store:
        run(folder, "first", side(folder, "first"), "algorithm.steps=2")
        settings = (*pools, "placement.backend=inline", "run.seed=7", "algorithm.steps=3")
        how = {"codec": "sparse_loco", "share": 0.1}
        path = run(folder, "new", side(folder, "new", **how), *settings)
        assert store.newest() == 2 and read_records(store)[2]["contributions"][0]["side"] == "new"
        sent = metrics_of(path)[1]
        assert sent["links/sides/ratio/mean"]["mean"] > 1
        state = SideState.load(path / "sides", 3)
        assert state.version == 2 and state.links, "the codec's error is kept"
        held = read_version(store, 2)
        assert all(torch.equal(state.base[name], each) for name, each in held.items())
        assert replay(store, lambda _: None)


def test_another_model_and_a_name_that_is_taken_are_refused(folder: Path) -> None:
    with merging(folder, OuterSettings(), MergeRule(grace_s=0)):
        run(folder, "first", side(folder, "first"), "algorithm.steps=1")
        with pytest.raises(RillflowError, match="another run in"):
            run(folder, "second", side(folder, "first"), "algorithm.steps=1")
        with pytest.raises(RillflowError, match="another model than the store"):
            run(folder, "third", side(folder, "third"), "algorithm.steps=1", "policy.model.new.layers=2")
    with pytest.raises(ConfigError, match=r"train_parallel\.main\.tp is 2"):
        parallel = "placement.train_parallel={ main = { tp = 2 } }"
        run(folder, "tp", side(folder, "tp"), "placement.pools={ main = 2 }", parallel)
    with pytest.raises(RillflowError, match=r"has no version after 0\.1 s") as caught:
        lonely = side(folder, "lonely", store=str(folder / "empty"), start_s=0.1)
        run(folder, "fourth", lonely, "algorithm.steps=1")
    assert "rillflow merge-sides" in caught.value.fix


def test_a_store_that_fails_later_does_not_stop_a_side(folder: Path) -> None:
    with merging(folder, OuterSettings(), MergeRule()):
        run(folder, "one", side(folder, "one"), "algorithm.steps=1")
    (folder / "store").rename(folder / "gone")
    (folder / "store").write_text("in the way")
    path = run(folder, "one", side(folder, "one"))
    assert len(metrics_of(path)) == 4
    assert metrics_of(path)[3]["links/sides/failed/mean"]["mean"] == 1


def until(done: Callable[[], bool], *commands: Command) -> None:
    end = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end, [each.said for each in commands]
        time.sleep(0.02)


def test_sides_in_processes_of_their_own_one_killed_and_back(folder: Path) -> None:
    store, settings = SideStore(str(folder / "store")), ("--set", "algorithm.steps=8")

    def begin(name: str, seed: int) -> Command:
        words = ["run", str(folder / "run.toml"), "--dir", str(folder / name), *settings]
        words += ["--set", f"run.seed={seed}", "--set", side(folder, name, inner_steps=4)]
        return Command(words, folder / f"{name}.txt")

    def merger(name: str, *words: str) -> Command:
        return Command(["merge-sides", store.url, "--poll-s", "0.05", *words], folder / f"{name}.txt")

    first = merger("first", "--until", "0")
    stays, leaves = begin("stays", 1), begin("leaves", 2)
    commands = [first, stays, leaves]
    try:
        assert first.wait(LIMIT_S) == 0
        until(lambda: len(store.names("contributions", ".safetensors")) == 2, *commands)
        leaves.kill()
        leaves.wait(LIMIT_S)
        assert not (folder / "leaves" / "checkpoints" / "step-000004").exists(), "it waited in step 4"
        merges = merger("merges", "--grace-s", "0")
        commands.append(merges)
        assert stays.wait(LIMIT_S) == 0, stays.said
        back = begin("leaves", 2)
        commands.append(back)
        assert back.wait(LIMIT_S) == 0, back.said
        merges.kill()
        merges.wait(LIMIT_S)
    finally:
        for each in commands:
            each.kill()
    made = [{each["side"] for each in record["contributions"]} for record in read_records(store)]
    assert made == [set(), {"stays", "leaves"}, {"stays"}, {"leaves"}]
    state = SideState.load(folder / "leaves" / "sides", 9)
    assert state.version == 3 and not state.pending
    again = merger("again", "--until", "3")
    assert again.wait(LIMIT_S) == 0, "it takes over from the killed one"
    checks = merger("checks", "--replay")
    assert checks.wait(LIMIT_S) == 0 and "4 versions are equal in all bits" in checks.said

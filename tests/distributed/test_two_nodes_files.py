"""Runs on two nodes with copies of the files instead of a shared disk: every other byte on one is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))
from machines import PORT, SHARED, Machine, machines, ray_up, why_not
from small_recipe import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

FOLDER = "/tmp/w"
"""The recipe's folder, which every node has on its own disk."""
PATHS = {"PYTHONPATH": f"{FOLDER}/lib:{FOLDER}/site-packages"}
MODEL = "policy.model.path=model"
ENGINE = "rollout.engine=custom:PlainEngine"
PPO = "algorithm.name=ppo"
REWARD = """
import importlib
import json
from pathlib import Path

import beside
import installed
import on_path
from package import inner
from plain.deep import SIX

late = importlib.import_module("late")
TABLE = json.loads((Path(__file__).parent / "tables" / "table.json").read_text())

def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 * beside.ONE * inner.TWO / 2 for text in completions]

def dear(prompts, completions, **columns):
    return [0.0 for _ in completions]
"""
FILES = {
    "reward.py": REWARD,
    "cost.py": "def cost(prompts, completions, **columns):\n    return [0.0 for _ in completions]\n",
    "beside.py": "import below\nONE = below.ONE\n",
    "below.py": "ONE = 1\n",
    "late.py": "THREE = 3\n",
    "package/__init__.py": "",
    "package/inner.py": "from .part import TWO\n",
    "package/part.py": "TWO = 2\n",
    "plain/deep.py": "SIX = 6\n",
    "tables/table.json": "{}\n",
    "listed.txt": "words\n",
    "lib/on_path.py": "FOUR = 4\n",
    "site-packages/installed/__init__.py": "FIVE = 5\n",
    "site-packages/installed-1.0.dist-info/METADATA": "Name: installed\nVersion: 1.0\n",
    "site-packages/installed-1.0.dist-info/top_level.txt": "installed\n",
}
SED = "sed -i s/{}/{}/ {}"

CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "function": (SED.format(4, 5, "reward.py"), "/tmp/w/reward.py", ()),
    "function, other length": ("echo >> reward.py", "/tmp/w/reward.py", ()),
    "module beside it": (SED.format("below.ONE", "below.TWO", "beside.py"), "beside.py", ()),
    "module of a module": (SED.format(1, 2, "below.py"), "below.py", ()),
    "module by import_module": (SED.format(3, 4, "late.py"), "late.py", ()),
    "module in a package": (SED.format(2, 3, "package/part.py"), "package/part.py", ()),
    "module in a folder": (SED.format(6, 7, "plain/deep.py"), "plain/deep.py", ()),
    "module on the path": (SED.format(4, 5, "lib/on_path.py"), "lib/on_path.py", ()),
    "module only here": ("rm lib/on_path.py", "has no module on_path", ()),
    "module only there": ("echo 'FOUR = 5' > on_path.py", "/tmp/w/on_path.py, not", ()),
    "missing file": ("rm below.py", "has no module below", ()),
    "dangling link": ("ln -sf nowhere below.py", "has no module below", ()),
    "folder instead of a file": ("rm late.py; mkdir late.py", "has no module late", ()),
    "file that code reads": ("echo '{ }' > tables/table.json", "tables/table.json", ()),
    "file of reward.files": ("echo other > listed.txt", "listed.txt", ('reward.files=["listed.txt"]',)),
    "installed package": (SED.format(5, 6, "site-packages/installed/__init__.py"), "package installed", ()),
    "version": (
        "cd site-packages; mv installed-1.0.dist-info installed-1.1.dist-info; "
        + SED.format(1.0, 1.1, "installed-1.1.dist-info/METADATA"),
        "it has installed 1.1, and this machine 1.0",
        (),
    ),
    "weights": (
        "printf '\\x01' | dd of=model/model.safetensors bs=1 seek=9000 conv=notrunc status=none",
        "first/model.safetensors (policy.model.path",
        (MODEL,),
    ),
    "weights by a link": ("ln -sfn other model", "other/model.safetensors", (MODEL,)),
    "no weights": ("rm first/model.safetensors", "does not see", (MODEL,)),
    "config": (
        SED.format("1e-06", "1e-05", "first/config.json"),
        "first/config.json (policy.model.path",
        (MODEL,),
    ),
    "tokenizer": (
        "sed -i 's/^{/{ /' first/tokenizer.json",
        "first/tokenizer.json (policy.model.path",
        (MODEL,),
    ),
    "chat template": ("echo hi > first/chat_template.jinja", "chat_template.jinja", (MODEL,)),
    "adapter": (
        "printf '\\x01' | dd of=adapter/adapter_model.safetensors bs=1 seek=900 conv=notrunc status=none",
        "adapter/adapter_model.safetensors",
        ("policy.model.path=adapter",),
    ),
    "base of an adapter": (
        "printf '\\x01' | dd of=first/model.safetensors bs=1 seek=9000 conv=notrunc status=none",
        "model.safetensors",
        ("policy.model.path=adapter",),
    ),
    "engine": ("echo >> lib/custom.py", "lib/custom.py", (ENGINE,)),
    "critic": ("echo >> other/config.json", "other/config.json", (MODEL, PPO, "critic.path=other")),
}
"""What is done on the second node, what the error names besides the node, and settings of the run."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that both nodes see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def nodes(shared: Path) -> Iterator[list[Machine]]:
    """Yield two nodes with Ray; /mnt/tree has the files that each node copies to its own disk."""
    folder, tree = shared, shared / "tree"
    for name, text in FILES.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    engine = (Path(__file__).parents[2] / "examples" / "own_engine.py").read_text("utf-8")
    (tree / "lib" / "custom.py").write_text(engine)
    (tree / "run.toml").write_text(RECIPE.replace("NAME", "grpo"))
    (folder / "model.toml").write_text(RECIPE.replace("NAME", "grpo").replace("reward.py", "tree/cost.py"))
    _models(folder, tree)
    with machines(folder) as pair:
        ray_up(pair[0], env=PATHS)
        ray_up(pair[1], pair[0], env=PATHS)
        yield pair


def _models(folder: Path, tree: Path) -> None:
    """Write two models, a link to the first, and an adapter of it."""
    for name, seed, more in (
        ("first", 1, ()),
        ("other", 2, ()),
        ("adapter", 3, ("policy.model.path=tree/first",)),
    ):
        settings = [f"run.dir={folder / name}", f"run.seed={seed}", "warm_start=none", "evaluate=none"]
        settings += ["algorithm.steps=1", "reward.function=tree/cost.py:cost", *more]
        settings += ["policy.model.adapter={ rank = 2 }", "policy.model.new=none"] if more else []
        loaded = load_recipe(folder / "model.toml", settings)
        launch(loaded, quiet=True)
        (folder / name / "checkpoints/step-000001/policy").rename(tree / name)
    (tree / "model").symlink_to("first")
    config = tree / "adapter" / "adapter_config.json"
    config.write_text(
        re.sub(
            r'"base_model_name_or_path": "[^"]*"', '"base_model_name_or_path": "../first"', config.read_text()
        )
    )


def run(nodes: list[Machine], name: str, *settings: str, code: int = 0, **how: Any) -> str:
    """Run the recipe with a rank on each node; return its output as one line."""
    given = [
        "placement.pools={ main = 2 }",
        f"placement.address={nodes[0].address}:{PORT}",
        "warm_start=none",
    ]
    given += ["evaluate=none", "algorithm.steps=1", 'reward.files=["tables/table.json"]', *settings]
    if any(each.startswith("policy.model.path") for each in settings):
        given.append("policy.model.new=none")
    words = [word for setting in given for word in ("--set", setting)]
    directory = f"{SHARED}/runs/{re.sub('[^a-z]+', '-', name)}"
    env = PATHS | how.pop("env", {})
    text = nodes[0].run(
        "rillflow", "run", f"{FOLDER}/run.toml", "--dir", directory, *words, env=env, code=code, wait_s=600
    )
    return " ".join(text.split())


def copied(nodes: list[Machine]) -> None:
    """Give every node its own copy of the files."""
    for node in nodes:
        node.run("bash", "-ec", f"rm -rf {FOLDER}; cp -r {SHARED}/tree {FOLDER}")


TRY_ALL = """
import json
import subprocess
import sys
from pathlib import Path

from rillflow.app.facts import RecipeFacts
from rillflow_parts.nodes.checks import subject_of
from rillflow_parts.nodes.files import require_alike
from rillflow.app.recipe import load_recipe
from rillflow.errors import RillflowError
from rillflow.workers.backend import Place, Pool
from rillflow.workers.start import ray_backend


def change(site, command):
    copy = f"rm -rf /tmp/w/*; cp -r /mnt/tree/. /tmp/w; cd /tmp/w; {command}"
    return subprocess.run(["bash", "-ec", copy], capture_output=True, text=True).stderr


address, told = sys.argv[1], {}
backend = ray_backend(120.0, address, start_s=120.0, heartbeat_s=0)
backend.open([Pool(name="main", size=2)])
subprocess.run(["cp", "-r", "/mnt/tree", "/tmp/w"], check=True)
for name, (command, _, settings) in json.loads(Path("/mnt/cases.json").read_text()).items():
    settings += ["policy.model.new=none"] if any("model.path" in each for each in settings) else []
    loaded = load_recipe(Path("/tmp/w/run.toml"), settings)
    facts = RecipeFacts(resolved=loaded)
    (done,) = backend.submit(Place("main", 1), change, command)
    assert backend.read_all([done], 60.0) == [""], name
    try:
        require_alike(subject_of(facts), backend, facts.equal_files, 120.0, 120.0)
        told[name] = f"equal, {len(facts.equal_files)} files by digest"
    except RillflowError as error:
        told[name] = str(error)
backend.close()
Path("/mnt/told.json").write_text(json.dumps(told))
"""
"""Opens two ranks on two nodes once, and compares the nodes after each change of the second one's copies."""
EQUAL: dict[str, tuple[str, str, tuple[str, ...]]] = {
    f"equal {settings}": ("touch beside.py", "equal", settings)
    for settings in [
        (),
        (MODEL,),
        ("policy.model.path=adapter",),
        (ENGINE,),
        (MODEL, PPO, "critic.path=other"),
    ]
}


@pytest.fixture(scope="module")
def told(nodes: list[Machine], shared: Path) -> dict[str, str]:
    """Return the error, or the number of compared files, of each case."""
    (shared / "cases.json").write_text(json.dumps(CASES | EQUAL))
    (shared / "cases.py").write_text(TRY_ALL)
    nodes[1].run("mkdir", "-p", FOLDER)
    nodes[0].run("python", f"{SHARED}/cases.py", f"{nodes[0].address}:{PORT}", env=PATHS, wait_s=600)
    found: dict[str, str] = json.loads((shared / "told.json").read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_other_files_on_a_node_are_refused(told: dict[str, str], name: str) -> None:
    assert told[name].startswith("node 10.77.0.2 has other files than this machine"), told[name]
    assert CASES[name][1] in told[name]


@pytest.mark.parametrize("name", EQUAL)
def test_copies_of_the_same_files_are_equal(told: dict[str, str], name: str) -> None:
    assert told[name].startswith("equal") and int(told[name].split()[1]) > 10, told[name]


def test_a_run_is_refused_by_one_changed_file_and_goes_on_once_it_is_equal(nodes: list[Machine]) -> None:
    copied(nodes)
    nodes[1].run("bash", "-ec", f"cd {FOLDER}; {CASES['function'][0]}")
    said = run(nodes, "files", MODEL, code=2)
    assert "error: node 10.77.0.2 has other files than this machine: it has another /tmp/w/reward.py" in said
    copied(nodes)
    said = run(nodes, "files", MODEL)
    assert "other environment variables" not in said
    assert "hostname of the client socket" not in said


def test_variables_that_differ_are_named_and_passed(nodes: list[Machine]) -> None:
    copied(nodes)
    for node in nodes:
        node.run("bash", "-ec", f"echo 'import os; BONUS = os.environ.get(\"BONUS\")' >> {FOLDER}/reward.py")
    env = {"BONUS": "secret-2", "HF_HOME": "/tmp/w/hub", "UNRELATED": "1"}
    said = run(nodes, "variables", env=env)
    for node in nodes:
        assert f"ranks on node {node.address} have other environment variables" in said
    assert "BONUS (in reward.py; not set there), HF_HOME (not set there)" in said
    assert 'placement.env = ["BONUS", "HF_HOME"]' in said
    assert "secret-2" not in said and "UNRELATED" not in said
    said = run(nodes, "passed", 'placement.env=["BONUS", "HF_HOME"]', env=env)
    assert "other environment variables" not in said

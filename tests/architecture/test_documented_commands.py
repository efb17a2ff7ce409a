"""Every command that a page shows runs; CONTRIBUTING.md has the rules.

page ─ commands_of ─> each line that begins with $ ─ in_small ─> small commands, in a copy of the repository
                                               rillflow ... ─> a fork that has the imports; all others ─> bash
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rillflow.algorithms.config import SampledConfig
from rillflow.app.recipe import open_recipe
from rillflow.app.resolved import Resolved
from rillflow.errors import ConfigError
from tests.architecture.lean import make_lean_environment
from tests.flows.warm import Command

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
NEEDS_RIGHT_ANSWERS = ("online_dpo",)
"""Algorithms that stop with an error if no sampled answer is right: they keep their rows and warm start."""
FRONT = "README.md"
INSTALLS = {
    "serve": "pip install -e '.[service]'",
    "watch": "pip install -e '.[service]'",
    "plan": "pip install ./plugins/planner",
    "simulate": "pip install ./plugins/planner",
    "merge": "pip install ./plugins/merging",
}
"""Line that installs the extra or plugin of each command which the core alone cannot run."""
_MARK = re.compile(r"<!-- not run: \S.* -->")
_GENERATED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "model", "tests")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A command of a page."""

    line: int
    """Line number."""
    text: str
    """Text after the $."""
    is_run: bool
    """False if the page gives a reason not to run it."""


def commands_of(page: str) -> Iterator[Shown]:
    """Yield the commands of a page's console blocks; a backslash at the end continues a command."""
    inside, marked, lines = False, False, page.splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip().startswith("```"):
            inside = not inside and line.strip() == "```console"
            marked = inside and number > 1 and _MARK.fullmatch(lines[number - 2].strip()) is not None
        elif inside and line.strip().startswith("$ "):
            text, last = line.strip()[2:], number
            while text.endswith("\\"):
                text, last = text[:-1] + lines[last].strip(), last + 1
            yield Shown(line=number, text=text, is_run=not marked)


def in_small(text: str, folder: Path) -> list[str]:
    """Return the small commands that run in place of a shown one."""
    words = shlex.split(text, comments=True)
    match words:
        case ["make", *targets]:
            return [small for target in targets or ["quickstart"] for small in _of_make(target, folder)]
        case ["source", ".venv/bin/activate"] | ["git" | "cd", *_] | ["pip", "install", *_]:
            return []
        case ["python", file, *_] if file.startswith("benchmarks/"):
            return [f"python {file} --help"]
        case [program, "run", *arguments] if program.endswith("rillflow"):
            return [f"{text} {shlex.join(_small_settings(arguments, folder))}"]
    return [text]


def _of_make(target: str, folder: Path) -> list[str]:
    """Check that a target exists; return small versions of its rillflow commands."""
    done = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"make {target}: {done.stderr}"
    lines = [line for line in done.stdout.splitlines() if "bin/rillflow " in line]
    return [small for line in lines for small in in_small(line, folder)]


def _small_settings(arguments: list[str], folder: Path) -> list[str]:
    """Return settings that reduce a run to one step of a few rows, in addition to the shown ones."""
    given = [value for flag, value in itertools.pairwise(arguments) if flag == "--set"]
    loaded = open_recipe(folder / arguments[0], given)
    if not isinstance(loaded, Resolved):
        return ["--set", "algorithm.steps=2", "--set", "evaluate.episodes=2"]
    recipe = loaded.recipe
    small = ["algorithm.steps=1", "policy.warmup_steps=0", "evaluate.problems=8"]
    if recipe.algorithm.name in NEEDS_RIGHT_ANSWERS:
        return [word for setting in small for word in ("--set", setting)]
    small += ["algorithm.prompts_per_step=4", "algorithm.minibatches=1", "rollout.max_rows=8"]
    if isinstance(recipe.algorithm, SampledConfig):
        small.append("algorithm.samples_per_prompt=2")
    if recipe.warm_start is not None:
        small += ["warm_start.steps=1", "warm_start.prompts_per_step=8", "warm_start.warmup_steps=0"]
    return [word for setting in small for word in ("--set", setting)]


def without_installs(page: str) -> Iterator[Shown]:
    """Yield the commands of a page that stand in no section after one that installs something."""
    ends = [*(n for n, line in enumerate(page.splitlines(), 1) if line.startswith("## ")), sys.maxsize]
    installed_until = 0
    for shown in commands_of(page):
        if shown.text.startswith("pip install"):
            installed_until = next(end for end in ends if end > shown.line)
        elif shown.line >= installed_until:
            yield shown


def unprepared(page: str) -> list[str]:
    """Return the commands of a page that need more than the core, without its install line above them.

    The line stands in the same section.
    """
    found, lines = [], set[str]()
    heads = [number for number, line in enumerate(page.splitlines(), 1) if line.startswith("## ")]
    section = 0
    for shown in commands_of(page):
        if (here := sum(head < shown.line for head in heads)) != section:
            section, lines = here, set()
        lines.add(shown.text)
        words = shlex.split(shown.text, comments=True)
        needed = INSTALLS.get(words[1]) if words[0] == "rillflow" and len(words) > 1 else None
        if needed is not None and needed not in lines:
            found.append(shown.text)
    return found


def forked_words(command: str) -> list[str]:
    """Return the words after ``rillflow``, or none if the command needs a shell or is another program."""
    program, *words = shlex.split(command, comments=True)
    is_plain = Path(program).name == "rillflow" and not set(command) & set("|&;<>$`*(~")
    return words if is_plain else []


def ended(command: str, folder: Path, said: Path) -> tuple[int, str]:
    """Run a command in a folder; return its exit code and its output."""
    if words := forked_words(command):
        return (running := Command(words, said)).wait(LIMIT_S), running.said
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, f"{done.stdout[-2000:]}{done.stderr}"


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return the names that a copy omits; ``runs`` in the root holds runs, ``rillflow/runs`` is code."""
    runs = {"runs"} if Path(folder) == ROOT else set()
    return _GENERATED(folder, names) | runs


def pages() -> list[Path]:
    """Return every page of the repository."""
    folders = [ROOT / name for name in ("docs", "plugins", "recipes", "examples", "benchmarks")]
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


WITH_COMMANDS = [str(page.relative_to(ROOT)) for page in pages() if any(commands_of(page.read_text("utf-8")))]
"""Pages with commands; of the front page, the lean environment runs those that the core can run."""
ALIKE = (
    "best_of_n",
    "cispo",
    "dapo",
    "dr_grpo",
    "gspo",
    "online_dpo",
    "ppo",
    "reinforce_pp",
    "remax",
    "rloo",
)
"""Recipes whose pages differ only in a name; together they take a minute."""
ELSEWHERE = ("arithmetic", "pairwise", "preference", "safe_rlhf", "warp", "your_own")
"""Recipes that tests/flows or the front page's commands run every day."""
LONGER = [f"recipes/{name}/README.md" for name in (*ALIKE, *ELSEWHERE)] + [
    "docs/algorithms/README.md",
    "docs/cli.md",
    "docs/cluster.md",
    "docs/first_day.md",
    "docs/lora_to_vllm.md",
    "docs/resume.md",
    "docs/design/controller.md",
    "docs/design/fusion.md",
    "docs/design/models.md",
    "docs/design/parallel.md",
    "docs/design/streaming.md",
    "docs/sweeps.md",
    "docs/trackers.md",
    "plugins/merging/docs/merging.md",
    "plugins/planner/docs/commands.md",
    "recipes/chat_preference/README.md",
    "recipes/sft/README.md",
]
"""Pages whose commands run with the slow tests.

They are each command of the command line once more, and the commands of ranks and meshes, which start many
processes.
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in LONGER else ()) for page in WITH_COMMANDS]
)
def test_every_command_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "rillflow"
    shutil.copytree(ROOT, folder, ignore=_left_out)
    (folder / ".venv").symlink_to(sys.prefix)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(folder)
    text = (ROOT / page).read_text("utf-8")
    lean = {shown.line for shown in without_installs(text)} if page == FRONT else set()
    for shown in commands_of(text):
        for command in in_small(shown.text, folder) if shown.is_run and shown.line not in lean else []:
            code, said = ended(command, folder, tmp_path / "said.txt")
            assert code == 0, f"{page}:{shown.line}: {command}\nended with {code}\n{said[-6000:]}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_front_page_runs_after_make_quickstart_alone(tmp_path: Path) -> None:
    """Nothing of the extras, the plugins and the tests' tools can be imported."""
    folder = tmp_path / "rillflow"
    shutil.copytree(ROOT, folder, ignore=_left_out)
    programs = make_lean_environment(folder / ".venv", folder)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    ran = []
    for shown in without_installs((ROOT / FRONT).read_text("utf-8")):
        for command in in_small(shown.text, folder) if shown.is_run else []:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            assert done.returncode == 0, f"{FRONT}:{shown.line}: {command}\n{done.stdout}{done.stderr}"
            ran.append(command)
    assert len(ran) >= 5


def test_the_front_page_installs_what_its_commands_need() -> None:
    assert unprepared((ROOT / FRONT).read_text("utf-8")) == []


def test_a_command_without_its_install_line_is_found() -> None:
    serve, install = "$ rillflow serve runs/a", "$ pip install -e '.[service]'"
    page = f"## One\n```console\n{install}\n{serve}\n```\n## Two\n```console\n{serve}\n$ make test\n```\n"
    assert unprepared(page) == ["rillflow serve runs/a"]
    assert [shown.text for shown in without_installs(page)] == ["rillflow serve runs/a", "make test"]


def test_no_page_installs_from_an_index_that_lacks_rillflow() -> None:
    """Nothing of Rillflow is on PyPI, so a page names the clone's folders."""
    named = [
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in pages()
        if page.relative_to(ROOT).parts[:2] != ("docs", "design") and "plugins" not in page.parts
        for line in page.read_text("utf-8").splitlines()
        if re.search(r"pip install (-\S+ )*'?rillflow", line)
    ]
    assert named == []


def test_a_command_of_rillflow_alone_needs_no_shell() -> None:
    assert forked_words("rillflow check run.toml  # a note") == ["check", "run.toml"]
    for text in (
        "rillflow check a.toml | tee b",
        "rillflow check $run",
        "python -m rillflow.cli.main doctor",
    ):
        assert forked_words(text) == []


def test_no_command_hides_in_another_kind_of_block() -> None:
    hidden = [
        str(page)
        for page in pages()
        if re.search(r"^\s*```(ba|z)?sh|^\s*```shell", page.read_text("utf-8"), re.M)
    ]
    assert hidden == []


def test_the_readme_is_among_the_pages() -> None:
    texts = [shown.text for shown in commands_of((ROOT / "README.md").read_text("utf-8"))]
    assert "make quickstart" in texts
    assert "make test" in texts


def test_commands_are_found() -> None:
    blocks = [
        "```console\n$ one \\\n  two\noutput\n  $ three\n```",
        "```sh\n$ four\n```",
        "<!-- not run: long -->\n```console\n$ five\n```",
    ]
    page = "\n".join(blocks)
    assert [(shown.line, shown.text, shown.is_run) for shown in commands_of(page)] == [
        (2, "one two", True),
        (5, "three", True),
        (12, "five", False),
    ]


def test_a_block_without_a_reason_is_run() -> None:
    assert next(commands_of("<!-- not run: -->\n```console\n$ one\n```")).is_run


def test_a_run_becomes_small_and_keeps_its_settings() -> None:
    (small,) = in_small("rillflow run recipes/arithmetic/run.toml --set policy.lr=1e-5", ROOT)
    assert small.startswith(
        "rillflow run recipes/arithmetic/run.toml --set policy.lr=1e-5 --set algorithm.steps=1"
    )
    assert "warm_start.steps=1" in small


def test_a_wrong_setting_or_target_in_a_page_is_found() -> None:
    with pytest.raises(ConfigError, match="learning_rate"):
        in_small("rillflow run recipes/arithmetic/run.toml --set policy.learning_rate=1", ROOT)
    with pytest.raises(AssertionError, match="make quickstrat"):
        in_small("make quickstrat", ROOT)


def test_of_a_benchmark_the_help_runs() -> None:
    assert in_small("python benchmarks/step.py --trl .trl/bin/python", ROOT) == [
        "python benchmarks/step.py --help"
    ]


def test_make_quickstart_runs_a_recipe() -> None:
    (small,) = in_small("make quickstart", ROOT)
    assert small.startswith(".venv/bin/rillflow run recipes/arithmetic/run.toml --set")

"""The commands of a page for one recipe natively, with an adapter and by vLLM, each in small."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rillflow.runs.layout import CONFIG
from rillflow.runs.reader import read_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "architecture"))
from test_documented_commands import ROOT, commands_of, in_small

PAGE = ROOT / "docs" / "design" / "vllm.md"
MAIN = [sys.executable, "-c", "import sys; from rillflow.cli.main import main; sys.exit(main())"]
pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="`make test-vllm` installs vLLM")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recipe and its model, as after the first command."""
    made = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "recipes", made / "recipes", ignore=shutil.ignore_patterns("model", "__pycache__"))
    subprocess.run([sys.executable, "recipes/your_own/make_model.py"], cwd=made, check=True, timeout=120)
    return made


def shown() -> list[str]:
    """Return the page's commands for the recipe's four variants."""
    texts = [each.text for each in commands_of(PAGE.read_text("utf-8"))]
    return [text for text in texts if " run recipes/your_own/" in text]


def test_there_are_four() -> None:
    assert [text.split("--dir runs/")[1].split()[0] for text in shown()] == [
        "native",
        "lora",
        "server",
        "vllm",
    ]


@pytest.mark.parametrize("text", shown(), ids=lambda text: text.split("--dir runs/")[1].split()[0])
def test_a_recipe_runs_by_a_changed_line(text: str, folder: Path) -> None:
    (command,) = in_small(text.replace("../../.venv-vllm/bin/python", sys.executable), folder)
    words = shlex.split(command)[1:]
    done = subprocess.run(
        [*MAIN, *words],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    run = folder / words[words.index("--dir") + 1]
    assert len(read_metrics(run)) == 1
    engine = json.loads((run / CONFIG).read_text("utf-8"))["rollout"]["engine"]
    assert engine == ("vllm" if "rollout.engine=vllm" in words else "native")

"""Files and functions of Rillflow that one step and one whole run enter: the size of the code to read.

    step    one inline GRPO step of recipes/arithmetic: from the end of one step to the end of the next
    run     `rillflow run` of the same recipe, from the command to the report

    python benchmarks/source/files_entered.py            # the two counts
    python benchmarks/source/files_entered.py --list     # with the files of each

A profile function in every thread sees each call. Children that score rewards do not count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import rillflow

SMALLEST = []
SLOW = ["--steps 3"]

PACKAGE = Path(rillflow.__file__).parent
ROOT = PACKAGE.parent
RECIPE = ROOT / "recipes" / "arithmetic" / "run.toml"
SMALL = ("warm_start.steps=2", "algorithm.prompts_per_step=8", "evaluate.problems=8", "run.threads=1")


class Entered:
    """Functions of the package, its parts and plugins that were called while recording was on."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str, int]] = set()
        self.is_on = False
        self._folders = (f"{PACKAGE}/", f"{ROOT}/rillflow_parts/", f"{ROOT}/plugins/")

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call."""
        del argument
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(self._folders):
            code = frame.f_code
            if code.co_name != "<module>":
                self.functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    def install(self) -> None:
        """Record the calls of this thread and of threads that start later."""
        threading.setprofile(self)
        sys.setprofile(self)

    @property
    def files(self) -> Counter[str]:
        """Number of functions by file."""
        return Counter(str(Path(file).relative_to(ROOT)) for file, *_ in self.functions)


def settings(steps: int, folder: Path) -> list[str]:
    """Return the overrides of a small run."""
    return [*SMALL, f"algorithm.steps={steps}", f'run.dir="{folder}"']


def step(steps: int, folder: Path) -> Entered:
    """Return the functions that the last step of a run enters."""
    from rillflow.app.launch import launch
    from rillflow.app.recipe import load_recipe

    entered = Entered()

    def told(phase: str, number: int, metrics: Any) -> None:
        del metrics
        entered.is_on = phase == "grpo" and number == loaded.total_steps - 1

    loaded = load_recipe(RECIPE, settings(steps, folder))
    entered.install()
    launch(loaded, quiet=True, told=told)
    return entered


def run(steps: int, folder: Path) -> Entered:
    """Return the functions that a whole command enters."""
    entered = Entered()
    entered.is_on = True
    entered.install()
    from rillflow.cli.main import main as command

    words = [word for one in settings(steps, folder) for word in ("--set", one)]
    with suppress(SystemExit):
        command(["run", str(RECIPE), "--quiet", *words])
    return entered


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4, help="steps of each run")
    parser.add_argument("--list", action="store_true", help="show the files")
    given = parser.parse_args()
    kinds: dict[str, Callable[[int, Path], Entered]] = {"step": step, "run": run}
    with tempfile.TemporaryDirectory() as folder:
        for name, measure in kinds.items():
            found = measure(given.steps, Path(folder) / name)
            sys.setprofile(None)
            threading.setprofile(None)
            files = found.files
            print(f"{name}: {len(files)} files, {len(found.functions)} functions")
            if given.list:
                for file, count in sorted(files.items()):
                    print(f"    {count:4} {file}")


if __name__ == "__main__":
    main()

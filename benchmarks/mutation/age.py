"""Age of a study: the share of the code's lines that changed since its commit.

commit ─ git ─> texts then ─┐
checkout ─────> texts now ──┴─ docs/size.py ─> lines added and removed / lines now ─ LIMIT ─> out of date
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from studied import files, is_studied

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import size

LIMIT = 1 / 3
"""Changed share of the code from which a study is out of date."""


def is_out_of_date(commit: str, root: Path) -> bool:
    """Return whether the code below a root has changed too much since a commit for its study to count.

    Docstrings, comments and moved lines do not count.

    Raises:
        LookupError: git does not know the commit.
    """
    then = sum((size.code(text) for _, text in texts_at(commit, root)), Counter[str]())
    now = sum((size.code(path.read_text("utf-8")) for path in files(root)), Counter[str]())
    return (then - now).total() + (now - then).total() >= LIMIT * now.total()


def texts_at(commit: str, root: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of every file of code at a commit; raise LookupError if git does not know it."""
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit], cwd=root, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        raise LookupError(f"git does not know the study's commit {commit} here: {listed.stderr.strip()}")
    paths = [path for path in listed.stdout.splitlines() if path.endswith(".py") and is_studied(path)]
    with subprocess.Popen(
        ["git", "cat-file", "--batch"], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as git:
        assert git.stdin is not None and git.stdout is not None
        for path in paths:
            git.stdin.write(f"{commit}:{path}\n".encode())
            git.stdin.flush()
            length = int(git.stdout.readline().split()[-1])
            yield path, git.stdout.read(length + 1).decode()

"""Any write may fail or be a driver's last action; the resumed run has the bits of an undisturbed one.

test ── "the 3rd write on metrics.jsonl fails" ──> a process that runs recipes, disk_faults.c in front of libc
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.flows.conftest import Tiny

SOURCE = Path(__file__).with_name("disk_faults.c")
REST = """
steps = 2
loss.kl = 0.01
[task]
source = "prompts.jsonl"
held_out = 2
[evaluate]
problems = 2
every = 1
"""
OFTEN = "run.checkpoint_every=1"
RUNNER = """
import contextlib, ctypes, io, json, os, sys
from rillflow.cli.main import main

faults = ctypes.CDLL(None)
text, number = ctypes.c_char_p, ctypes.c_long
faults.faults_begin.argtypes = [text, number, ctypes.c_int, ctypes.c_int, text]
for line in sys.stdin:
    order = json.loads(line)
    out, err = io.StringIO(), io.StringIO()
    child = os.fork() if order["error"] < 0 else None
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print("ANSWER", json.dumps({"code": code, "out": "", "err": ""}), flush=True)
        continue
    given = order["folder"].encode(), order["turn"], order["error"], order["lasts"], order["tell"].encode()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        faults.faults_begin(*given)
        code = main(order["words"])
        faults.faults_end()
    if child == 0:
        os._exit(code)
    print("ANSWER", json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue()}), flush=True)
"""
NUMBERS = re.compile(r"(?<=step-)\d{6}|(?<=reward-)[0-9a-f]{16}|(?<=/\.tmp)\w{6}")
DRAFT, BEGUN = "checkpoints/.step-N.draft", "checkpoints/.step-N.begun"
MODEL = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
ROLLOUTS = "step-N-0001-of-0001.safetensors"
REPLACED = (
    "config.json",
    "environment.json",
    "tokens.json",
    "data.json",
    "finished.json",
    "summary.json",
    "report.html",
)
WRITES = {
    "create write": [*(f"{BEGUN}/policy/{name}" for name in MODEL)],
    "create write flush": [
        *("evaluations.jsonl", "spans.jsonl", "metrics.jsonl", "digests.jsonl"),
        *(f".{name}.tmp" for name in REPLACED),
        "sources/.reward-N.py.tmp",
        f"rollouts/.{ROLLOUTS}.tmp",
        *(f".reference.draft/{name}" for name in MODEL),
        f"{BEGUN}/policy.optimizer/.weights.json.tmp",
        *(f"{folder}/model.safetensors" for folder in (".reference.draft", f"{BEGUN}/policy")),
        f"{BEGUN}/policy.optimizer/rank-00000.safetensors",
        f"{DRAFT}/state.json",
        f"{DRAFT}/manifest.json",
    ],
    "create flush": [".digests.jsonl.tmp"],
    "create cut place": ["run.lock"],
    "flush": [*(f"{DRAFT}/policy/{name}" for name in MODEL), f"{DRAFT}/policy.optimizer/weights.json"],
    "folder flush": [
        *(".", "sources", "rollouts", "checkpoints", ".reference.draft", DRAFT),
        f"{BEGUN}/policy.optimizer",
    ],
    "folder": [BEGUN, f"{BEGUN}/policy"],
    "rename flush": [f"{DRAFT}/policy", f"{DRAFT}/policy.optimizer"],
    "rename": [
        *REPLACED,
        *("digests.jsonl", "sources/reward-N.py", "reference", f"rollouts/{ROLLOUTS}", "checkpoints/step-N"),
        f"{BEGUN}/policy.optimizer/weights.json",
    ],
}
"""Calls of a run on each of its files and folders."""
KILL = -1
EVERY_DAY = {
    ("write", "metrics.jsonl", errno.ENOSPC),
    ("write", "metrics.jsonl", errno.EIO),
    ("write", f"rollouts/.{ROLLOUTS}.tmp", errno.EIO),
    ("write", f"{BEGUN}/policy/model.safetensors", errno.ENOSPC),
    ("rename", "checkpoints/step-N", errno.EIO),
    ("write", ".report.html.tmp", errno.ENOSPC),
    ("flush", f"{DRAFT}/manifest.json", KILL),
}


def cases() -> Iterator[Any]:
    """Yield faults: a full disk stays full, a device error comes once, a driver is killed at the write."""
    for calls, files in WRITES.items():
        for call in calls.split():
            kinds = {errno.ENOSPC: call not in ("flush", "cut"), errno.EIO: call not in ("create", "folder")}
            for error in (*(kind for kind, can_be in kinds.items() if can_be), KILL):
                for file in files:
                    marks = [] if (call, file, error) in EVERY_DAY else [pytest.mark.slow]
                    name = f"{call} {file} {'killed' if error == KILL else errno.errorcode[error]}"
                    yield pytest.param(call, file, error, id=name, marks=marks)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Exit code and output of a run."""

    code: int
    out: str
    err: str


class Faulty(Tiny):
    """Tiny runs in a process whose writes below a run's directory can be made to fail."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        super().__init__(folder)
        self._process = process

    def failing(self, name: str, turn: int = 0, error: int = 0, lasts: bool = False, tell: str = "") -> Ended:
        """Run the recipe; its ``turn``-th write below its directory fails, with ``lasts`` all later ones."""
        words = ["run", str(self.recipe), "--dir", str(self.folder / name), "--set", OFTEN]
        order = {"folder": str(self.folder / name), "turn": turn, "error": error, "lasts": lasts}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(order | {"tell": tell, "words": words}) + "\n")
        stdin.flush()
        for line in stdout:
            if line.startswith("ANSWER "):
                return Ended(**json.loads(line.removeprefix("ANSWER ")))
        raise AssertionError("the process that runs recipes has ended")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler for the shim")
    folder = tmp_path_factory.mktemp("faults")
    shim = folder / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, SOURCE, "-ldl"], check=True, timeout=60)
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "LD_PRELOAD": str(shim)},
    )  # fmt: skip
    made = Faulty(folder, process)
    made.write(REST)
    made.write_rows(12)
    yield made
    assert process.stdin is not None
    process.stdin.close()
    process.wait(20)


@pytest.fixture(scope="module")
def writes(faulty: Faulty) -> list[str]:
    """Return every write of an undisturbed run named ``whole``, as ``call file``."""
    assert faulty.failing("whole", tell=str(faulty.folder / "told")).code == 0
    return (faulty.folder / "told").read_text().splitlines()


def plain(what: str) -> str:
    return NUMBERS.sub("N", what)


def last_of_the_start(writes: list[str]) -> int:
    """Return the number of the last write of the start; a failure before it gives exit code 2."""
    return len(writes) - writes[::-1].index("rename environment.json") + 1


@pytest.mark.parametrize(("call", "file", "error"), [*cases()])
def test_a_run_survives_a_write_that_fails(
    faulty: Faulty, writes: list[str], call: str, file: str, error: int
) -> None:
    lasts, name = error == errno.ENOSPC, "run"
    turns = [turn for turn, what in enumerate(writes, 1) if plain(what) == f"{call} {file}"]
    turn = turns[0] if lasts else turns[-1]
    shutil.rmtree(faulty.folder / name, ignore_errors=True)
    ended = faulty.failing(name, turn, error, lasts)
    if error == KILL:
        assert ended.code == -signal.SIGKILL
    else:
        assert_said(ended, error, turn, writes)
    again = faulty.failing(name)
    assert again.code == 0, again
    assert_whole(faulty, name)


def assert_said(ended: Ended, error: int, turn: int, writes: list[str]) -> None:
    """Check that the error is Rillflow's with the system's reason, and that its code matches the progress."""
    said = ended.err if ended.code else ended.out
    assert re.search(r"cannot (write|be written)", said) and os.strerror(error) in said, ended
    assert "Traceback" not in said and "correct that line" not in said, ended
    if turn > writes.index("rename finished.json") + 2:  # and the flush of the folder
        assert ended.code == 0 and "the run is finished, but its report is not" in said, ended
    else:
        assert ended.code == (1 if turn > last_of_the_start(writes) else 2), ended


@pytest.mark.slow
def test_the_table_has_every_write_of_a_run(writes: list[str]) -> None:
    known = {f"{call} {file}" for calls, files in WRITES.items() for call in calls.split() for file in files}
    made = {*map(plain, writes)}
    assert (sorted(made - known), sorted(known - made)) == ([], [])


def assert_whole(faulty: Faulty, name: str) -> None:
    """Check that a run equals the undisturbed one, to the last file."""
    faulty.assert_same("whole", name)
    whole, run = faulty.folder / "whole", faulty.folder / name
    for file in (whole / "rollouts").iterdir():
        assert (run / "rollouts" / file.name).read_bytes() == file.read_bytes()
    judged = [
        [{key: value for key, value in line.items() if key != "time_s"} for line in lines]
        for lines in (faulty.lines(each, "evaluations.jsonl") for each in (name, "whole"))
    ]
    assert judged[0] == judged[1]
    first, second = ({path.relative_to(each) for path in each.rglob("*")} for each in (run, whole))
    assert first == second

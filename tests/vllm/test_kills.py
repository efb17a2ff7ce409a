"""A server of vLLM that ends in any of its requests: no step is lost, no rank hangs, the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.flows.conftest import Tiny

sys.path.insert(0, str(Path(__file__).parent))
from dying_server import HOWS, write_python

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` has an environment with it"
    ),
    pytest.mark.timeout(1800),
]
REST = """
steps = 4
loss.correction = "none"
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 60
held_out = 10
[evaluate]
problems = 4
"""
REWARD = """
def reward(prompts, completions, **_):
    return [sum(letter < "5" for letter in text) / 3 for text in completions]
"""
MODEL = (
    'policy.model.new={ hidden=128, layers=2, heads=4, context=16, alphabet="0123456789+=" }',
    "rollout.max_rows=16",
)
PLACES = {
    "one": (),
    "two": ("placement.pools={main=2}", "placement.backend=process"),
    "threads": ("placement.pools={main=2}", "placement.backend=inline"),
    "apart": (
        "placement.pools={main=1,answers=2}",
        'placement.roles={sampler="answers"}',
        "placement.backend=process",
    ),
    "ready_first": (
        "placement.pools={main=1,answers=2}",
        'placement.roles={sampler="answers"}',
        "placement.backend=process",
        'schedule={mode="ahead",freshness=1}',
        "schedule.mode=ready_first",
    ),
}
TAIL = (
    'schedule={mode="tail_batching",oversample_prompts=1.5}',
    "rollout.max_tokens=8",
    "rollout.max_rows=2",
)
ADAPTER = ("policy.model.new=none", "policy.model.adapter.rank=4", "policy.lr=0.01")
REQUESTS = {"start": 0, "reload": 2, "adapt": 2, "wake": 3, "add": 12, "step": 3, "abort": 0, "sleep": 2}
"""Requests, and how many of each a server answers before it ends: in the third step or so."""
NEEDS = {"abort": TAIL, "adapt": ADAPTER}
"""Settings with which a request is made at all."""
DAILY = {("two", "sleep", "kill")}
CASES = [
    *(("one", request, "kill") for request in REQUESTS),
    *(("two", request, "kill") for request in REQUESTS if request != "abort"),  # no row of theirs is aborted
    *(("one", request, how) for request in ("start", "step", "sleep") for how in HOWS[1:]),
    *(("two", request, "stop") for request in ("step", "sleep")),
    *(
        (place, request, "kill")
        for place in ("threads", "apart", "ready_first")
        for request in ("reload", "step")
    ),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of torch's compiled code, which all servers share."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def tiny(tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    made = Tiny(tmp_path)
    made.write(REST, REWARD)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    return made


def servers_of(folder: Path) -> list[int]:
    """Return the processes that run a server of this test."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder / "dies.json").encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def assert_nothing_left(folder: Path) -> None:
    """Check that no server is left, no shared memory, and no file but torch's cache of compiled code."""
    until = time.monotonic() + 30
    while servers_of(folder) and time.monotonic() < until:
        time.sleep(0.1)
    assert not servers_of(folder)
    assert {each.name for each in (folder / "tmp").iterdir()} <= {"torchinductor_root"}
    assert not [*Path("/dev/shm").glob("*cpushm_*")]


@pytest.mark.parametrize(
    ("place", "request_", "how"),
    [pytest.param(*each, marks=[] if each in DAILY else pytest.mark.slow) for each in CASES],
)
def test_a_server_that_ends_loses_no_step_and_the_run_repairs_itself(
    tiny: Tiny, place: str, request_: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens are the native engine's, so the weights are those of an undisturbed native run."""
    python = write_python(tiny.folder, {request_: REQUESTS[request_]}, how=how)
    settings = (*MODEL, *PLACES[place], *NEEDS.get(request_, ()))
    if request_ == "adapt":
        assert tiny.run("base", *MODEL, "algorithm.steps=1") == 0
        settings = (*settings, f"policy.model.path={tiny.folder / 'base'}")
        capsys.readouterr()
    began = time.monotonic()
    assert tiny.run("cut", "rollout.engine=vllm", f"rollout.server={python}", *settings) == 0
    took_s = time.monotonic() - began
    said = " ".join("".join(capsys.readouterr()).split())
    assert (tiny.folder / "dies.json.death-0").exists(), "the server did not end"
    assert "has lost its engine: vLLM's server (process" in said, said
    assert "are repeated" not in said and len(tiny.lines("cut")) == 4, said
    assert took_s < 800, "a rank waited for a deadline"
    if place == "ready_first":
        assert "a new process takes its place" in said, said
    else:
        assert "(restart 1 of 3)" in said, said
        assert tiny.run("whole", *settings) == 0
        tiny.assert_same_weights("whole", "cut")
    assert_nothing_left(tiny.folder)


@pytest.mark.parametrize("place", ["one", pytest.param("two", marks=pytest.mark.slow)])
def test_servers_that_end_in_one_request_after_the_other_lose_no_step(
    tiny: Tiny, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run; each server answers a few requests, so that steps are finished in between."""
    deaths = {"sleep": 2, "step": 3, "wake": 2, "reload": 1, "add": 12, "start": 0}
    python = write_python(tiny.folder, deaths)
    settings = (*MODEL, *PLACES[place], "algorithm.steps=12", "run.restarts=8")
    assert tiny.run("cut", "rollout.engine=vllm", f"rollout.server={python}", *settings) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    for number, request in enumerate(deaths):
        assert (tiny.folder / f"dies.json.death-{number}").exists(), f"no server ended to {request}"
    assert said.count("; all ranks start again from step") == len(deaths), said
    assert "are repeated" not in said and len(tiny.lines("cut")) == 12, said
    assert tiny.run("whole", *settings) == 0
    tiny.assert_same_weights("whole", "cut")
    assert_nothing_left(tiny.folder)


def until(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 240
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("killed", "when"),
    [
        ("driver", "steps"),
        pytest.param("driver", "start", marks=pytest.mark.slow),
        pytest.param("driver", "stopped server", marks=pytest.mark.slow),
        pytest.param("rank", "steps", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_after_a_kill(tiny: Tiny, killed: str, when: str) -> None:
    """A server that is stopped ends with its rank, too."""
    python = write_python(tiny.folder, {})
    settings = ("rollout.engine=vllm", f"rollout.server={python}", *MODEL, *PLACES["two"], "run.restarts=0")
    words = [word for each in (*settings, "algorithm.steps=500") for word in ("--set", each)]
    code = "import sys; from rillflow.cli.main import main; sys.exit(main())"
    run = tiny.folder / "cut"
    command = [sys.executable, "-c", code, "run", str(tiny.recipe), "--dir", str(run), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        until(lambda: len(servers_of(tiny.folder)) == 2, process)
        if when != "start":
            until(lambda: (run / "metrics.jsonl").is_file() and len(tiny.lines("cut")) > 1, process)
        if when == "stopped server":
            os.kill(servers_of(tiny.folder)[0], signal.SIGSTOP)
        parents = {_parent(each) for each in servers_of(tiny.folder)}
        os.kill(process.pid if killed == "driver" else min(parents), signal.SIGKILL)
        said = process.communicate(timeout=120)[0]
    assert process.returncode == (-9 if killed == "driver" else 1), said
    assert_nothing_left(tiny.folder)


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])

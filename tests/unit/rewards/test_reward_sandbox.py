"""Escape attempts of a sandboxed reward function, all of which fail."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rillflow.errors import RewardError
from rillflow.isolation.kernel import NETWORK, USERS, ask
from rillflow.isolation.sandbox import Level
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.isolated_process import fork
from rillflow.rewards.outcome import Outcome
from rillflow.rewards.source import shipped
from rillflow.rewards.supervisor import _open_door
from rillflow.rewards.workers import RewardWorkers

Write = Callable[..., FunctionPath]

pytestmark = pytest.mark.skipif(
    not Path("/proc/sys/user/max_user_namespaces").is_file()
    or Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0",
    reason="this kernel gives no user namespaces",
)

CORPUS = {
    "reads a file of the user's": "open(secret).read()",
    "lists the user's folder": "os.listdir(os.path.dirname(secret))",
    "reads a variable": 'os.environ["CANARY"]',
    "reads the driver's variables": 'open(f"/proc/{driver}/environ").read()',
    "signals the driver": "os.kill(driver, 0)",
    "writes beside itself": 'open(os.path.join(os.path.dirname(__file__), "x"), "w")',
    "changes itself": 'open(__file__, "a")',
    "writes to the system": 'open("/usr/x", "w")',
    "writes to the package": 'import rillflow; open(rillflow.__file__, "a")',
    "connects to a port": 'socket.create_connection(("127.0.0.1", port), 1)',
    "connects to a named socket": "socket.socket(socket.AF_UNIX).connect(named)",
    "connects to an abstract socket": 'socket.socket(socket.AF_UNIX).connect("\\0" + abstract)',
    "mounts": 'call("mount", b"none", b"/tmp", b"tmpfs", 0, None)',
    "makes a namespace of its own": 'call("unshare", 0x10020000)',
    "makes its files writable again": 'call("mount", None, here, None, 0x1020, None)',
    "takes the root away": 'call("umount2", b"/", 2)',
    "leaves by chroot": 'os.makedirs("/tmp/a"); os.chroot("/tmp/a")',
    "becomes somebody else": "os.setuid(os.getuid() + 1)",
    "makes a device": "os.mknod('/tmp/disk', 0o660 | stat.S_IFBLK, os.makedev(8, 0))",
    "sets a kernel parameter": 'open("/proc/sys/kernel/core_pattern", "w")',
    "joins the namespaces of process 1": 'call("setns", os.open("/proc/1/ns/mnt", 0), 0)',
    "finds a folder among its descriptors": "[each for each in range(3, 64) if is_folder(each)][0]",
}

TRYING = """
import ctypes, os, socket, stat, sys

here = os.path.dirname(__file__).encode()

def call(name, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if library[name](*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)

def is_folder(descriptor):
    try:
        return stat.S_ISDIR(os.fstat(descriptor).st_mode)
    except OSError:
        return False

def reward(completions, secret, driver, port, named, abstract):
    known = {**globals(), "secret": secret[0], "driver": driver[0], "port": port[0], "named": named[0]}
    return [tried(code, {**known, "abstract": abstract[0]}) for code in completions]

def tried(code, known):
    try:
        exec(code, known)
    except (OSError, KeyError, IndexError):
        return 0.0
    return 1.0
"""


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Yield the targets of escapes: a file, this process, three listening sockets."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "secret").write_text("s3cret")
    named, abstract = str(folder / "socket"), f"rillflow-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as one,
        socket.socket(socket.AF_UNIX) as other,
    ):
        for each, name in ((one, named), (other, f"\0{abstract}")):
            each.bind(name)
            each.listen()
        there = {"driver": os.getpid(), "port": port.getsockname()[1], "named": named, "abstract": abstract}
        yield {"secret": str(folder / "secret"), **there}


def escapes(
    function: FunctionPath, outside: dict[str, object], config: RewardConfig
) -> dict[str, float | None]:
    columns = {name: [value] * len(CORPUS) for name, value in outside.items()}
    with RewardWorkers(function, config) as workers:
        scores = workers.score(["p"] * len(CORPUS), list(CORPUS.values()), columns)
    return {name: score.value for name, score in zip(CORPUS, scores, strict=True)}


def test_no_escape_of_the_corpus_succeeds(
    write: Write, outside: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "s3cret")
    found = escapes(write(TRYING), outside, RewardConfig(sandbox=True))
    assert found == dict.fromkeys(CORPUS, 0.0)


def test_outside_the_sandbox_the_corpus_finds_its_way(
    write: Write, outside: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "s3cret")
    harmless = (
        "reads a file of the user's",
        "lists the user's folder",
        "reads a variable",
        "writes beside itself",
    )
    harmless += ("connects to a port", "connects to a named socket", "connects to an abstract socket")
    monkeypatch.setattr(sys.modules[__name__], "CORPUS", {name: CORPUS[name] for name in harmless})
    assert escapes(write(TRYING), outside, RewardConfig(sandbox=False)) == dict.fromkeys(harmless, 1.0)


def test_a_sandboxed_function_computes_and_has_room_for_files_of_its_own(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "words.txt").write_text("four")
    (tmp_path / "beside.py").write_text("WORD = 'more'")
    function = write(
        """
        import json, os, tempfile
        import numpy
        from beside import WORD

        def reward(completions):
            with tempfile.NamedTemporaryFile("w", delete=False) as file:
                json.dump(completions, file)
            word = open(os.path.join(os.path.dirname(__file__), "words.txt")).read()
            return [float(numpy.float64(len(word + WORD)))] * len(json.load(open(file.name)))
        """
    )
    function = replace(function, files=(tmp_path / "words.txt",))
    with RewardWorkers(function, RewardConfig(sandbox=True)) as workers:
        scores = workers.score(["p"] * 2, ["a", "b"], {})
        assert workers.level is not Level.NONE
    assert [score.value for score in scores] == [8.0, 8.0], scores
    assert {path.name for path in tmp_path.iterdir()} == {"rewards.py", "words.txt", "beside.py"}


def test_nothing_of_the_recipes_folder_is_visible_but_the_function_and_its_imports(
    write: Write, tmp_path: Path
) -> None:
    for name in ("prompts.jsonl", ".env", "unused.py"):
        (tmp_path / name).write_text("secret = 1")
    (tmp_path / "beside.py").write_text("from further import WORD")
    (tmp_path / "further.py").write_text("WORD = 'more'")
    function = write(
        """
        import os, beside
        def reward(completions):
            return [float(sorted(os.listdir(".")) == ["beside.py", "further.py", "rewards.py"])]
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=True)) as workers:
        assert [score.value for score in workers.score(["p"], ["c"], {})] == [1.0]


def test_a_package_of_pythonpath_is_installed_in_the_sandbox_too(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An isolated interpreter ignores PYTHONPATH and the user's own packages."""
    folder = tmp_path / "elsewhere" / "site-packages"
    (folder / "theirs").mkdir(parents=True)
    (folder / "theirs" / "__init__.py").write_text("TWO = 2\n")
    monkeypatch.syspath_prepend(str(folder))
    function = write("import theirs\ndef reward(completions):\n    return [float(theirs.TWO)]\n")
    with RewardWorkers(function, RewardConfig(sandbox=True)) as workers:
        assert [score.value for score in workers.score(["p"], ["c"], {})] == [2.0]


def test_the_room_for_files_ends(write: Write) -> None:
    function = write(
        """
        def reward(completions):
            with open("/tmp/all", "wb") as file:
                for _ in range(400):
                    file.write(bytes(1 << 20))
            return [1.0] * len(completions)
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=True)) as workers:
        (score,) = workers.score(["p"], ["a"], {})
    assert score.outcome is Outcome.ERROR and "No space left" in score.message


def test_a_function_given_in_python_is_shut_in_without_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("canary")
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path)

    def reward(completions: list[str]) -> list[float]:
        others = [each for each in Path("/tmp").iterdir() if each not in Path(sys.executable).parents]
        seen = [Path.cwd() == Path("/tmp"), not Path(folder).exists(), not others]  # the interpreter stays
        return [float(sum(seen))] * len(completions)

    with RewardWorkers(shipped(reward), RewardConfig(sandbox=True)) as workers:
        assert [score.value for score in workers.score(["p"], ["c"], {})] == [3.0]


def test_a_kernel_that_refuses_the_sandbox_is_an_error_and_nothing_runs(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = write(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef reward(completions):\n    return []")
    boot = "import sys; sys.path.append(sys.argv[1]); from rillflow.rewards import supervisor; "
    refusing = "supervisor.SHUT_IN = 1; supervisor.main()"  # no such flag: the kernel reports it
    interpreter = (sys.executable, "-I", "-u", "-c", boot + refusing)
    monkeypatch.setattr("rillflow.rewards.supervised._INTERPRETER", interpreter)
    with (
        pytest.raises(RewardError, match=r"could not be sandboxed: .*unshare"),
        RewardWorkers(function, RewardConfig(), level=Level.FULL) as workers,
    ):
        workers.score(["p"], ["a"], {})
    assert not (tmp_path / "ran").exists()


def test_the_door_of_a_sandbox_listens_on_its_loopback_device_alone() -> None:
    ours, theirs = socket.socketpair()

    def open_door() -> None:
        ask("unshare", USERS | NETWORK)
        _open_door(theirs.detach())

    with ours, theirs:
        assert os.waitpid(fork(open_door), 0)[1] == 0
        message, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
    with socket.socket(fileno=descriptors[0]) as door:
        assert message == b"door" and door.getsockname()[0] == "127.0.0.1"

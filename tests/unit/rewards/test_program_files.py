"""Programs of one row: what the first leaves is gone before the second; what they may share is kept."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rillflow.isolation.sandbox import Level
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.workers import RewardWorkers

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "services"))
import attacks
from attacks import PAIRS, TWO_WAYS, attack_second

Write = Callable[..., FunctionPath]

pytestmark = pytest.mark.skipif(
    not Path("/proc/sys/user/max_user_namespaces").is_file()
    or Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0",
    reason="this kernel gives no user namespaces",
)

HEAD = """
import asyncio, multiprocessing, os, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from rillflow.rewards.programs import keep_files

def put(name, text):
    with open(name, "w") as file:
        file.write(text)

def run(*words, **how):
    return subprocess.run(words, capture_output=True, text=True, timeout=20, **how).stdout.strip()

def python(code, **how):
    return run(sys.executable, "-S", "-c", code, **how)

def reward(completions, **_):
    os.chdir(tempfile.mkdtemp())
    return [float(works(completions[0]))]
"""
WORKING = {
    "a file that the next command names": """
        python("open('said.txt', 'w').write('42')")
        return run("cat", "./said.txt") == "42"
        """,
    "files that the function keeps": """
        python("import os; os.mkdir('made'); open('made/said', 'w').write('42')")
        keep_files("made")
        return run("sh", "-c", "cat mad*/*") == "42"
        """,
    "a file of the function between two programs": """
        python("print(42)")
        put("later.txt", "42")
        python("pass")
        return run("sh", "-c", "cat *") == "42"
        """,
    "files that the function removes and writes again": """
        put("a", "1"), put("b", "2")
        python("pass")
        os.remove("a"), put("b", "3")
        python("pass")
        return sorted(os.listdir(".")) == ["b"] and open("b").read() == "3"
        """,
    "what a program changes and removes is restored": """
        os.mkdir("kept"), put("kept/a", "1"), put("b", "2"), os.symlink("b", "c")
        python("import os, shutil; shutil.rmtree('kept'); open('b', 'w').write('9'); os.remove('c')")
        python("pass")
        return open("kept/a").read() == "1" and open("c").read() == "2"
        """,
    "programs in threads": """
        def one(number):
            with tempfile.TemporaryDirectory() as folder:
                put(f"{folder}/a.py", f"print({number})")
                return run(sys.executable, "-S", "a.py", cwd=folder) == python(f"print({number})")
        with ThreadPoolExecutor(3) as pool:
            return all(pool.map(one, range(6)))
        """,
    "a pipeline": """
        first = subprocess.Popen([sys.executable, "-S", "-c", "print(42)"], stdout=subprocess.PIPE)
        second = subprocess.Popen(["cat"], stdin=first.stdout, stdout=subprocess.PIPE)
        first.stdout.close()
        return second.communicate()[0] == b"42\\n" and first.wait() == 0
        """,
    "polls, time limits and signals": """
        first = subprocess.Popen(["true"])
        while first.poll() is None:
            time.sleep(0.001)
        second = subprocess.Popen(["sleep", "30"])
        try:
            second.wait(0.05)
        except subprocess.TimeoutExpired:
            second.terminate()
        return first.returncode == 0 and second.wait() == -15 and os.system("exit 3") == 3 << 8
        """,
    "a pool of processes": """
        with multiprocessing.Pool(2) as pool:
            return pool.map(python, ["print(42)"] * 3) == ["42"] * 3
        """,
    "coroutines": """
        async def both():
            first = await asyncio.create_subprocess_exec("true")
            second = await asyncio.create_subprocess_exec("false")
            return (await first.wait(), await second.wait()) == (0, 1)
        return asyncio.run(both())
        """,
    "a program that holds the output open in the background": """
        begun = time.monotonic()
        said = run("sh", "-c", "sleep 15 & echo 42")
        return said == "42" and time.monotonic() - begun < 10
        """,
}
COMPILED = """
        put("a.c", "int f() { return 42; }")
        put("b.c", "int f(); int main() { return f(); }")
        for command in ("gcc -c a.c", "gcc -c b.c", "gcc a.o b.o -o program"):
            assert subprocess.run(command.split()).returncode == 0
        return [subprocess.run(["./program"]).returncode for _ in range(2)] == [42, 42]
        """


def scored(function: FunctionPath, *completions: str) -> list[Score]:
    with RewardWorkers(function, RewardConfig(timeout_s=60)) as workers:
        scores = workers.score(["p"] * len(completions), list(completions), {})
        assert workers.level is not Level.NONE
    return scores


@pytest.mark.parametrize("kind", WORKING)
def test_programs_of_one_row_may_share(write: Write, kind: str) -> None:
    (score,) = scored(write(HEAD + "def works(completion):" + WORKING[kind]), "x")
    assert score.value == 1.0, score


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_what_a_compiler_makes_is_kept(write: Write) -> None:
    (score,) = scored(write(HEAD + "def works(completion):" + COMPILED), "x")
    assert score.value == 1.0, score


def test_a_link_in_the_place_of_a_later_file_fails_the_row(write: Write) -> None:
    body = """
        python(completion)
        put("expected", "42")
        return run("cat", "./expected", "./said") == "4242"
        """
    linked = "import os; open('said', 'w').write('1'); os.symlink('said', 'expected')"
    named = "import os; open('said', 'w').write('1'); os.link('said', 'expected')"
    honest = "open('said', 'w').write('42')"
    scores = scored(write(HEAD + "def works(completion):" + body), linked, named, honest)
    assert [score.outcome for score in scores] == [Outcome.ERROR, Outcome.ERROR, Outcome.SCORE]
    assert "a program left a link at" in scores[0].message
    assert scores[2].value == 1.0


def test_no_program_of_a_sample_forges_the_result_of_the_next(tmp_path: Path) -> None:
    sample = [
        each for each in PAIRS if each["name"].startswith(("shadow", "a process that rewrites", "a link"))
    ]
    with attacks.prepared(tmp_path) as target:
        assert attack_second(target, "in_fresh_folder", sample, level=Level.FULL) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", TWO_WAYS)
def test_no_program_forges_the_result_of_the_next(tmp_path: Path, way: str) -> None:
    with attacks.prepared(tmp_path) as target:
        assert attack_second(target, way, PAIRS, level=Level.FULL) == []

"""Attacks on a reward: programs of attacks.toml that a model might write, scored at every sandbox level.

    attacks.toml ── one row each, then an honest program ──> RewardWorkers ──> nonzero reward: attack won
                                                              at `full`, `shared-user` and `none`

An attack wins if it prints WIN or the hidden answer, or if its reward is not 0. It also wins if its neighbour
or the next call loses a score. Without a sandbox only harmless attacks run.

    python benchmarks/services/attacks.py --write benchmarks/results/attacks.md     # some minutes
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
import socket
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from rillflow.errors import RewardError
from rillflow.isolation.sandbox import SENTENCES, Level
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath, parse_function
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.text_execution import decide
from rillflow.rewards.workers import RewardWorkers

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

SMALLEST = ["--every 36"]

ATTACKS: list[dict[str, str]] = tomllib.loads((Path(__file__).with_name("attacks.toml")).read_text())[
    "attack"
]
PAIRS: list[dict[str, str]] = tomllib.loads(Path(__file__).with_name("attacks.toml").read_text())["second"]
"""Programs that attack the program which the reward starts after them."""
TEXTS: list[dict[str, str]] = tomllib.loads(Path(__file__).with_name("attacks.toml").read_text())["text"]
"""Rewards that run text, each in a way of its own."""
ANSWER = "hidden-answer-0badcafe"
HONEST = "print('WIN')"
REWARD = """
import subprocess, sys
from rillflow.rewards.programs import run_python

def by_run_python(completions, answer):
    outs = [run_python(completion, timeout_s=20.0).stdout for completion in completions]
    return [judged(out, right) for out, right in zip(outs, answer)]

def by_subprocess(completions, answer):
    return [judged(started(completion), right) for completion, right in zip(completions, answer)]

def started(program):
    command = [sys.executable, "-I", "-c", program]
    out = subprocess.run(command, capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
    return out.stdout.decode(errors="replace")

def judged(said, answer):
    return 1.0 if "WIN" in said or answer in said else 0.0
"""
TWO_PROGRAMS = r"""
import os, shutil, subprocess, sys, tempfile

CHECK = "import json, sys; print('WIN' if json.loads(sys.stdin.read()) == 'WIN' else 'LOSS')"
FILE_CHECK = "import json\nprint('WIN' if json.loads(open('said.json').read()) == 'WIN' else 'LOSS')"

def in_one_folder(completions, **_):
    return [scored(completion, fresh=False) for completion in completions]

def in_fresh_folder(completions, **_):
    return [scored(completion, fresh=True) for completion in completions]

def by_shell(completions, **_):
    with open("/tmp/solution.py", "w") as file:
        file.write(completions[0])
    os.system(f"cd /tmp; {sys.executable} solution.py > /dev/null 2>&1 < /dev/null")
    with open("/tmp/check.py", "w") as file:
        file.write("import json; print(json.loads('0'))")
    os.system(f"cd /tmp; {sys.executable} check.py > /tmp/verdict.txt")
    return [float(open("/tmp/verdict.txt").read().strip() == "WIN")]

def scored(completion, fresh):
    with tempfile.TemporaryDirectory() as folder:
        write(folder, "solution.py", completion)
        started(folder, "solution.py")
        if fresh:
            folder = tempfile.mkdtemp()
        write(folder, "said.json", '"LOSS"')
        write(folder, "check.py", FILE_CHECK)
        said = [started(folder, "check.py"), started(folder, "-c", CHECK, given='"LOSS"')]
    return 1.0 if any("WIN" in each for each in said) else 0.0

def write(folder, name, text):
    with open(f"{folder}/{name}", "w") as file:
        file.write(text)

def started(folder, *words, given=""):
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, input=given, capture_output=True, text=True, timeout=5
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout
"""
WAYS = {"by_run_python": "`run_python`", "by_subprocess": "`subprocess.run`"}
TWO_WAYS = {
    "in_one_folder": "two programs in one folder",
    "in_fresh_folder": "two programs, the second in a new folder",
    "by_shell": "two programs by `os.system`",
}
LEVELS = (Level.FULL, Level.SHARED_USER, Level.NONE)
_ADD_KEY = {"x86_64": 248, "aarch64": 217}
_SESSION_KEYRING = -3


@dataclass(frozen=True, kw_only=True)
class Target:
    """The recipe under attack."""

    folder: Path
    """The recipe's folder: the function, and prompts with answers."""
    words: dict[str, str]
    """Values of the placeholders in an attack's code."""

    def function(self, name: str) -> FunctionPath:
        return parse_function(f"rewards.py:{name}", self.folder)

    def code(self, attack: dict[str, str]) -> str:
        code = attack["code"]
        for word, value in self.words.items():
            code = code.replace(word, value)
        return code


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[Target]:
    """Create a recipe, a home folder, an environment variable, a key and three listening sockets."""
    recipe, home = folder / "recipe", folder / "home"
    for each in (recipe, home):
        each.mkdir()
    (recipe / "rewards.py").write_text(REWARD)
    (recipe / "two.py").write_text(TWO_PROGRAMS)
    (recipe / "prompts.jsonl").write_text(f'{{"prompt": "p", "answer": "{ANSWER}"}}\n')
    (home / ".token").write_text("s3cret")
    add_key = _ADD_KEY[platform.machine()]
    ctypes.CDLL(None).syscall(add_key, b"user", b"canary", b"s3cret", 6, _SESSION_KEYRING)
    named, abstract = str(home / "socket"), f"rillflow-{os.getpid()}"
    os.environ["CANARY"] = "s3cret"
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as port,
            socket.socket(socket.AF_UNIX) as one,
            socket.socket(socket.AF_UNIX) as other,
        ):
            for each_socket, name in ((one, named), (other, f"\0{abstract}")):
                each_socket.bind(name)
                each_socket.listen()
            words = {
                "@FOLDER@": str(recipe),
                "@HOME@": str(home),
                "@DRIVER@": str(os.getpid()),
                "@PORT@": str(port.getsockname()[1]),
                "@NAMED@": named,
                "@ABSTRACT@": abstract,
                "@ISROOT@": str(int(os.getuid() == 0)),
            }
            yield Target(folder=recipe, words=words)
    finally:
        del os.environ["CANARY"]


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """The results of a list of attacks."""

    level: Level
    """The sandbox level of the attacks."""
    scores: dict[str, Score]
    """The score of each attack, by name."""
    touched: list[str]
    """Attacks whose honest program lost its score, or "the next call" if that call lost its score."""

    @property
    def won(self) -> list[str]:
        """Names of attacks that got a reward or took a score from another row."""
        paid = [name for name, each in self.scores.items() if each.outcome is Outcome.SCORE and each.value]
        return [*paid, *(name for name in self.touched if name not in paid)]


def attack(
    target: Target,
    way: str,
    attacks: Sequence[dict[str, str]],
    *,
    level: Level = Level.NONE,
    sandbox: str | bool = "auto",
) -> Attacked:
    """Score every attack followed by an honest program, then another honest program in a separate call.

    Args:
        target: the recipe and the values of placeholders.
        way: the reward, one of ``WAYS``.
        attacks: entries of ``ATTACKS``.
        level: see ``RewardWorkers``.
        sandbox: ``reward.sandbox``.

    Raises:
        RewardError: this machine cannot provide the sandbox.
    """
    settings = {"timeout_s": 600, "memory_bytes": 1 << 30, "sandbox": sandbox}
    config = RewardConfig.model_validate(settings)
    codes = [code for each in attacks for code in (target.code(each), HONEST)]
    with RewardWorkers(target.function(way), config, level=level) as workers:
        scores = workers.score(["p"] * len(codes), codes, {"answer": [ANSWER] * len(codes)})
        (after,) = workers.score(["p"], [HONEST], {"answer": [ANSWER]})
        given_level = workers.level
    names = [each["name"] for each in attacks]
    touched = [name for name, score in zip(names, scores[1::2], strict=True) if score.value != 1.0]
    touched += ["the next call"] if after.value != 1.0 else []
    return Attacked(level=given_level, scores=dict(zip(names, scores[::2], strict=True)), touched=touched)


def attack_second(
    target: Target, way: str, attacks: Sequence[dict[str, str]], *, level: Level = Level.NONE
) -> list[str]:
    """Return the names of the programs that forge the result of the program after them.

    Args:
        target: the recipe.
        way: the reward, one of ``TWO_WAYS``.
        attacks: entries of ``PAIRS``.
        level: see ``RewardWorkers``.
    """
    function = parse_function(f"two.py:{way}", target.folder)
    settings = {"timeout_s": 12, "memory_bytes": 1 << 30, "sandbox": level is not Level.NONE}
    with RewardWorkers(function, RewardConfig.model_validate(settings), level=level) as workers:
        if level is not Level.NONE and workers.load() and workers.level is not level:
            raise RewardError(f"{level} is not given by this machine", why=f"it gives {workers.level}")
        scores = [workers.score(["p"], [each["code"]], {})[0] for each in attacks]
    return [each["name"] for each, score in zip(attacks, scores, strict=True) if score.value]


def unnoticed(folder: Path, texts: Sequence[dict[str, str]]) -> list[str]:
    """Return the ways to run text that ``auto`` leaves without a sandbox."""
    missed = []
    for place, each in enumerate(texts):
        home = folder / f"text-{place}"
        home.mkdir()
        (home / "rewards.py").write_text(each["code"])
        for name in filter(None, [each.get("beside")]):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(each["helper"])
        try:
            function = parse_function("rewards.py:reward", home)
            missed += [] if decide(function, "auto", unless_harmless=True).is_shut_in else [each["name"]]
        except RewardError:
            continue  # refused
    return missed


def pairs_table(every: int) -> Iterator[str]:
    """Attack rewards of two programs, and look for ways to run text; yield the lines of their tables."""
    yield from (
        "",
        "## Two programs",
        "",
        "Attacks on the program that a reward starts second, that failed.",
        "",
    )
    yield "| level | the reward starts | failed |"
    yield "|---|---|---|"
    won = list[str]()
    for level in (Level.FULL, Level.SHARED_USER):
        for way, shown in TWO_WAYS.items():
            with tempfile.TemporaryDirectory() as folder, prepared(Path(folder)) as target:
                try:
                    forged = attack_second(target, way, PAIRS[::every], level=level)
                except RewardError as error:
                    won.append(f"- `{level}`: {error}.")
                    break
            num = len(PAIRS[::every])
            yield f"| `{level}` | {shown} | {num - len(forged)} of {num} |"
            won += [f"- Won at `{level}`, {shown}: {'; '.join(forged)}."] if forged else []
    with tempfile.TemporaryDirectory() as folder:
        missed = unnoticed(Path(folder), TEXTS)
    yield from ("", *won, "", "## Ways to run text", "")
    yield (
        f'With `reward.sandbox = "auto"`, {len(TEXTS) - len(missed)} of {len(TEXTS)} rewards that run '
        "text, each in a way of its own, are in the sandbox or refused."
    )
    yield from ([f"Without a sandbox: {'; '.join(missed)}."] if missed else [])


def page(every: int) -> Iterator[str]:
    """Attack at every level and in both ways; yield the lines of the table."""
    yield from (
        "# Attacks on a reward",
        "",
        measured_at.line(),
        "",
        f"`python benchmarks/services/attacks.py{f' --every {every}' if every > 1 else ''}`, Python "
        f"{platform.python_version()}, Linux {platform.release()}. Attacks that failed, of those that ran; "
        "the programs stand in `benchmarks/services/attacks.toml`. After each attack an honest program is "
        "scored and keeps its point, else the attack counts as won. Without a sandbox only "
        "harmless attacks run.",
        "",
    )
    goals = list(dict.fromkeys(each["goal"] for each in ATTACKS))
    yield f"| level | the reward runs text by | {' | '.join(goals)} | all |"
    yield f"|---|---|{'---|' * len(goals)}---|"
    notes = list[str]()
    for level in LEVELS:
        for way, shown in WAYS.items():
            if level is Level.NONE and way == "by_run_python":
                continue  # run_python starts a sandbox of its own
            attacks = [each for each in ATTACKS if level is not Level.NONE or "harmless" in each][::every]
            try:
                with tempfile.TemporaryDirectory() as folder, prepared(Path(folder)) as target:
                    sandbox = level is not Level.NONE
                    found = attack(target, way, attacks, level=level, sandbox=sandbox)
            except RewardError as error:
                notes.append(f"- `{level}` by {shown}: not given by this machine. {error}")
                continue
            if found.level is not level:
                notes.append(f"- `{level}` is not given by this machine, which gives `{found.level}`.")
                continue
            cells = [_failed([each for each in attacks if each["goal"] == goal], found) for goal in goals]
            yield f"| `{level}` | {shown} | {' | '.join(cells)} | {_failed(attacks, found)} |"
            if found.won:
                notes.append(f"- Won at `{level}` by {shown}: {'; '.join(found.won)}.")
    yield from ("", *notes)
    yield from pairs_table(every)
    yield from ("", "## Levels", "", *(f"- `{level}`: {SENTENCES[level]}." for level in LEVELS))


def _failed(attacks: Sequence[dict[str, str]], found: Attacked) -> str:
    if not attacks:
        return ""
    return f"{sum(each['name'] not in found.won for each in attacks)} of {len(attacks)}"


def main() -> None:
    """Attack, and print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="run each Nth attack alone")
    parser.add_argument("--write", type=Path, help="where the page is written")
    arguments = parser.parse_args()
    lines = list[str]()
    for line in page(arguments.every):
        shown = (
            line if line.startswith("|") else fill(line, 110, subsequent_indent="  " * line.startswith("-"))
        )
        print(shown, flush=True)
        lines.append(shown)
    if arguments.write is not None:
        arguments.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

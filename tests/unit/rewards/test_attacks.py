"""Programs that a model might write to be paid, to reach a neighbour or to leave: none succeeds."""

from __future__ import annotations

import ctypes
import os
import socket
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath, parse_function
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.supervised import Containment
from rillflow.rewards.workers import RewardWorkers

ATTACKS = tomllib.loads((Path(__file__).parent / "attacks.toml").read_text())["attack"]
ANSWER = "hidden-answer-0badcafe"
REWARD = """
import subprocess, sys
from rillflow.rewards.programs import run_python

def by_runner(completions, answer):
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

pytestmark = pytest.mark.skipif(
    not Path("/proc/sys/user/max_user_namespaces").is_file()
    or Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0",
    reason="this kernel gives no user namespaces",
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What there is to be had."""

    folder: Path
    """The recipe's folder: the function, and prompts with answers."""
    words: dict[str, str]
    """What stands for what in an attack's code."""

    def function(self, name: str) -> FunctionPath:
        return parse_function(f"rewards.py:{name}", self.folder)

    def code(self, attack: dict[str, str]) -> str:
        code = attack["code"]
        for word, value in self.words.items():
            code = code.replace(word, value)
        return code


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """A recipe, a home folder, a variable, a key and three sockets that listen."""
    recipe, home = tmp_path / "recipe", tmp_path / "home"
    for folder in (recipe, home):
        folder.mkdir()
    (recipe / "rewards.py").write_text(REWARD)
    (recipe / "prompts.jsonl").write_text(f'{{"prompt": "p", "answer": "{ANSWER}"}}\n')
    (home / ".token").write_text("s3cret")
    monkeypatch.setenv("CANARY", "s3cret")
    ctypes.CDLL(None).syscall(248, b"user", b"canary", b"s3cret", 6, -3)
    named, abstract = str(home / "socket"), f"rillflow-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as one,
        socket.socket(socket.AF_UNIX) as other,
    ):
        for each, name in ((one, named), (other, f"\0{abstract}")):
            each.bind(name)
            each.listen()
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


def attacked(
    target: Target,
    name: str,
    attacks: Sequence[dict[str, str]],
    config: RewardConfig,
    containment: Containment = Containment.NAMESPACE,
) -> dict[str, Score]:
    """Score every attack, and after it an honest program that gets its point."""
    codes = [code for attack in attacks for code in (target.code(attack), "print('WIN')")]
    with RewardWorkers(target.function(name), config, containment=containment) as workers:
        scores = workers.score(["p"] * len(codes), codes, {"answer": [ANSWER] * len(codes)})
        (after,) = workers.score(["p"], ["print('WIN')"], {"answer": [ANSWER]})
    neighbours = {attack["name"]: score for attack, score in zip(attacks, scores[1::2], strict=True)}
    touched = {name: score for name, score in neighbours.items() if score.value != 1.0}
    assert touched == {}, "a neighbour lost its score"
    assert after.value == 1.0, "the next step lost its score"
    return {attack["name"]: score for attack, score in zip(attacks, scores[::2], strict=True)}


def won(scores: dict[str, Score]) -> list[str]:
    """The attacks that were paid."""
    return [name for name, score in scores.items() if score.outcome is Outcome.SCORE and score.value != 0.0]


def config(**given: object) -> RewardConfig:
    return RewardConfig.model_validate({"timeout_s": 600, "memory_bytes": 1 << 30, **given})


def test_the_corpus_is_large_and_its_attacks_have_names_of_their_own() -> None:
    assert len({attack["name"] for attack in ATTACKS}) == len(ATTACKS) >= 80


def test_no_attack_on_run_python_succeeds_at_the_default_level(target: Target) -> None:
    scores = attacked(target, "by_runner", ATTACKS, config())
    assert won(scores) == []
    assert all(score.outcome is Outcome.SCORE for score in scores.values()), "an attack ended its own judge"


def test_no_forging_attack_on_a_subprocess_succeeds_at_the_default_level(target: Target) -> None:
    forging = [attack for attack in ATTACKS if attack["goal"] == "forge a score"][:12]
    assert won(attacked(target, "by_subprocess", forging, config())) == []


@pytest.mark.slow
@pytest.mark.parametrize("containment", [Containment.SANDBOX, Containment.SHARED_USER])
@pytest.mark.parametrize("name", ["by_runner", "by_subprocess"])
def test_no_attack_succeeds_at_any_level_of_the_sandbox(
    target: Target, name: str, containment: Containment
) -> None:
    seen_by_the_function = {"read the function's file"} if name == "by_subprocess" else set()
    attacks = [attack for attack in ATTACKS if attack["name"] not in seen_by_the_function]
    assert won(attacked(target, name, attacks, config(), containment)) == []


def test_without_a_sandbox_the_harmless_attacks_find_their_way(target: Target) -> None:
    harmless = [attack for attack in ATTACKS if attack.get("harmless")]
    scores = attacked(target, "by_subprocess", harmless, config(sandbox=False))
    assert len(won(scores)) >= len(harmless) - 3, [name for name in scores if name not in won(scores)]

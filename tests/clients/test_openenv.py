"""An OpenEnv server, unmodified, trained against by `rillflow run`: a session for each row over WebSocket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("openenv")

from rillflow.runs.reader import read_rollouts

SERVER = """
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    text: str


class Told(Observation):
    said: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, secret=0, **more):
        self.secret, self.turns = secret, 0
        return Told(said="0=")

    def step(self, action, **more):
        self.turns += 1
        over = self.turns == 3 or str(self.secret) in action.text
        return Told(said="<", done=over, reward=1.0 if str(self.secret) in action.text else 0.0)

    @property
    def state(self):
        return State(step_count=self.turns)


uvicorn.run(
    create_app(Game, Guess, Told, env_name="game", max_concurrent_envs=64),
    host="127.0.0.1",
    port=int(sys.argv[1]),
    log_level="error",
)
"""
RECIPE = """
[task]
source = "rows.jsonl"
held_out = 1
[policy.model.new]
hidden = 32
layers = 1
heads = 2
kv_heads = 1
context = 64
alphabet = "0123456789=<?"
[rollout]
max_tokens = 12
stop = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
environment = { source = "openenv:URL", workers = 2, timeout_s = 60 }
[evaluate]
problems = 1
[algorithm]
name = "grpo"
steps = 2
prompts_per_step = 6
samples_per_prompt = 6
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = (tmp_path / "said.txt").open("w")
    server = subprocess.Popen(
        [sys.executable, str(tmp_path / "server.py"), str(port)], stdout=said, stderr=subprocess.STDOUT
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + 120
    while True:
        try:
            opener.open(f"http://127.0.0.1:{port}/health", timeout=5).close()
            break
        except OSError:
            assert server.poll() is None and time.monotonic() < until, (tmp_path / "said.txt").read_text()
            time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(30)


@pytest.mark.timeout(600)
def test_a_server_writes_rows_with_the_policy(url: str, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "?", "secret": secret}) for secret in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "run.toml").write_text(RECIPE.replace("URL", url))
    command = [sys.executable, "-m", "rillflow.cli.main", "run", str(tmp_path / "run.toml")]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path / "run"), "--set=run.threads=1"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for step in (1, 2) for row in read_rollouts(tmp_path / "run", step)]
    assert len(rows) == 72 and {row.outcome for row in rows} == {"score"}
    for row in rows:
        own = {*row.sampled}
        policy = "".join(piece for place, piece in enumerate(row.token_texts) if place in own)
        rest = "".join(piece for place, piece in enumerate(row.token_texts) if place not in own)
        assert rest == "?0=" + "<" * (row.columns["turns"] - 1)
        assert row.reward == float(str(row.columns["secret"]) in policy) or row.finish == "length"
    assert len({row.reward for row in rows}) == 2

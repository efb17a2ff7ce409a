"""A Ray cluster: its token in the environment, and the warning about a cluster without one."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

from rillflow.workers.ray import RayBackend
from rillflow.workers.ray_cluster import RayCluster, cause, forget_token, private_token, warn_without_token

PATH = "RAY_AUTH_TOKEN_PATH"


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PATH, "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test, even if the test removes it
        monkeypatch.delenv(name)


def test_a_cluster_of_our_own_has_a_token_for_its_user_alone_until_it_is_left(tmp_path: Path) -> None:
    private_token(tmp_path)
    token = Path(os.environ[PATH])
    assert token.parent == tmp_path and len(token.read_text()) == 64 and token.stat().st_mode & 0o77 == 0
    forget_token(tmp_path)
    assert PATH not in os.environ
    forget_token(tmp_path)


def test_a_token_of_the_user_is_taken_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH, "/home/somebody/token")
    private_token(tmp_path)
    forget_token(tmp_path)
    RayCluster(None).leave()
    assert os.environ[PATH] == "/home/somebody/token" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mode", "is_warned"), [("token", False), ("disabled", True), (None, True)])
def test_a_joined_cluster_that_needs_no_token_is_warned_about(
    mode: str | None, is_warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    warn_without_token("10.0.0.9:6379")
    assert ("the cluster at 10.0.0.9:6379 needs no token" in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Failed to connect.\n  Is Ray up?\n", "Failed to connect. Is Ray up?"),
        ('Traceback (most recent call last):\n  File "a.py"\nAuthError: no token\n', "AuthError: no token"),
        ("", "RuntimeError"),
    ],
)
def test_the_cause_of_an_error_of_ray_is_one_line(text: str, told: str) -> None:
    assert cause(RuntimeError(text)) == told


def test_a_call_has_at_most_five_seconds_to_end_once_it_is_abandoned() -> None:
    assert [RayBackend(deadline_s).abandon() for deadline_s in (60.0, 2.0)] == [5.0, 2.0]

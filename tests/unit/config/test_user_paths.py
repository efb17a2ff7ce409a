"""Home folders, which the user of a container may lack; a real process without HOME and passwd entry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rillflow.config.user_paths import expanded, home
from rillflow.errors import ConfigError

PROGRAM = """
import os
from rillflow.config.user_paths import expanded, home
from rillflow.errors import ConfigError
os.setgid(54321)
os.setuid(54321)
assert home() is None
try:
    expanded("~/models/a")
except ConfigError as error:
    print(error)
"""


def test_a_home_folder_takes_the_place_of_the_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert expanded("~/a") == Path("/somewhere/a") and expanded("b/~") == Path("b/~")
    assert home() == Path("/somewhere")


def test_a_user_who_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="this machine has no user 'nobody-here'"):
        expanded("~nobody-here/a")


@pytest.mark.skipif("__import__('os').getuid() != 0", reason="only root can become a user without an entry")
def test_a_user_without_a_home_is_told_what_to_write() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the path is '~/models/a'" in done.stdout and "write the whole path, or set HOME" in done.stdout

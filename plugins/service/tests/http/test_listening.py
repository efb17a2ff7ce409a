"""Where the service listens: on nothing that others reach, unless it is given a token for them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the service is the extra `service`")

from rillflow.errors import StreamError
from rillflow_service.__main__ import listening


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::"])
def test_an_address_that_others_reach_is_refused_without_a_token_of_one_s_own(
    tmp_path: Path, host: str
) -> None:
    with pytest.raises(StreamError, match="can be reached from other machines"):
        listening(tmp_path, host, None)
    own = tmp_path / "own"
    own.write_text("short")
    with pytest.raises(StreamError, match="the token has 5 characters"):
        listening(tmp_path, host, own)
    own.write_text("a token of enough characters\n")
    assert listening(tmp_path, host, own) == "a token of enough characters"


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1"])
def test_the_token_is_random_and_for_its_owner_alone(tmp_path: Path, host: str) -> None:
    tokens = {listening(tmp_path / folder, host, None) for folder in ("folder", "folder", "other")}
    file = tmp_path / "folder/token"
    assert len(tokens) == 2 and file.read_text() in tokens and min(map(len, tokens)) > 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700

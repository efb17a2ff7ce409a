"""Runs whose rows remote samplers sample, in processes of their own, over HTTP and through a folder."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the service is the extra `service`")

from plugins.links.tests.remote.runs import TinyRun, rillflow
from rillflow.runs import layout
from rillflow.runs.reader import rollout_columns

pytestmark = pytest.mark.timeout(3600)
SAMPLER = ("--rows", "16", "--threads", "1", "--lease-s", "3")


def test_a_run_ends_with_a_remote_sampler_that_gets_differences(tmp_path: Path) -> None:
    """Every row is compared with the run's own weights (check_share 1), and every weight by its digest."""
    run = TinyRun(tmp_path)
    url = run.start()
    with rillflow("join", url, "--token-file", str(run.token), *SAMPLER) as sampler:
        steps = run.end()
        assert sampler.end() == 0
    assert len(steps) == 6
    assert sampler.says("the run has ended") and sampler.says("difference from 0") and sampler.says("pause")


@pytest.mark.slow
def test_a_killed_sampler_comes_back(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    join = ("join", run.start(), "--token-file", str(run.token), *SAMPLER, "--name", "first")
    with rillflow(*join) as first:
        first.until("version 1:")
        first.process.send_signal(signal.SIGKILL)
    with rillflow(*join) as again:
        assert len(run.end()) == 6
        assert again.end() == 0
    rows = [rollout_columns(run.directory, step) for step in layout.rollout_files(run.directory)]
    assert all(len(each["completion"]) == 12 for each in rows)


@pytest.mark.slow
def test_a_second_sampler_joins_late_and_takes_over_from_one_that_hangs(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, "algorithm.steps=12")
    join = ("join", run.start(), "--token-file", str(run.token), *SAMPLER, "--name")
    with rillflow(*join, "first") as first:
        first.until("version 1:")
        first.process.send_signal(signal.SIGSTOP)
        with rillflow(*join, "second") as second:
            second.until("version ")
            first.process.send_signal(signal.SIGCONT)
            assert len(run.end()) == 12
            assert second.end() == 0 and first.end() == 0


@pytest.mark.slow
def test_a_sampler_leaves_on_a_signal_and_gives_its_rows_back(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    join = ("join", run.start(), "--token-file", str(run.token), "--rows", "16", "--threads", "1")
    with rillflow(*join) as first:
        first.until("version 1:")
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 0 and first.says("stopped: ")
    with rillflow(*join) as second:  # leases of the first would stay for 60 s
        run.end()
        assert second.end() == 0


@pytest.mark.slow
def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    url, wrong = run.start(), tmp_path / "wrong"
    wrong.write_text("another token, also long")
    with rillflow("join", url, "--token-file", str(wrong), *SAMPLER) as refused:
        assert refused.end() != 0 and refused.says("the token is wrong") and refused.says("--token-file")
    with rillflow("join", url, "--token-file", str(run.token), *SAMPLER):
        run.end()


@pytest.mark.slow
def test_a_sampler_goes_on_when_its_run_is_killed_and_resumed(tmp_path: Path) -> None:
    """The run listens on another port afterwards; its address file says which."""
    run = TinyRun(tmp_path)
    settings = ("algorithm.steps=20", "run.checkpoint_every=2")
    words = [word for setting in settings for word in ("--set", setting)]
    command = ("run", str(tmp_path / "run.toml"), *words, "--dir", str(run.directory))
    address = str(run.directory / "service" / "main-0.json")
    with rillflow("join", address, *SAMPLER) as sampler:
        with rillflow(*command):
            sampler.until("version 5:")
        with rillflow(*command) as resumed:
            assert resumed.end() == 0, resumed.lines
            assert sampler.end() == 0, sampler.lines
    assert sampler.says("no answer") and sampler.says("the run answers again")
    assert run.steps() == 20


def test_a_run_ends_with_a_sampler_that_shares_only_a_folder(tmp_path: Path) -> None:
    run, store = TinyRun(tmp_path), tmp_path / "store"
    run.start()
    name = ("--name", "far", "--token-file", str(run.token), "--poll-s", "0.02")
    with (
        rillflow("bridge", str(run.directory), str(store), "--poll-s", "0.02") as bridge,
        rillflow("join", str(store), *name, *SAMPLER) as sampler,
    ):
        assert len(run.end()) == 6
        assert sampler.end() == 0 and sampler.says("difference from"), sampler.lines
        assert bridge.end() == 0
    assert not [path for path in store.rglob("*") if path.is_file()]

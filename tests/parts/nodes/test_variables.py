"""Variables of nodes: names that differ are told, values never."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rillflow.errors import ConfigError
from rillflow.workers.backend import Node, Place, Pool
from rillflow.workers.inline import InlineBackend
from rillflow.workers.start import passed_variables
from rillflow_parts.nodes.variables import variable_notes

SECRET = "hunter2-value"
WATCHED = {"BONUS": "reward.py", "not a name": "reward.py", "lower_case": "beside.py", "PATH": "reward.py"}


class OtherVariables(InlineBackend):
    """Ranks that see other variables than the driver, as on a cluster that was started elsewhere."""

    there: dict[str, str | None]

    def submit(self, place: Place, work: Any, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        """Run the call with the variables of the rank."""
        here = dict(os.environ)
        os.environ |= {name: value for name, value in self.there.items() if value is not None}
        for name in [name for name, value in self.there.items() if value is None]:
            os.environ.pop(name, None)
        try:
            return super().submit(place, work, *arguments, results=results)
        finally:
            os.environ.clear()
            os.environ.update(here)


def notes(there: dict[str, str | None], keys: tuple[str, ...] = ()) -> list[str]:
    backend = OtherVariables(60.0)
    backend.there = there
    backend.open([Pool(name="main", size=1)])
    backend.nodes = {Place("main", 0): Node(address="10.0.0.2", ahead_s=0.0)}
    try:
        return variable_notes(WATCHED, keys, backend, 60.0)
    finally:
        backend.close()


def test_variables_that_differ_are_named_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BONUS", "HF_HOME", "lower_case", "JUDGE_KEY", "https_proxy", "UNRELATED"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    there: dict[str, str | None] = dict.fromkeys(["HF_HOME", "lower_case", "JUDGE_KEY", "UNRELATED"])
    there |= {"BONUS": "1", "https_proxy": "elsewhere", "NCCL_DEBUG": "INFO"}
    (note,) = notes(there, keys=("JUDGE_KEY",))
    assert note == (
        "ranks on node 10.0.0.2 have other environment variables: BONUS (in reward.py; another value there), "
        "HF_HOME (not set there), JUDGE_KEY (not set there), NCCL_DEBUG (set only there), "
        "https_proxy (another value there), lower_case (in beside.py; not set there); "
        'placement.env = ["BONUS", "HF_HOME", "JUDGE_KEY", "https_proxy", "lower_case"] passes '
        "this shell's values"
    )
    assert SECRET not in note and "elsewhere" not in note


def test_equal_variables_and_those_of_each_rank_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BONUS", "2")
    there = {"CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "7", "RAY_X": "1", "GLOO_SOCKET_IFNAME": "eth9"}
    assert notes({**there, "PWD": "/elsewhere"}) == []


def test_an_interface_that_the_user_chose_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    (note,) = notes({"NCCL_SOCKET_IFNAME": "eth0"})
    assert "NCCL_SOCKET_IFNAME (another value there)" in note


def test_variables_are_passed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BONUS", "2")
    monkeypatch.setenv("EMPTY", "")
    assert passed_variables(["BONUS", "EMPTY"]) == {"BONUS": "2", "EMPTY": ""}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NOT_SET_HERE", "which is not set here"),
        ("BONUS=2", "no name of a variable"),
        ("CUDA_VISIBLE_DEVICES", "belongs to a node"),
        ("LD_PRELOAD", "reads it before"),
        ("PYTHONPATH", "reads it before"),
        ("RAY_AUTH_TOKEN", "reads it before"),
    ],
)
def test_a_variable_that_cannot_be_passed_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    with pytest.raises(ConfigError) as caught:
        passed_variables([name])
    assert name in caught.value.what and why in str(caught.value)

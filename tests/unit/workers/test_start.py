"""Environment settings before Ray is imported, for an own cluster and for a joined one."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from rillflow.errors import ClusterError
from rillflow.workers.start import settle

HEAD = "10.0.0.9:6379"
OWN = {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Protection of an own cluster: a token, and ports only on the loopback device."""


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide an imported Ray, and remove its environment variables."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # monkeypatch restores or removes it
    del sys.modules["ray"]
    for name in [*os.environ]:
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())


def protection() -> dict[str, str]:
    return {name: os.environ[name] for name in OWN if name in os.environ}


def test_a_cluster_of_our_own_asks_for_a_token_and_is_local() -> None:
    assert settle() is None and protection() == OWN


def test_an_address_that_says_local_is_a_cluster_of_our_own() -> None:
    os.environ["RAY_ADDRESS"] = "local"
    assert settle() is None and protection() == OWN


def test_a_cluster_that_is_joined_keeps_the_protection_it_has() -> None:
    assert settle(HEAD) == HEAD and protection() == {}
    os.environ["RAY_AUTH_MODE"] = "disabled"
    assert settle(HEAD) == HEAD and protection() == {"RAY_AUTH_MODE": "disabled"}


def test_the_environments_address_is_as_good_as_the_recipes() -> None:
    os.environ["RAY_ADDRESS"] = HEAD
    assert settle() == HEAD and protection() == {}
    assert settle("10.0.0.7:6379") == "10.0.0.7:6379"


def test_what_a_process_with_a_cluster_of_its_own_has_left_does_not_keep_another_from_joining() -> None:
    os.environ |= OWN
    assert settle(HEAD) == HEAD and protection() == {"RAY_AUTH_MODE": "token"}


def test_a_ray_that_was_imported_for_another_kind_of_cluster_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settle()
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert settle() is None
    with pytest.raises(ClusterError, match=rf"this process cannot join the cluster at {HEAD}"):
        settle(HEAD)
    del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
    assert settle(HEAD) == HEAD
    with pytest.raises(
        ClusterError, match="ray was imported before Rillflow could turn its authentication on"
    ):
        settle()


def test_a_client_of_ray_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"placement\.address is ray://10\.0\.0\.9:10001") as caught:
        settle("ray://10.0.0.9:10001")
    assert "ray job submit" in caught.value.fix

"""The role table: a row and a class with ``make`` define a shipped role, and nothing else does."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import pytest

from rillflow import roles
from rillflow.app.role_table import ROLES, SCORERS, RoleSpec, Start
from rillflow.roles.trained_role import TrainedRole
from rillflow.workers.endpoint import endpoints_of

SPECS = {**ROLES, **SCORERS}


@pytest.mark.parametrize("name", SPECS)
def test_a_row_names_a_class_that_makes_itself_and_has_endpoints(name: str) -> None:
    spec = SPECS[name]
    found = spec.load()
    assert spec.make == found.make and spec.endpoints(name) == endpoints_of(found)
    assert not spec.is_trained or issubclass(found, TrainedRole)


def test_every_class_with_endpoints_has_a_row() -> None:
    shipped = set()
    for module in pkgutil.iter_modules(roles.__path__):
        for found in vars(import_module(f"rillflow.roles.{module.name}")).values():
            is_role = isinstance(found, type) and "make" in dir(found) and endpoints_of(found)
            if is_role and found.__module__.endswith(f".{module.name}"):
                shipped.add(f"{module.name}:{found.__name__}")
    assert shipped == {spec.role for spec in SPECS.values()}


def test_a_brought_class_is_called_with_the_setting() -> None:
    class Own:
        """A class without ``make``."""

    spec = RoleSpec(role=Own)
    assert spec.make is Own is spec.load() and spec.start is Start.CALLED and not spec.is_model

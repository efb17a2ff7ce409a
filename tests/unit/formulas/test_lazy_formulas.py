"""The package provides formulas by name and imports torch only when one computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rillflow import formulas


def test_a_formula_that_a_step_may_name_imports_no_torch() -> None:
    script = (
        "import sys; from rillflow import formulas; from rillflow.formulas.interval import wilson;"
        "assert formulas.wilson is wilson;"
        "found = [getattr(formulas, name) for name in {*dir(formulas)} - {'token_logprobs', 'loss_weights'}];"
        "assert formulas.group_advantages in found; assert 'torch' not in sys.modules;"
        "formulas.token_logprobs; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("name", dir(formulas))
def test_every_listed_name_is_there(name: str) -> None:
    found = vars(sys.modules["rillflow.formulas"]).get(name) or formulas.__getattr__(name)
    assert found.__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="group_advantage'"):
        _ = formulas.group_advantage

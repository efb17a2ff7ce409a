"""What ``check`` says about the bytes of a recipe's codecs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rillflow.app.check import check
from rillflow.app.recipe import load_recipe
from rillflow_links.codecs.registry import GRADIENTS
from rillflow_links.config import LinksConfig
from rillflow_links.expected_bytes import gradient_bits

RECIPE = """
[task]
source = "arithmetic"
digits = 1
size = 40
[policy.model.new]
hidden = 64
layers = 2
alphabet = "0123456789+=-"
[rollout]
max_tokens = 4
[algorithm]
name = "grpo"
steps = 2
[placement]
backend = "inline"
pools = { main = 2, answers = 1 }
roles = { sampler = "answers" }
"""


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("share", [0.003, 0.02, 0.2])
def test_the_expected_bits_are_those_that_are_sent(name: str, share: float) -> None:
    links = LinksConfig.model_validate({"gradients": name, "share": share})
    tensor = torch.randn(500_000, generator=torch.Generator().manual_seed(1))
    sent = 8 * GRADIENTS[name](links).encode(tensor, {}).numel() / tensor.numel()
    assert sent == pytest.approx(gradient_bits(links), rel=0.2)


def test_check_says_what_each_codec_sends(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    plain = check(load_recipe(tmp_path / "run.toml", ["run.dir=a"]))
    assert "links" not in plain.topics
    coded = ["run.dir=a", "links.weights=delta", "links.gradients=dct", "links.share=0.01"]
    weights, gradients = check(load_recipe(tmp_path / "run.toml", coded)).topics["links"]
    assert weights.startswith("weights: differences, and the whole ") and "every 10th publish" in weights
    assert gradients.startswith("gradients: dct sends about ") and "are sent whole" in gradients

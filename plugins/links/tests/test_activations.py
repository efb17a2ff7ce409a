"""Hidden states that cross the cuts of a pipeline compressed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.errors import ConfigError
from rillflow.runs.run_data import load
from rillflow_links.codecs.cut_top_k import CutTopK, adapted

RECIPE = """
[run]
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 40
held_out = 0
[policy]
lr = 1e-2
model.new = { hidden = 16, layers = 3, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 3
[algorithm]
name = "sft"
steps = 6
prompts_per_step = 16
[placement]
backend = "process"
pools.main = 3
train_parallel.main.pp = 3
"""


def ran(folder: Path, name: str, *changes: str) -> tuple[bytes, list[float]]:
    """Run; return the trained weights and the loss of every step."""
    (folder / "run.toml").write_text(RECIPE)
    words = [f"run.dir={json.dumps(str(folder / name))}", *changes]
    launch(load_recipe(folder / "run.toml", words), quiet=True)
    newest = max((folder / name / "checkpoints").iterdir())
    losses = [step.metrics["supervised/loss/mean"].value for step in load(folder / name).steps]
    return (newest / "policy" / "model.safetensors").read_bytes(), losses


@settings(deadline=None)
@given(
    width=st.integers(1, 40),
    tokens=st.integers(1, 5),
    ratio=st.floats(1, 60),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_largest_values_cross_and_only_their_gradients_return(
    width: int, tokens: int, ratio: float, seed: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    codec = CutTopK([ratio])
    state = torch.randn(1, tokens, width).to(dtype).requires_grad_()
    sent = codec.compress(state, 0)
    assert [each.shape for each in sent] == [each.shape for each in codec.compress(state.to("meta"), 0)]
    arrived = codec.expand(sent, width, 0)
    torch.autograd.backward(arrived, torch.ones_like(arrived))
    kept = arrived.detach() != 0
    assert state.grad is not None and torch.equal(state.grad, sent_mask(sent, arrived.shape).to(dtype))
    assert torch.equal(arrived.detach()[kept], state.detach()[kept])
    assert int(kept.sum()) <= tokens * codec.kept(width, 0)
    left = state.detach().abs().masked_fill(sent_mask(sent, arrived.shape), 0).amax(-1)
    assert bool((left <= sent[0].detach().abs().amin(-1)).all()), "nothing larger stays behind"


def sent_mask(sent: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool).scatter(-1, sent[1].long(), True)


def test_the_slowest_link_is_compressed_by_the_whole_ratio() -> None:
    assert adapted(20, [0.1, 2.0, 0.5]) == pytest.approx([1.0, 20.0, 5.0])
    codec = CutTopK(adapted(20, [0.1, 2.0, 0.5]))
    assert [codec.kept(100, cut) for cut in range(4)] == [100, 5, 20, 20]


def test_whole_cuts_have_the_bits_of_a_pipeline_without_a_codec(tmp_path: Path) -> None:
    dense = ran(tmp_path, "dense")
    assert ran(tmp_path, "whole", "links.activations=top_k", "links.activation_ratio=1") == dense


@pytest.mark.slow
def test_a_resumed_pipeline_with_compressed_cuts_has_the_same_bits(tmp_path: Path) -> None:
    some = ("links.activations=adatopk", "links.activation_ratio=8", "links.link_seconds=[0.5, 2]")
    weights, losses = ran(tmp_path, "some", *some)
    assert losses[-1] < losses[0] - 0.2
    ran(tmp_path, "cut", *some, "algorithm.steps=3")
    assert ran(tmp_path, "cut", *some)[0] == weights


@pytest.mark.parametrize(
    ("given_settings", "words"),
    [
        (["links.activations=top_k", "placement.pools.main=1", "placement.train_parallel={}"], "no model is"),
        (["links.activations=top_k", "links.activation_ratio=0.5"], "links.activation_ratio is 0.5"),
        (["links.activations=adatopk"], "links.link_seconds is [], and the pipeline has 2 cuts"),
        (["links.activations=adatopk", "links.link_seconds=[1, -2]"], "links.link_seconds is [1.0, -2.0]"),
        (["links.activations=top_k", "algorithm.name=grpo"], "grpo trains the policy's own samples"),
        (["links.gradients=dct"], "and policy is trained with dp 1 x pp 3 x tp 1"),
        (["links.gradients=dct", "placement={ backend='inline', pools={ main=1 } }"], "trained by one rank"),
        (["links.weights=delta"], "the sampler has the policy's ranks"),
        (["links.gradients=dtc"], "links.gradients is"),
    ],
)
def test_codecs_that_an_edge_cannot_use_are_refused(
    tmp_path: Path, given_settings: Sequence[str], words: str
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "run.toml", given_settings)
    assert words in str(caught.value), str(caught.value)

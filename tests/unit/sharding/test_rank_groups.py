"""A rank's groups along the axes of its mesh, and meshes without a place for a rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rillflow.errors import ModelError, PlacementError
from rillflow.models.attention import ATTENTION, register
from rillflow.models.tensor_plan import tensor_plan
from rillflow.placement.mesh import Mesh
from rillflow.sharding.mesh import RankGroups, rank_groups
from rillflow.sharding.module import Parallel
from rillflow.sharding.tensor import require_even
from rillflow.workers.collectives import SingleRank, ThreadGroup, ThreadRanks


def module(**changes: object):  # type: ignore[no-untyped-def]
    register()
    settings: dict[str, object] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = Qwen2Config(**{**settings, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)


def test_ranks_with_the_whole_module_differ_in_dp_alone() -> None:
    assert RankGroups.whole(ThreadRanks(ThreadGroup(3, 20.0), 1)).mesh == Mesh.of(dp=3, pp=1, tp=1)


def test_every_rank_has_its_neighbours() -> None:
    group = ThreadGroup(12, 20.0)
    mesh = Mesh.of(dp=2, pp=3, tp=2)
    with ThreadPoolExecutor(12) as threads:
        groups = list(threads.map(lambda rank: rank_groups(mesh, ThreadRanks(group, rank)), range(12)))
    places = [(s.dp.rank, s.pp.rank, s.tp.rank) for s in groups]
    assert places == [tuple(mesh.coordinates(rank).values()) for rank in range(12)]
    assert {(s.dp.size, s.pp.size, s.tp.size) for s in groups} == {(2, 3, 2)}
    assert [s.everyone.rank for s in groups if s.speaks] == [4, 10]
    assert [s.everyone.rank for s in groups if s.first] == [0, 1, 6, 7]
    assert [s.ends.size for s in groups[:6]] == [2, 2, 1, 1, 2, 2]
    assert [s.ends.rank for s in groups[:6]] == [0, 0, 0, 0, 1, 1]
    assert [s.stage for s in groups[:6]] == [0, 0, 1, 1, 2, 2]


def test_a_descending_pipeline_begins_on_its_last_rank() -> None:
    group = ThreadGroup(12, 20.0)
    mesh = Mesh.of(dp=2, pp=3, tp=2).turned("pp")
    with ThreadPoolExecutor(12) as threads:
        groups = list(threads.map(lambda rank: rank_groups(mesh, ThreadRanks(group, rank)), range(12)))
    assert all(each.is_descending for each in groups)
    places = [(s.dp.rank, s.stage, s.tp.rank) for s in groups]
    assert places == [tuple(mesh.coordinates(rank).values()) for rank in range(12)]
    assert [s.stage for s in groups[:6]] == [2, 2, 1, 1, 0, 0]
    assert [s.pp.rank for s in groups[:6]] == [0, 0, 1, 1, 2, 2]
    assert [s.everyone.rank for s in groups if s.speaks] == [0, 6]
    assert [s.everyone.rank for s in groups if s.first] == [4, 5, 10, 11]
    assert [s.everyone.rank for s in groups if s.last] == [0, 1, 6, 7]
    assert [s.ends.size for s in groups[:6]] == [2, 2, 1, 1, 2, 2]


def test_ranks_that_share_a_copy_follow_one_another() -> None:
    group, mesh = ThreadGroup(8, 20.0), Mesh.of(dp=4, pp=1, tp=2)
    with ThreadPoolExecutor(8) as threads:
        groups = list(threads.map(lambda rank: rank_groups(mesh, ThreadRanks(group, rank), 2), range(8)))
    assert {(s.dp.size, s.fsdp.size, s.copies.size) for s in groups} == {(4, 2, 2)}
    assert [(s.copies.rank, s.fsdp.rank) for s in groups[::2]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    with pytest.raises(PlacementError, match=r"fsdp is 2 and dp is 3\n.*3 / 2 leaves 1"):
        rank_groups(Mesh.of(dp=3, pp=1, tp=1), ThreadRanks(ThreadGroup(3, 20.0), 0), 2)


@pytest.mark.parametrize(
    ("sizes", "fsdp", "said"),
    [
        ({"dp": 4, "pp": 1, "tp": 1}, 2, "dp 4 x ep 2 x fsdp 2 x pp 1 x tp 1, with both ep and fsdp above 1"),
        ({"dp": 2, "pp": 2, "tp": 1}, 1, "dp 2 x ep 2 x fsdp 1 x pp 2 x tp 1, with both ep and pp above 1"),
        ({"dp": 2, "pp": 1, "tp": 2}, 1, "dp 2 x ep 2 x fsdp 1 x pp 1 x tp 2, with both ep and tp above 1"),
    ],
)
def test_experts_are_not_shared_out_where_other_weights_are_cut(
    sizes: dict[str, int], fsdp: int, said: str
) -> None:
    group, mesh = ThreadGroup(4, 20.0), Mesh.of(**sizes)

    def words(rank: int) -> str:
        with pytest.raises(PlacementError) as error:
            rank_groups(mesh, ThreadRanks(group, rank), fsdp, ep=2)
        return str(error.value)

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(words, range(4)):
            assert said in found and "leave" in found and "ranks that hold every other weight whole" in found


def test_a_mesh_has_as_many_places_as_there_are_ranks() -> None:
    with pytest.raises(PlacementError, match=r"dp 2 x pp 1 x tp 3 does not fit 1 ranks\n.*6 places") as error:
        rank_groups(Mesh.of(dp=2, pp=1, tp=3), SingleRank())
    assert "product is 1" in error.value.fix
    with pytest.raises(PlacementError, match="does not fit 1 ranks"):
        rank_groups(Mesh.of(first=1, dp=1, pp=1, tp=1), SingleRank())


@pytest.mark.parametrize("mesh", [Mesh.of(tp=1, pp=1, dp=1), Mesh.of(dp=1), Mesh.of()])
def test_a_mesh_has_the_three_axes_in_order(mesh: Mesh) -> None:
    with pytest.raises(PlacementError, match=r"they must be dp, pp, tp, in this order"):
        rank_groups(mesh, SingleRank())


def test_what_every_rank_has_whole_is_not_cut() -> None:
    one = rank_groups(Mesh.of(dp=1, pp=1, tp=1), SingleRank())
    for part in (Parallel(module(), one), Parallel.whole(module())):
        assert part.is_whole and part.gradients.is_whole and part.groups.speaks
        assert part.parameters.keys() == dict(module().named_parameters()).keys()


def test_threads_cannot_hold_parts_of_a_module() -> None:
    group = ThreadGroup(2, 20.0)
    with ThreadPoolExecutor(2) as threads:
        mesh = Mesh.of(dp=1, pp=2, tp=1)
        groups = list(threads.map(lambda rank: rank_groups(mesh, ThreadRanks(group, rank)), range(2)))
    with pytest.raises(PlacementError, match="ranks are threads of one process"):
        Parallel(module(), groups[0])


def test_what_does_not_divide_is_refused_with_the_sum() -> None:
    decoder = module(intermediate_size=54)
    require_even(decoder, tensor_plan(decoder), 2)
    with pytest.raises(
        ModelError, match=r"tp is 4 and model.layers.0.mlp.gate_proj has 54 outputs\n.*leaves 2"
    ):
        require_even(decoder, tensor_plan(decoder), 4)


def test_a_vocabulary_need_not_divide() -> None:
    decoder = module(tie_word_embeddings=True)
    assert decoder.config.vocab_size % 2 == 1
    require_even(decoder, tensor_plan(decoder), 2)
    assert torch.is_tensor(decoder.lm_head.weight)

"""The short form: lengths that can be said, devices by number and kind, and what contradicts itself."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plugins.planner.tests.toys import question
from rillflow.app.recipe import load_recipe
from rillflow.errors import ModelError, PlanError
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.options import LAYOUTS
from rillflow_planner.problem import Statement
from rillflow_planner.request import graph_of, lengths
from rillflow_planner.search import ranked_as_placed, search
from tests.architecture.conftest import docs_script

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "planner"))
from published.asynchronous import PAIRS  # noqa: E402  published rows lie beside the benchmarks
from published.models import CONFIGS  # noqa: E402

MODEL = ROOT / "examples/planning/qwen2.5-7b/config.json"


def request(**changes: Any) -> Statement:
    words = {"model": MODEL, "gpus": "64xH100", "algorithm": "grpo", "response": "mean=2000,max=8192"}
    return question(**{**words, "samples": 16, **changes})


def test_a_mean_and_a_limit_are_kept() -> None:
    found = lengths("mean=2000,max=8192", "here")
    assert (found.kind, found.limit) == ("lognormal", 8192)
    assert found.mean == pytest.approx(2000, rel=1e-6)


def test_a_percentile_settles_the_spread() -> None:
    by_percentile = lengths("median=800,p90=2534.64,max=100000", "here")
    assert by_percentile.sigma == pytest.approx(0.9, abs=1e-3)
    assert by_percentile.quantile(0.9) == pytest.approx(2534.64, rel=1e-3)


def test_one_number_and_a_file_of_lengths_are_lengths_too(tmp_path: Path) -> None:
    assert lengths("256", "here").mean == 256
    (tmp_path / "lengths.jsonl").write_text('30\n{"length": 10}\n20\n')
    found = lengths(str(tmp_path / "lengths.jsonl"), "here")
    assert (found.kind, found.values, found.limit) == ("measured", (10, 20, 30), 30)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mean=9000,max=8192", "mean 9000 and max 8192"),
        ("median=9000,max=8192", "median 9000 and max 8192"),
        ("mean=2000", "has mean"),
        ("max=2000", "has max"),
        ("mean=1000,median=2000,max=8192", "has mean, median, max"),
        ("mean=1000,mean=2000,max=8192", "has 'mean=2000'"),
        ("mean=1000,sigma=1,p90=2000,max=8192", "has mean, sigma, p90, max"),
        ("maen=1000,max=8192", "has 'maen=1000'"),
        ("mean=long,max=8192", "has 'mean=long'"),
        ("mean=-1,max=8192", "has 'mean=-1'"),
        ("mean=1e400,max=8192", "has 'mean=1e400'"),
        ("nowhere.jsonl", "is 'nowhere.jsonl'"),
    ],
)
def test_lengths_that_contradict_themselves_are_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        lengths(text, "--response")
    assert "--response" in caught.value.what and said in caught.value.what


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": "0xH100"}, "'0xH100'"),
        ({"gpus": "0"}, "'0'"),
        ({"gpus": "64xH10"}, "'64xH10'"),
        ({"gpus": "12xH100"}, "'12xH100', and a machine has 8"),
        ({"algorithm": "grop"}, "'grop'"),
        ({"like": "nemo"}, "--like is 'nemo'"),
        ({"model": Path("nowhere.json")}, "nowhere.json"),
        ({"prompts": 0}, "--prompts (algorithm.prompts_per_step) is 0"),
        ({"price": "2.5"}, "--price is '2.5'"),
        ({"per_machine": 0}, "--per-machine is 0"),
        ({"gpus": "2000000xH100"}, "--gpus is 2000000"),
        ({"prompts": 100_000}, "prompts x samples, is 1600000"),
        ({"steps": 0}, "--steps is 0"),
        ({"tokens_per_pass": 0}, "--tokens-per-pass is 0"),
        ({"scoring_tokens": 4096}, "--scoring-tokens is given without --like"),
        ({"algorithm": "sft", "reward_seconds": 1}, "--reward-seconds is 1"),
        ({"engine": "drain=true"}, "unknown key 'drain'"),
        ({"engine": "drains=3"}, "--engine.drains is 3"),
        ({"objective": "cost"}, "--objective is cost without --price"),
        ({"layout": "tp=4", "objective": "device-hours"}, "--layout and --objective"),
        ({"layout": "tp=4", "deadline": 5}, "--layout and --deadline"),
        ({"layout": "tp=4", "freshness": "0,1"}, "--layout is given with 2 freshness bounds"),
        ({"lengths": "runs/a"}, "--lengths and --response"),
        ({"between": "200 TB/s"}, "link between machines, is 200000 GB/s"),
    ],
)
def test_words_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((PlanError, ModelError)) as caught:
        request(**changes)
    assert said in caught.value.what


@pytest.mark.parametrize(
    ("like", "layout", "said"),
    [
        ("", "tp=4,tp=2", "tp twice"),
        ("", "tp=3", "--layout is 'tp=3', for 64 devices"),
        ("", "tp=8", "tp=8, for Rillflow and qwen2.5-7b"),
        ("", "pp=32", "pp=32, for Rillflow"),
        ("", "cp=2", "cp=2, for Rillflow"),
        ("", "ep=2", "ep=2, for Rillflow"),
        ("", "generate=4", "generate=4, for Rillflow"),
        ("verl", "tp=2", "tp=2, for verl"),
        ("verl", "pp=2", "pp=2, for verl"),
        ("verl", "fsdp=0", "fsdp=0, for verl"),
        ("nemo-rl", "fsdp=1", "fsdp=1, for nemo-rl"),
        ("nemo-rl", "ep=8", "ep=8, for nemo-rl"),
        ("nemo-rl", "cp=16", "cp=16, for nemo-rl"),
        ("nemo-rl", "generate=8", "generate=8, for nemo-rl"),
        ("nemo-rl-dtensor", "pp=2", "pp=2, for nemo-rl-dtensor"),
    ],
)
def test_a_layout_that_the_runtime_cannot_have_is_refused(like: str, layout: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        request(like=like, layout=layout)
    assert said in caught.value.what and caught.value.fix


@pytest.mark.parametrize("axes", ["ep=3", "tp=4,ep=2", "tp=4,pp=2,ep=16,dp=8"])
def test_experts_are_cut_evenly(axes: str) -> None:
    model = ROOT / "benchmarks/planner/published/configs/Qwen3-30B-A3B"
    with pytest.raises(PlanError, match=r"ep=|unknown key 'dp'"):
        request(model=model, like="nemo-rl", layout=axes)
    assert request(model=model, like="nemo-rl", layout="tp=4,ep=8").placed


def test_models_of_a_step_share_a_given_layout() -> None:
    stated = request(algorithm="ppo", layout="tp=4,pp=2,generate=4")
    assert stated.placed is not None and stated.placed.units.keys() == {"policy", "reference", "critic"}
    assert stated.title.endswith(
        "Rillflow's given layout, timed by 7 measurements of Rillflow with a model of 0.5B on one H200"
    )
    assert ranked_as_placed(stated.problem, CostModel, stated.placed).best


def test_a_rack_is_joined_where_the_stack_places_its_ranks_by_rack() -> None:
    def per_machine(gpus: str, like: str, **more: int) -> int:
        return request(gpus=gpus, like=like, **more).problem.hardware.fleets[0].per_machine

    assert per_machine("128xGB200", "nemo-rl") == 64
    assert per_machine("128xGB200", "nemo-rl-0.6") == 4
    assert per_machine("64xGB200", "nemo-rl-0.6") == 64
    assert per_machine("128xGB200", "nemo-rl", per_machine=32) == 32
    assert per_machine("12xH100", "", per_machine=4) == 4


def test_a_type_of_model_that_nobody_can_size_is_refused(tmp_path: Path) -> None:
    config = json.loads(MODEL.read_text()) | {"model_type": "mamba2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="model_type is 'mamba2'"):
        request(model=tmp_path)


def test_what_was_assumed_is_said_and_what_was_given_is_not() -> None:
    assumed = " ".join(request().assumptions)
    assert "sigma 0.9" in assumed and "--between" in assumed and "--reward-seconds" in assumed
    told = request(
        response="mean=2000,sigma=1.1,max=8192", between="25 GB/s", reward_seconds=0.5, price="2 $/h"
    )
    assert told.assumptions == ()
    assert told.problem.workload.function_s == 0.5
    assert told.problem.hardware.fleets[0].price_per_hour == 2.0


@pytest.mark.parametrize("minibatches", [1, 4])
@pytest.mark.parametrize("recipe", ["code", "ppo", "dapo", "safe_rlhf", "remax", "best_of_n"])
def test_shipped_steps_are_those_that_recipes_are_traced_to(recipe: str, minibatches: int) -> None:
    loaded = load_recipe(ROOT / f"recipes/{recipe}/run.toml", [f"algorithm.minibatches={minibatches}"])
    traced = loaded.graphs[-1]
    shipped = graph_of(traced.name, minibatches)
    assert [stage.name for stage in shipped.stages] == [stage.name for stage in traced.stages]
    assert [(edge.source, edge.destination, edge.fields) for edge in shipped.edges] == [
        (edge.source, edge.destination, edge.fields) for edge in traced.edges
    ], "python docs/draw_graphs.py writes them anew"


def test_shipped_graphs_are_those_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    drawing = docs_script("draw_graphs")
    today = drawing.as_file(drawing.graphs_of_recipes())
    assert drawing.GRAPHS.read_text("utf-8") == today, "make docs writes the file anew"


@pytest.mark.parametrize(("devices", "published_s"), [(64, 365.28), (128, 356.30)])
def test_verls_published_run_as_a_user_states_it_is_within_a_quarter(
    devices: int, published_s: float
) -> None:
    """verl, docs/advance/fully_async.md: Qwen2.5-Math-7B, 512 prompts of 16 answers up to 28k tokens."""
    stated = request(
        gpus=f"{devices}xH20",
        response="mean=927,sigma=1.8,max=28672",
        prompt="150",
        minibatches=16,
        like="verl",
        layout="fsdp=1,cp=4,generate=4",
        between="25 GB/s",
    )
    assert stated.placed is not None
    found = ranked_as_placed(stated.problem, CostModel, stated.placed).best[0]
    assert found.evaluation.step_s == pytest.approx(published_s, rel=0.25)


@pytest.mark.parametrize(
    ("staleness", "published_s"), [(0.0, 231.34), (0.1, 171.30), (0.3, 146.11), (0.5, 150.63)]
)
def test_verls_staleness_as_a_user_states_it_is_within_a_quarter(
    staleness: float, published_s: float
) -> None:
    """Its fully asynchronous trainer, 64 + 64: a fraction of a step in advance, 4 minibatches at once."""
    stated = request(
        gpus="128xH20",
        response="mean=927,sigma=1.8,max=28672",
        prompt="150",
        minibatches=16,
        like="verl",
        layout="fsdp=1,cp=4,generate=4,separate=64,streams=4",
        between="25 GB/s",
        freshness=staleness,
    )
    assert stated.placed is not None
    found = ranked_as_placed(stated.problem, CostModel, stated.placed).best[0]
    assert (found.plan.freshness, found.plan.streams) == (staleness, 4)
    assert found.evaluation.step_s == pytest.approx(published_s, rel=0.25)


@pytest.mark.parametrize(
    "name", ["verl one step off, FSDP", "verl V1, 35B-A3B, 32", "verl V1, 35B-A3B, H100", "AReaL, Qwen2.5-7B"]
)
def test_published_gains_of_running_apart_have_the_right_sign(name: str) -> None:
    """None of these pairs is in a fit; benchmarks/results/simulator.md has all pairs, right or wrong."""
    pair = next(one for one in PAIRS if one.name.startswith(name))
    assert pair.other.step_s < pair.one.step_s
    assert pair.computed_s(pair.other) < 0.95 * pair.computed_s(pair.one)


@pytest.mark.parametrize(
    ("matching", "gathering"),
    [
        ("tp=4,generate=4", "tp=4,generate=1"),
        ("tp=4,generate=4", "tp=4,pp=2,generate=4"),
        ("tp=4,generate=2", "fsdp=1,generate=2"),
    ],
)
def test_weights_reach_a_matching_copy_faster_where_only_missing_shards_move(
    matching: str, gathering: str
) -> None:
    """Rillflow moves what a rank lacks (HybridFlow, table 2); NeMo-RL moves whole tensors at one rate."""

    def publish_s(layout: str, like: str) -> float:
        stated = request(gpus="16xH100", layout=layout, like=like)
        assert stated.placed is not None
        found = ranked_as_placed(stated.problem, CostModel, stated.placed).best[0]
        return found.evaluation.seconds[max(stated.problem.publishing)]

    assert publish_s(matching, "") < 0.6 * publish_s(gathering, "")
    state_s = [publish_s(layout, "nemo-rl") for layout in (matching, gathering) if "fsdp" not in layout]
    whole = 7.6e9 * 2 / 36.1e9
    assert all(spent > whole for spent in state_s)


@pytest.mark.parametrize("apart", [8, 48])
def test_weights_to_a_sampler_apart_are_bounded_by_the_links(apart: int) -> None:
    """Each device receives its part of a copy over its own link; a copy over more devices arrives sooner."""

    def publish_s(generate: int) -> float:
        layout = f"tp=4,generate={generate},separate={apart}"
        stated = request(layout=layout, freshness=1)
        assert stated.placed is not None
        found = ranked_as_placed(stated.problem, CostModel, stated.placed).best[0]
        return found.evaluation.seconds[max(stated.problem.publishing)]

    shape = 7.6e9 * 2
    assert publish_s(1) == pytest.approx(shape / 50e9, rel=0.05)
    assert publish_s(4) == pytest.approx(shape / 4 / 50e9, rel=0.05)


@pytest.mark.parametrize(
    ("model", "devices", "lengths", "layout", "published_s"),
    [
        ("DeepSeek-V3", 256, "mean=701,sigma=0.6,max=1426", "pp=16,ep=16,generate=32", 134.0),
        ("Qwen3-235B-A22B", 128, "mean=5698,max=8082", "tp=2,cp=2,pp=8,ep=16,generate=16", 395.0),
    ],
)
def test_the_largest_published_models_are_planned_in_step(
    model: str, devices: int, lengths: str, layout: str, published_s: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))
    samples = 16 if model == "DeepSeek-V3" else 32
    words = {"model": tmp_path, "gpus": f"{devices}xH100", "response": lengths, "prompt": "110"}
    stated = request(**words, prompts=512 // samples, samples=samples, like="nemo-rl-0.6", layout=layout)
    assert stated.placed is not None
    placed = ranked_as_placed(stated.problem, CostModel, stated.placed).best[0].evaluation.step_s
    searched = search(stated.problem, CostModel).best[0].evaluation.step_s
    published = stated.problem.hardware.published
    assert published is not None and published.searched is not None
    assert placed == pytest.approx(published_s, rel=0.15)
    assert published.searched.bias * searched == pytest.approx(published_s, rel=0.2)
    own = replace(stated.problem, layouts=LAYOUTS["rillflow"])
    with pytest.raises(PlanError, match=r"key-value head|more memory|lacks"):
        search(own, CostModel)

"""The commands that plan: words in, tables, files and exit codes out."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rillflow.app.planned import is_placed_by, open_plan
from rillflow.app.recipe import load_recipe
from rillflow.cli.main import main
from rillflow_parts.fusion.alignment import fused_of

ROOT = Path(__file__).parents[3]
RECIPE = """
[policy]
model.new = { hidden = 64, layers = 4, heads = 8, kv_heads = 4, context = 64 }
[rollout]
max_tokens = 16
[task]
size = 600
[algorithm]
name = "ppo"
steps = 3
prompts_per_step = 16
samples_per_prompt = 4
loss.kl = 0.1
"""
CLUSTER = """
name = "two"
[[machine_type]]
name = "cores"
device = "cpu"
devices = 2
per_machine = 2
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(words) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


PLAN = ("plan", "run.toml", "--cluster", "cluster.toml")
SIMULATE = ("simulate", "run.toml", "--cluster", "cluster.toml", "--plan", "plan.toml")


def test_a_recipe_is_planned_and_the_plan_simulated(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, *PLAN, "--out", "plan.toml", "--plot", "plan.html")
    assert "5 placements, 1 too large for the cluster; the best 4" in out
    head, best, second = out.split("the best 4\n")[1].splitlines()[:3]
    assert "weakness" in head and "%: " not in best and "%: " in second
    sizes = out.split("throughput by cluster size\n")[1].splitlines()
    assert "rows/s" in sizes[0]
    for devices, line in zip(("2", "4"), sizes[1:], strict=False):
        assert line.split()[0] == devices and "policy" in line and "critic" in line
    assert "assumed: responses: log-normal" in out
    plan = open_plan(here / "plan.toml")
    assert set(plan.units) == {"policy", "reference", "critic"}
    assert plan.predicted_step_s > 0 and plan.predicted_stages_s["policy.generate"] > 0
    assert {pool.device for pool in plan.pools} == {"cpu"}
    page = (here / "plan.html").read_text()
    assert "policy.generate, step 1" in page
    assert "weakness" in page and second.strip() in page
    out = said(capsys, *SIMULATE, "--steps", "3", "--plot", "steps.html")
    assert "ppo on two, freshness 0, seed 0: 3 steps simulated" in out
    assert "192 begun, 192 trained" in out
    assert "policy.update, step 3" in (here / "steps.html").read_text()


def test_a_prediction_says_what_its_factors_were_fitted_to(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = here / "cluster.toml"
    for more, told in (
        ("", "default factors, not compared with any run"),
        ('like = "verl"', "no steps of Rillflow on cpu were left out and predicted, so there is no range"),
        ("[factors]\ntrain_flops = 0.3\n", "names no source"),
    ):
        file.write_text(more + CLUSTER if more.startswith("like") else CLUSTER + more)
        lines = said(capsys, *PLAN).splitlines()
        (line,) = [line for line in lines if line.startswith("accuracy: ")]
        assert told in line
        timed = ", timed by 13 published steps of verl" * more.startswith("like")
        assert lines[0] == f"ppo on two: Rillflow's best plan{timed}"
        assert not [line for line in lines if re.search(r" \(\S+ m?s to ", line)], "a range nobody measured"
    file.write_text('calibrated = "runs/first by rillflow calibrate"' + CLUSTER)
    assert "accuracy: factors fitted to runs/first by rillflow calibrate; " in said(capsys, *PLAN)
    assert json.loads(said(capsys, *PLAN, "--format", "json"))["accuracy"].startswith(
        "factors fitted to runs/"
    )


@pytest.mark.parametrize("bounds", ["a", "0,", "-1", "1.5.2", "0;1"])
def test_freshness_bounds_that_are_none_are_named(
    bounds: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*PLAN, f"--freshness={bounds}"])
    assert f"{bounds!r} is not a list of numbers from 0 up, such as 0,1,4 or 0.5" in capsys.readouterr().err


def test_the_price_that_an_error_asks_for_is_one_that_a_cluster_may_have(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = said(capsys, *PLAN, "--objective", "cost", code=2)
    price = error.split("such as ")[1].splitlines()[0]
    (here / "cluster.toml").write_text(CLUSTER + price + "\n")
    assert "the best 4" in said(capsys, *PLAN, "--objective", "cost")


def test_a_planned_recipe_passes_the_check_of_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rillflow.app.planned import require_for, settings_of
    from rillflow.app.recipe import load_recipe

    said(capsys, *PLAN, "--out", "plan.toml")
    plan = open_plan(here / "plan.toml")
    loaded = load_recipe(here / "run.toml", settings_of(plan, ()))
    require_for(plan, loaded)
    assert sum(loaded.recipe.placement.pools.values()) <= 2


SHORT = (
    *("plan", "--model", str(ROOT / "examples/planning/qwen2.5-7b/config.json"), "--gpus", "16xH100"),
    *("--algorithm", "ppo", "--response", "mean=800,max=4096", "--prompts", "256", "--samples", "4"),
)


def test_the_short_form_decides_without_a_recipe_and_without_torch() -> None:
    code = (
        "import sys; from rillflow.cli.main import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules; sys.exit(code)"
    )
    words = [sys.executable, "-c", code, *SHORT, "--price", "2 $/h", "--steps", "200"]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    head = out.splitlines()
    assert head[0] == (
        "ppo on 16 x H100: Rillflow's best plan, timed by 7 measurements of Rillflow "
        "with a model of 0.5B on one H200"
    )
    assert re.match(r"a step: [^(]+ on \d+ devices$", head[1])
    assert re.search(r"\non 32 devices: [^(]* a step, [+-]\d+% rows per second\n", out)
    assert re.search(r"\n200 steps: [^(]*, [\d.,]+ \$\n", out)
    assert "no steps of Rillflow on H100 were left out and predicted, so there is no range" in out
    assert "with answers twice as long: " in out and "a heavier tail" in out
    assert "simulated" in out and "assumed: responses: log-normal" in out
    assert "assumed: activations are " in out
    assert "[placement]" in out


STACK = (
    *("plan", "--model", str(ROOT / "examples/planning/qwen2.5-7b/config.json"), "--algorithm", "grpo"),
    *("--response", "mean=800,max=4096", "--prompts", "64", "--samples", "32", "--minibatches", "4"),
)


def test_a_published_stack_is_another_question_with_a_range(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*STACK, "--like", "nemo-rl", "--freshness", "0,1")
    lines = said(capsys, *words, "--gpus", "16xH100").splitlines()
    assert lines[0] == "grpo on 16 x H100: what nemo-rl would take, with the best layout"
    assert re.match(r"a step: .* s \(.* to .* s\) on \d+ devices", lines[1])
    assert sum("such changes of a step from" in line for line in lines) == 2
    assert any(line.startswith("in step ") and "at freshness 1 (" in line for line in lines)
    (told,) = [line for line in lines if line.startswith("accuracy: ")]
    assert "left out of the fit, the median error is" in told
    assert sum("policy.logprobs" in line for line in lines) == 2, "the stack scores with policy and reference"
    assert "[placement]" not in lines, "Rillflow does not run another stack's layout"
    other = said(capsys, *words, "--gpus", "16xA100-80").splitlines()
    assert re.match(r"a step: [^(]* on \d+ devices", other[1]), "nothing was published on these machines"
    near = (
        "its range is of H100 and GB200, not of A100-80; 2 published steps of RLinf on H100 and Miles on H200"
    )
    assert other[0].endswith(f"; unsure: {near} took 1.09 to 1.71 times the predicted seconds")
    assert not any("such changes of a step from" in line for line in other), "no such pair was measured there"
    small = said(capsys, *words, "--gpus", "16xH100", "--set", "policy.model.dtype=float8").splitlines()
    assert "4 published steps in FP8 took 1.06 to 1.54 times the predicted seconds" in small[0]
    assert re.match(r"a step: [^(]* on \d+ devices", small[1])


def test_a_given_layout_is_not_searched(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*STACK, "--like", "nemo-rl", "--gpus", "16xH100", "--format", "json")
    best = json.loads(said(capsys, *words))
    given = json.loads(said(capsys, *words, "--layout", "tp=2,pp=2,generate=4"))
    assert given["placements"] == 1 and given["best"][0]["units"]["policy"]["generate_tp"] == 4
    assert given["best"][0]["step_s"] >= best["best"][0]["step_s"]
    assert given["best"][0]["range_s"][0] < given["best"][0]["range_s"][1]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--like", "verl", "--algorithm", "ppo"], "--like is verl and the algorithm 'ppo'"),
        (["--like", "rillflow", "--algorithm", "grpo"], "no steps of it were published"),
        (["--algorithm", "grpo", "--layout", "tp=3"], "--layout is 'tp=3', for 16 devices"),
        (["--algorithm", "grpo", "--layout", "tq=3"], "unknown key 'tq'"),
        (["--algorithm", "grpo", "--layout", "tp=2,separate=8"], "freshness 0"),
        (["--algorithm", "grpo", "--steps", "-5"], "--steps is -5"),
        (["--algorithm", "grpo", "--reward-seconds", "-1"], "--reward-seconds is -1"),
        (["--algorithm", "grpo", "--set", "policy.lr=1"], "unknown key 'policy.lr'"),
        (["--algorithm", "grpo", "--set", "policy.gradient_checkpointing=maybe"], "'maybe'"),
    ],
)
def test_options_of_the_short_form_that_cannot_be_are_refused(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = [word for word in STACK if word not in ("--algorithm", "grpo")]
    assert what in said(capsys, *start, "--gpus", "16xH100", *words, code=2)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([*SHORT, "--samples", "8"], "--samples is given twice: 4 and 8"),
        ([*SHORT, "--cluster", "cluster.toml"], "--cluster and --gpus are given together"),
        ([*SHORT[:3]], "the command has no --algorithm, no --response or --lengths, no --cluster or --gpus"),
        (
            ["plan", "run.toml", *SHORT[3:5], "--cluster", "cluster.toml"],
            "--cluster and --gpus are given together",
        ),
        (["plan", "run.toml"], "the command has no --cluster or --gpus"),
        ([*PLAN, "--prompts", "7"], "pass --set algorithm.prompts_per_step=7"),
        ([*PLAN, "--samples", "7"], "pass --set algorithm.samples_per_prompt=7"),
        ([*PLAN, "--minibatches", "9"], "pass --set algorithm.minibatches=9"),
        ([*PLAN, "--steps", "5"], "pass --set algorithm.steps=5"),
        ([*PLAN, "--model", "m"], "pass --set policy.model.path=m"),
        ([*PLAN, "--algorithm", "grpo"], "pass --set algorithm.name=grpo"),
        ([*PLAN, "--price", "9 $/h"], "--cluster and --price are given together"),
        ([*PLAN, "--between", "1 MB/s"], "--cluster and --between are given together"),
        ([*PLAN, "--per-machine", "2"], "--cluster and --per-machine are given together"),
        ([*PLAN, "--like", "verl"], "--like is verl and the algorithm 'ppo'"),
        ([*PLAN, "--layout", "tp=8"], "--layout is 'tp=8', for 2 devices"),
        ([*PLAN, "--response", "mean=9,max=99"], "pass --set rollout.max_tokens=99"),
        ([*PLAN, "--lengths", "nowhere", "--reward-seconds", "1"], "--lengths and --reward-seconds"),
        ([*PLAN, "--freshness", "1", "--separate-in-step"], "--separate-in-step is given"),
        ([*PLAN, "--freshness", "100000"], "set --freshness to at most"),
        ([*PLAN, "--freshness", "0", "--freshness", "1"], "--freshness is given twice"),
        ([*SHORT, "--dir", "runs/x"], "--dir is given without a recipe"),
        ([*SHORT, "--set", "rollout.max_rows=2", "--set", "rollout.max_rows=3"], "is given twice"),
        ([*SHORT, "--engine", "drains=true", "--engine", "drains=false"], "drains is given twice"),
    ],
)
def test_words_of_the_short_form_that_cannot_be_together_are_refused(
    words: list[str], what: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as left:
        code = int(left.code or 0)
    assert code == 2
    assert what in capsys.readouterr().err


def test_the_section_to_paste_places_a_recipe_as_the_plan_does(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, *PLAN, "--out", "plan.toml")
    (here / "pasted.toml").write_text(RECIPE + out[out.index("[placement]") :])
    loaded = load_recipe(here / "pasted.toml")
    assert is_placed_by(open_plan(here / "plan.toml"), loaded.recipe.placement)


def test_machines_get_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "cluster.toml").write_text('like = "verl"' + CLUSTER)
    data = json.loads(said(capsys, *PLAN, "--format", "json", "--out", "plan.toml"))
    assert len(data["best"]) + data["nowhere"] == data["placements"] == 5
    steps = [one["step_s"] for one in data["best"]]
    assert steps == sorted(steps)
    assert all(one["range_s"] is None for one in data["best"])
    first, *others = data["best"]
    assert (first["cause"], first["why"]) == (None, "")
    late = [one["step_s"] / first["step_s"] - 1 for one in others]
    assert all(
        one["cause"] and f"{share:+.0%}: " in one["why"] for one, share in zip(others, late, strict=True)
    )
    assert [size["devices"] for size in data["sizes"]] == [2, 4]
    found = json.loads(said(capsys, *SIMULATE, "--format", "json", "--steps", "2"))
    assert len(found["step_s"]) == 2 and found["trained"] == 128
    spans = [span for span in found["spans"] if span["stage"] == "policy.generate"]
    assert sum(span["end_s"] - span["start_s"] for span in spans) > 0


@pytest.mark.parametrize(
    "words",
    [("--steps", "0"), ("--steps", "-1"), ("--steps", "10000000"), ("--oversample", "100", "100")],
)
def test_a_simulation_that_would_not_end_is_refused(
    words: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, *PLAN, "--out", "plan.toml")
    assert "a simulation has 1 step or more, and at most 300,000 rows" in said(
        capsys, *SIMULATE, *words, code=2
    )


@pytest.mark.parametrize("words", [("--freshness", "0"), ("--like", "nemo-rl"), ("--layout", "tp=4,pp=2")])
def test_a_recipe_and_the_options_in_its_place_are_predicted_alike(
    words: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ROOT / "examples/planning/qwen2.5-7b"
    (here / "run.toml").write_text(
        f'[policy]\nmodel.path = "{model}"\n[rollout]\nmax_tokens = 4096\n[algorithm]\nname = "grpo"\n'
        "steps = 50\nprompts_per_step = 64\nsamples_per_prompt = 8\nminibatches = 4\n"
    )
    machines = 'device = "H100"\ndevices = 64\nper_machine = 8\nbetween = "50 GB/s"'
    (here / "cluster.toml").write_text(f'name = "64 x H100"\nlike = "gpu"\n[[machine_type]]\n{machines}\n')
    alike = ("--response", "mean=800,max=4096", "--prompt", "256", "--format", "json", *words)
    step = ("--model", str(model), "--algorithm", "grpo", "--prompts", "64", "--samples", "8")
    step += ("--minibatches", "4", "--steps", "50")
    gpus = ("--gpus", "64xH100")
    found = [
        json.loads(said(capsys, "plan", *described, *alike))
        for described in (("run.toml", "--cluster", "cluster.toml"), ("run.toml", *gpus), (*step, *gpus))
    ]
    assumed = [one.pop("assumptions") for one in found]
    assert found[0] == found[1] == found[2]
    assert assumed[1] == assumed[2], "the cluster file has no default of its link"


def test_a_given_layout_is_the_plan_even_where_another_or_a_fused_one_is_faster(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, *FUSING, "--between", "1 GB/s", "--layout", "tp=4,pp=2", "--out", "plan.toml")
    assert "Rillflow's given layout" in out.splitlines()[0] and "fused" not in out
    grids = {str(unit.grid) for unit in open_plan(here / "plan.toml").units.values()}
    assert grids == {"dp 8 x pp 2 x tp 4"}


def test_a_run_measures_the_lengths_of_a_step_without_a_recipe(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "run", "run.toml", "--dir", "runs/first", "--quiet")
    recipe = json.loads(said(capsys, *PLAN, "--lengths", "runs/first", "--format", "json"))
    words = [word for word in SHORT if word not in ("--response", "mean=800,max=4096")]
    short = json.loads(said(capsys, *words, "--lengths", "runs/first", "--format", "json"))
    assert recipe["step_s"] > 0 and short["step_s"] > 0
    assert not any("log-normal" in line for line in short["assumptions"])


def test_a_simulation_is_that_of_its_seed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, *PLAN, "--out", "plan.toml")
    words = (*SIMULATE, "--format", "json", "--steps", "2", "--seed")
    once, again, other = (json.loads(said(capsys, *words, seed))["step_s"] for seed in ("1", "1", "2"))
    assert once == again != other


def test_freshness_takes_generation_apart(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--freshness", "1", "--format", "json", "--out", "plan.toml")
    planned = json.loads(said(capsys, *PLAN, *words))
    assert open_plan(here / "plan.toml").freshness == 1
    simulated = json.loads(said(capsys, *SIMULATE, "--steps", "128", "--format", "json"))
    assert planned["step_s"] == planned["simulated_s"][0] == simulated["settled_step_s"]
    assert planned["simulated_s"] == sorted(planned["simulated_s"]), "ahead plans stand as simulated"
    for pool in simulated["pools"]:
        idle_s = sum(pool["idle_s"].values())
        share = idle_s / (idle_s + pool["busy_s"])
        (use,) = [use for use in planned["best"][0]["pool_use"] if use["name"] == pool["pool"]]
        assert use["idle_share"] == pytest.approx(share)
    out = said(capsys, *SIMULATE, "--steps", "6")
    assert "freshness 1" in out and re.search(r"\b1 for \d+%", out)


def test_generation_may_be_separate_in_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = json.loads(said(capsys, *PLAN, "--separate-in-step", "--format", "json"))
    apart = [one for one in every["best"] if "sampler" in one["units"]]
    assert every["placements"] == 10
    assert apart and all(one["freshness"] == 0 for one in apart)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([*PLAN[:2], "--cluster", "clutser.toml"], "did you mean 'cluster.toml'"),
        ([*PLAN, "--objective", "devices"], "no deadline"),
        ([*PLAN, "--objective", "cost"], "price"),
        ([*PLAN, "--deadline", "1e-9"], "1e-09"),
        ([*PLAN, "--lengths", "nowhere"], "no run directory"),
        ([*SIMULATE], "plan.toml does not exist"),
        ([*PLAN[:2], "--cluster", "gone/x.toml"], "give the path of a cluster file"),
        ([*SIMULATE[:4], "--plan", "gone/x.toml"], "give the path of a plan"),
        (["calibrate", "nowhere"], "no run directory"),
        (["run", "run.toml", "--plan", "plan.toml"], "plan.toml does not exist"),
        (["run", "run.toml", "--cluster", "clutser.toml"], "did you mean 'cluster.toml'"),
        (["run", "run.toml", "--lengths", "nowhere"], "--lengths is given without --cluster"),
        (["run", "run.toml", "--cluster", "cluster.toml", "--lengths", "nowhere"], "no run directory"),
        (["run", "run.toml", "--cluster", "cluster.toml", "--set", "placement.pools.main=4"], "4"),
    ],
)
def test_what_cannot_be_planned_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    assert main(words) != 0
    err = capsys.readouterr().err
    assert what in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--freshness", "-1"], "-1"),
        (["--freshness", "a"], "'a' is not a list"),
        (["--objective", "speed"], "'speed'"),
        (["--plot", "plan.pdf"], "plan.pdf does not end in .html"),
    ],
)
def test_wrong_words_are_usage_errors(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*PLAN, *words])
    assert caught.value.code == 2
    assert what in capsys.readouterr().err


def test_what_places_and_what_only_predicts_are_not_given_together(here: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "run.toml", "--plan", "plan.toml", "--cluster", "cluster.toml"])
    assert caught.value.code == 2


def test_a_plan_beside_settings_that_place_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, *PLAN, "--out", "plan.toml")
    err = said(capsys, "run", "run.toml", "--plan", "plan.toml", "--set", "placement.pools.main=2", code=2)
    assert "cannot be combined with --plan" in err


FUSING = (
    *("plan", "--model", "model", "--algorithm", "ppo"),
    *("--gpus", "64xH100", "--prompt", "1024", "--samples", "1", "--response", "mean=300,max=1024"),
)
MODEL = {
    "model_type": "llama",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "intermediate_size": 13824,
    "vocab_size": 32000,
}
"""Llama-2-13B: its head takes a third of a layer, so the stages of its pipelines are nearly equal."""


def test_fusion_is_shown_beside_the_best_plan_without(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pays = said(capsys, *FUSING, "--between", "0.3 GB/s", "--out", "plan.toml").splitlines()
    (line,) = [line for line in pays[:8] if line.startswith("fused: ")]
    assert re.search(r"policy dp 1 x pp 8 x tp 8.*best without: .+ s, gain \d+\.\d%$", line)
    assert any("policy and critic fused" in line for line in pays)
    assert 'fused = ["policy", "critic"]' in pays
    assert fused_of(open_plan(here / "plan.toml")) == ("policy", "critic")
    slower = said(capsys, *FUSING).splitlines()
    (line,) = [line for line in slower[:8] if line.startswith("fusion does not pay here: best fused plan ")]
    assert "best plan " in line and "because " in line
    alone = said(capsys, *FUSING[:4], "grpo", *FUSING[5:])
    assert "fus" not in alone


def test_gathering_becomes_settings_only_of_lengths_that_were_given(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*FUSING, "--between", "1 GB/s"]
    assumed = said(capsys, *words)
    assert "schedule.gather_rows = " in assumed and "for assumed lengths" in assumed
    assert "[schedule]" not in assumed
    rows = [round(300 * math.exp(random.Random(row).gauss(-0.5, 1.0))) for row in range(512)]
    (here / "lengths").write_text("\n".join(str(min(max(row, 1), 1024)) for row in rows))
    words[words.index("mean=300,max=1024")] = "lengths"
    seen = said(capsys, *words, "--out", "plan.toml")
    plan = open_plan(here / "plan.toml")
    assert f"gather_rows = {plan.gather_rows}" in seen.split("[schedule]")[1]
    assert plan.gather_replicas > 0 and "for assumed lengths" not in seen

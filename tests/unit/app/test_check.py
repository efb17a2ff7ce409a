"""Facts, notes and all problems before a run, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow.app.check import check, placement_lines, setting_lines, unread_settings
from rillflow.app.check_report import Report
from rillflow.app.facts import RecipeFacts
from rillflow.app.launch import launch
from rillflow.app.preflight_checks import require_sound
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.app.resume import keep_data, run_config, run_state
from rillflow.errors import ConfigError, DataError, RunDirectoryError
from rillflow.runs.environment import usable_cores
from rillflow.runs.run_directory import RunDirectory
from rillflow.tasks.kinds import PROMPTS
from rillflow.tasks.task import open_task

RECIPE = """
[task]
source = "prompts.jsonl"
held_out = 2

[policy]
model.new = { hidden = 32, layers = 2, context = 32 }

[rollout]
max_tokens = 8

[reward]
function = "reward.py:exact"

[algorithm]
name = "grpo"
steps = 3
prompts_per_step = 4
"""
REWARD = """
def exact(prompts, completions, answer, **_):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]

def broken(prompts, completions, **_):
    raise ValueError("no idea")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(REWARD)
    write_rows(tmp_path, [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(folder: Path, rows: list[dict[str, object]]) -> None:
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def loaded(folder: Path, *overrides: str) -> Resolved:
    return load_recipe(folder / "run.toml", overrides)


def said(report: Report, title: str) -> str:
    return "\n".join(report.topics[title])


PAIRS: list[dict[str, object]] = [
    {"prompt": f"{n}+1=", "completion": "2", "answer": "2", "chosen": "2", "rejected": "1"} for n in range(10)
]


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        (("algorithm.name=dpo",), False),
        (("algorithm.name=dpo", "evaluate=none"), False),
        (("algorithm.name=sft",), True),
        (("algorithm.name=sft", "evaluate=none"), False),
        (("algorithm.name=sft", "task.held_out=0"), False),
        (("algorithm.name=grpo", "evaluate=none"), True),
    ],
)
def test_the_length_of_answers_matters_only_if_something_is_generated(
    folder: Path, settings: tuple[str, ...], is_refused: bool
) -> None:
    """DPO trains and evaluates on given answers: none of 256 tokens is ever sampled in a context of 32."""
    write_rows(folder, PAIRS)
    try:
        found = problems(folder, "rollout.max_tokens=256", *settings)
    except ConfigError as error:
        found = str(error)
    assert ("rollout.max_tokens is 256" in found) is is_refused, found
    assert is_refused or not found


def test_answers_that_no_reward_scores_are_not_generated(folder: Path) -> None:
    write_rows(folder, PAIRS)
    with_reward, without = (
        RecipeFacts(resolved=loaded(folder, "algorithm.name=sft", *more))
        for more in ((), ("reward.function=none",))
    )
    assert with_reward.generates and not without.generates


def problems(folder: Path, *overrides: str) -> str:
    return "\n".join(map(str, check(loaded(folder, *overrides)).problems))


def test_a_good_recipe_has_no_problem_and_every_topic(folder: Path) -> None:
    report = check(loaded(folder))
    assert report.problems == []
    titles = [*report.topics]
    assert titles == ["batch", "placement", "data", "model", "tokens", "reward", "run directory", "settings"]
    assert "policy: pool main, rank 0" in report.topics["placement"]
    assert not (folder / "runs").exists(), "a check writes nothing"


@pytest.mark.parametrize("offload", ["optimizer", "reference", "all"])
def test_what_lies_in_host_memory_is_said(folder: Path, offload: str) -> None:
    lines = said(check(loaded(folder, f"policy.offload={offload}", "algorithm.loss.kl=0.1")), "placement")
    assert ("  moments and masters in host memory" in lines) == (offload != "reference")
    assert ("  weights in host memory" in lines) == (offload != "optimizer")


def test_settings_that_were_given_are_shown_and_all_on_demand(folder: Path) -> None:
    chosen = loaded(folder, "policy.lr=1e-4")
    lines = said(check(chosen), "settings").splitlines()
    assert "policy.lr = 0.0001  (--set)" in lines
    assert "algorithm.steps = 3  (run.toml)" in lines
    assert not any("(default)" in line for line in lines)
    every = said(check(chosen, every_setting=True), "settings").splitlines()
    assert "policy.beta1 = 0.9  (default)" in every
    assert lines[-1] == f"and {len(every) - len(lines) + 1} more have their defaults; --all shows them"


def test_keys_with_dots_are_shown(folder: Path) -> None:
    chosen = loaded(folder, "reward.function=none", 'reward.functions={ "rewards.py:exact" = 0.5 }')
    assert "reward.functions.rewards.py:exact = 0.5  (--set)" in setting_lines(chosen)


@pytest.mark.parametrize(
    ("dotted", "unread", "read"),
    [
        ("task.digits", "task.source=prompts.jsonl", "task.source=arithmetic"),
        ("task.size", "task.source=prompts.jsonl", "task.source=arithmetic"),
        ("algorithm.loss.constant", "algorithm.loss.kl=0.1", "algorithm.loss.aggregation=constant"),
        ("algorithm.loss.kl_in", "algorithm.loss.kl=0.0", "algorithm.loss.kl=0.1"),
        ("algorithm.old_logprobs", "algorithm.minibatches=1", "algorithm.minibatches=2"),
        ("policy.final_lr", "policy.schedule=constant", "policy.schedule=linear"),
    ],
)
def test_a_setting_that_nothing_reads_is_not_shown(folder: Path, dotted: str, unread: str, read: str) -> None:
    def shows(*overrides: str) -> list[str]:
        return [line for line in setting_lines(loaded(folder, *overrides)) if line.startswith(f"{dotted} ")]

    assert shows(unread) == []
    assert len(shows(read)) == 1
    default = shows(read)[0].split(" = ")[1].split("  ")[0]
    assert shows(unread, f"{dotted}={default}") == [f"{dotted} = {default}  (--set, and nothing reads it)"]


def test_a_reference_within_the_policy_has_no_weights_to_put_away(folder: Path) -> None:
    settings = ("policy.model.new=none", "policy.model.path=base", "policy.offload=reference")
    for more, is_read in (("run.seed=1", True), ("policy.model.adapter={ rank = 2 }", False)):
        recipe = loaded(folder, *settings, "algorithm.loss.kl=0.1", more)
        assert ("policy.offload" not in unread_settings(recipe)) is is_read
        assert any("in host memory" in line for line in placement_lines(recipe)) is is_read


@pytest.mark.parametrize(("ranks", "freshness"), [(1, 0), (2, 1)])
def test_a_sampler_on_its_own_ranks_is_listed(folder: Path, ranks: int, freshness: int) -> None:
    settings = [
        f"placement.pools={{ main = 1, answers = {ranks} }}",
        'placement.roles={ sampler = "answers" }',
        f'schedule={{mode="ahead",freshness={freshness}}}',
    ]
    lines = placement_lines(load_recipe(folder / "run.toml", settings))
    (line,) = (line for line in lines if "pool answers" in line)
    assert ("rank 0 to 1" in line) is (ranks == 2) and "tp 1" in line
    assert line.endswith(f"used {freshness} steps later") is bool(freshness)


def test_data_are_counted(folder: Path) -> None:
    text = said(check(loaded(folder)), "data")
    assert "prompts.jsonl: 8 prompts to train on, 2 held out" in text
    assert "12 prompts: 1.5 passes" in text
    assert "evaluated on 2 prompts" in text


def test_the_reward_is_called_on_two_rows(folder: Path) -> None:
    text = said(check(loaded(folder)), "reward")
    assert text.startswith("reward.py:exact")
    assert text.count(": 1") == 2, "each row is answered with its own answer"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("[1 / 0, 1 / 0]", "ZeroDivisionError: division by zero (own.py, line 1, in reward"),
        ("[float('nan')] * 2", "failed on 2 of the 2 rows it was tried on: the score is nan"),
        ("__import__('time').sleep(1000)", "gave no answer within 0."),
        ("__import__('os')._exit(0)", "exited with status 0"),
        ("[1.0]", "returned 1 scores for 2 rows"),
        ("[answers]", "NameError: name 'answers' is not defined"),
    ],
)
def test_a_reward_that_fails_on_both_rows_is_a_problem(folder: Path, body: str, told: str) -> None:
    (folder / "own.py").write_text(f"def reward(completions, **_): return {body}\n")
    limit = f"reward.timeout_s={0.2 if 'sleep' in body else 30}"
    assert told in problems(folder, "reward.function=own.py:reward", limit)


def test_a_reward_that_fails_on_one_row_or_gives_no_score_is_noted(folder: Path) -> None:
    own = ("reward.function=own.py:reward",)
    (folder / "own.py").write_text("def reward(completions, **_): return [1.0, float('nan')]\n")
    report = check(loaded(folder, *own))
    assert report.problems == []
    assert any("failed on one of the rows it was tried on: the score is nan" in note for note in report.notes)
    (folder / "own.py").write_text("def reward(completions, **_): return [None, None]\n")
    assert any("returned no score (None) for every row" in note for note in check(loaded(folder, *own)).notes)


def test_the_model_is_measured(folder: Path) -> None:
    text = said(check(loaded(folder)), "model")
    assert "a new qwen2" in text
    assert "context 32 tokens" in text
    assert "KV cache" in text


HARMLESS = (
    'reward.py:exact cannot run text or start processes; reward.sandbox = "auto"; runs without a sandbox; '
    "reward.sandbox = true shuts it in"
)


def test_notes_say_what_might_not_be_expected(folder: Path) -> None:
    notes = check(loaded(folder, "algorithm.prompts_per_step=9", "task.held_out=0")).notes
    assert [note for note in notes if note != HARMLESS] == [
        "nothing is held out, so nothing will be evaluated"
    ]
    notes = check(loaded(folder, "algorithm.prompts_per_step=9")).notes
    assert any("draws 9 prompts and the task has 8" in note for note in notes)
    assert any("evaluate.problems is 500, but only 2" in note for note in notes)
    cores = int(usable_cores())
    notes = check(loaded(folder, f"run.threads={cores + 1}")).notes
    assert any(f"run.threads is {cores + 1} and there are {cores}" in note for note in notes)
    assert not any("threads" in note for note in check(loaded(folder, f"run.threads={cores}")).notes)


def test_an_evaluation_may_be_taken_away(folder: Path) -> None:
    report = check(loaded(folder, "evaluate=none"))
    assert "never evaluated" in said(report, "data")
    assert (report.problems, report.notes) == ([], [HARMLESS])


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("task.source=prompt.jsonl", "prompt.jsonl"),
        ("task.held_out=10", "task.held_out is 10"),
        ("reward.function=reward.py:exakt", "no function 'exakt'"),
        ("reward.function=rewards.py:exact", "rewards.py"),
        ("reward.function=none", "reward.function is missing"),
        ("reward.function=reward.py:broken", "no idea"),
        ("rollout.cache_gib=1e-6", "the KV cache of one row of"),
        ("rollout.max_tokens=30", "8 of 8 prompts to train on do not fit into 32 tokens"),
        ("algorithm.prompts_per_step=801", "one step would draw every prompt 100 times"),
        ("run.device=cuda:64", "there is no device 'cuda:64'"),
        ("run.dir=run.toml", "run.toml exists and is not a run directory"),
    ],
)
def test_what_would_stop_a_run_is_a_problem(folder: Path, override: str, what: str) -> None:
    assert what in problems(folder, override)


@pytest.mark.parametrize("path", ["./models/qwen", "../nowhere", "/no/such/model", "a/b/c", "no model"])
def test_a_missing_model_says_where_it_was_looked_for(folder: Path, path: str) -> None:
    text = problems(folder, "policy.model.new=none", f"policy.model.path={path}")
    assert f"the model {path!r} is not there" in text
    assert str((folder / path).resolve()) in text


def test_a_file_is_no_model(folder: Path) -> None:
    text = problems(folder, "policy.model.new=none", "policy.model.path=reward.py")
    assert "'reward.py' is a file" in text


def test_a_model_may_lie_beside_the_recipe(folder: Path) -> None:
    (folder.parent / "beside").mkdir()
    text = problems(folder, "policy.model.new=none", "policy.model.path=../beside")
    assert "has no config.json" in text


def test_a_path_of_the_working_directory_is_recognised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = folder / "elsewhere"
    (elsewhere / "deep/model").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    text = problems(folder, "policy.model.new=none", "policy.model.path=deep/model")
    assert f"use {elsewhere / 'deep/model'}" in text


def test_a_directory_that_is_no_model_is_refused(folder: Path) -> None:
    (folder / "model").mkdir()
    assert "has no config.json" in problems(folder, "policy.model.new=none", "policy.model.path=model")


def test_rows_without_an_answer_cannot_be_imitated(folder: Path) -> None:
    write_rows(folder, [{"prompt": f"say {n}"} for n in range(10)])
    text = problems(folder, "warm_start.steps=1", "reward.function=reward.py:broken")
    assert "8 of 8 rows to train on cannot be used" in text and "has no answer to learn from" in text


def test_all_problems_are_found_at_once(folder: Path) -> None:
    overrides = (
        "policy.model.new=none",
        "policy.model.path=./x",
        "reward.function=y.py:z",
        "task.source=w.jsonl",
    )
    assert len(check(loaded(folder, *overrides)).problems) == 3


def test_a_run_looks_at_the_same_before_it_leaves_anything(folder: Path) -> None:
    bad = loaded(folder, "policy.model.new=none", "policy.model.path=./x", "reward.function=y.py:z")
    with pytest.raises(ConfigError, match="2 problems"):
        launch(bad, quiet=True)
    said: list[str] = []

    def facts(*settings: str) -> RecipeFacts:
        return RecipeFacts(resolved=loaded(folder, *settings), say=said.append)

    with pytest.raises(ConfigError, match="2 problems"):
        require_sound(facts("reward.function=none", "rollout.max_tokens=30"))
    with pytest.raises(DataError, match=r"prompt\.jsonl"):
        require_sound(facts("task.source=prompt.jsonl"))
    assert not (folder / "runs").exists()
    sound = facts()
    notes = require_sound(sound)
    assert sound.encoded is not None and len(sound.encoded.train[PROMPTS]) == 8
    assert any("only 2 rows are held out" in note for note in notes)
    assert said == [], "so few rows are encoded at once"


def test_a_run_under_other_settings_is_a_problem_once_it_made_a_step(folder: Path) -> None:
    recipe = loaded(folder)
    task = open_task(recipe.recipe.task, PROMPTS, base=folder, seed=0)
    with RunDirectory.open(folder / "runs" / "a", run_config(recipe, task)) as run:
        same = ("run.dir=runs/a", "run.threads=1")
        assert problems(folder, *same, "algorithm.prompts_per_step=2") == ""
        run.log_metrics(1, "grpo", {})
        keep_data(task, run.path)
    assert problems(folder, *same) == ""
    assert "prompts_per_step: 4 -> 2" in problems(folder, *same, "algorithm.prompts_per_step=2")
    write_rows(folder, [{"prompt": f"{n}+2=", "answer": str(n + 2)} for n in range(10)])
    assert 'prompts.jsonl line 1 ("0+2=") differs from the row that' in problems(folder, *same)


def test_what_a_resume_would_change_is_said_and_what_cannot_be_is_refused(folder: Path) -> None:
    recipe = loaded(folder)
    task = open_task(recipe.recipe.task, PROMPTS, base=folder, seed=0)
    with RunDirectory.open(folder / "runs" / "a", run_config(recipe, task)) as run:
        (run.checkpoints / "step-000002").mkdir(parents=True)
        run.write_json("finished.json", {"steps": 3})
    (folder / "reward.py").write_text(REWARD + "\n")
    report = check(loaded(folder, "run.dir=runs/a", "algorithm.steps=9", "policy.lr=0.1"))
    text = said(report, "run directory")
    assert "a resume changes, from step 3 on, algorithm.steps: 3 -> 9" in text
    assert "a resume changes, from step 3 on, policy.lr: 1e-05 -> 0.1" in text
    assert "a resume changes, from step 3 on, sources.reward: " in text
    assert "algorithm.steps is 1, 1 with all phases" in problems(
        folder, "run.dir=runs/a", "algorithm.steps=1"
    )
    (folder / "reward.py").write_text(REWARD)
    assert "the run has not kept it" in problems(folder, "run.dir=runs/a", "algorithm.loss.kl=0.1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), "at most 5 minutes (run.checkpoint_minutes) of work, and the step in progress"),
        (("run.checkpoint_every=7",), "5 minutes (run.checkpoint_minutes) or 7 steps (run.checkpoint_every)"),
        (("run.checkpoint_minutes=0",), "costs all steps of the phase"),
    ],
)
def test_what_a_kill_costs_is_said(folder: Path, settings: tuple[str, ...], words: str) -> None:
    assert words in said(check(loaded(folder, *settings)), "run directory")


def test_the_state_of_a_run_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_state(run).endswith("new")
    run.mkdir()
    assert run_state(run).endswith("new")
    (run / "notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        run_state(run)
    (run / "run.lock").touch()
    assert "has no checkpoint" in run_state(run)
    for step in (3, 12):
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    assert "resumes after step 12" in run_state(run)
    (run / "finished.json").write_text("{}")
    assert "finished" in run_state(run)


def test_a_small_file_needs_no_number_of_held_out_rows_and_keeps_it_with_the_run(folder: Path) -> None:
    (folder / "run.toml").write_text(RECIPE.replace("held_out = 2\n", ""))
    report = check(loaded(folder))
    assert not report.problems
    assert "9 prompts to train on, 1 held out (task.held_out is left out: a tenth of the rows" in said(
        report, "data"
    )
    facts = RecipeFacts(resolved=loaded(folder))
    kept = run_config(facts.resolved, facts.task)
    assert kept["task"]["held_out"] == 1, "a later command draws the same row, with a number that is set"


def test_a_chat_prompt_is_shown_by_its_question(folder: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "prompt": [{"role": "system", "content": "s" * 80}, {"role": "user", "content": f"{n}+1?"}],
            "answer": "2",
        }
        for n in range(10)
    ]
    write_rows(folder, rows)
    lines = said(check(loaded(folder)), "reward")
    assert '+1?" answered with' in lines and "role" not in lines


def test_a_key_of_another_algorithm_is_to_be_removed(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, "algorithm.name=sft", "algorithm.samples_per_prompt=4")
    assert "remove 'samples_per_prompt': another choice of [algorithm] has it" in str(caught.value)
    with pytest.raises(ConfigError, match=r"--set reward\.function=\.\.\."):
        loaded(folder, "reward=none")

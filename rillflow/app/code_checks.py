"""Code checks: call the code that a recipe names, as a run does.

what writes the rows ─ its own check (row_writers.py)
reward, cost, judge ── called on two rows, in a child that can be killed
all of them ────────── notes on text that they run, and the sandbox level
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rillflow.app.check_report import Report
from rillflow.app.facts import RecipeFacts
from rillflow.app.row_writers import row_columns
from rillflow.config.problems import shown
from rillflow.errors import RewardError
from rillflow.isolation.sandbox import SENTENCES, Level
from rillflow.rewards.function import FunctionPath, Text
from rillflow.rewards.harmless_source import Doubt
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.text_execution import Setting, TextUse, decide
from rillflow.rewards.workers import RewardWorkers
from rillflow.rollout.config import NATIVE
from rillflow.tasks.example import Example, answer_text

_TRIED = 2
_PLACES = 3
_JOINT = re.compile(r"Popen|ctypes|multiprocessing|create_subprocess|ProcessPool|fork|spawn|_posixsubprocess")


def say_left_out(facts: RecipeFacts, report: Report) -> None:
    """Report the code that the recipe would run; files are parsed, not imported."""
    rollout = facts.recipe.rollout
    named = {
        "rollout.engine": rollout.engine if facts.resolved.has_policy and rollout.engine != NATIVE else None,
        "rollout.server": rollout.server,
        "reward": ", ".join(map(str, facts.functions)),
        "cost": ", ".join(map(str, facts.costs)),
        **{key: writer.code.named for key, writer in facts.resolved.writers.items()},
    }
    lines = [f"{setting}: {what}" for setting, what in named.items() if what]
    report.say("not run (--no-code)", lines or ["the recipe names no code"])


def read_functions(facts: RecipeFacts, report: Report) -> None:
    """Read the sources of rewards and costs where no code of the recipe may run."""
    setting = facts.recipe.reward.sandbox
    for function in [*facts.named_functions, *facts.costs]:
        report.notes += execution_notes(function, "reward.sandbox", setting, level=None, is_reward=True)


def execution_notes(
    function: FunctionPath, name: str, setting: Setting, level: Level | None, *, is_reward: bool = False
) -> list[str]:
    """Return notes that name the sandbox decision for a function, and its reason.

    Args:
        function: the function; one that calls a server has no sandbox and no note.
        name: name of the setting.
        setting: its value.
        level: the level that this machine provides; None: not tried.
        is_reward: whether it is a reward, which ``auto`` shuts in unless it is known to be harmless.
    """
    if function.address:
        return []
    decision = decide(function, setting, unless_harmless=is_reward)
    if decision.uses:
        why = f"runs text or starts processes ({_places(decision.uses)})"
    elif decision.doubts:
        why = f"is not known to be harmless ({_places(decision.doubts)})"
    else:
        why = "cannot run text or start processes"
    if decision.is_shut_in:
        held = "in a sandbox" if level is None else f"{level}: {SENTENCES[level]}"
    elif decision.uses or (decision.doubts and is_reward):
        held = f"{Level.NONE}: {SENTENCES[Level.NONE]}"
    else:
        held = f"runs without a sandbox; {name} = true shuts it in"
    scope = ""
    if is_reward and decision.is_shut_in:
        scope = "; called with one row at a time, so it cannot compare answers"
        scope += "; without network, GPU and files but reward.files"
        scope += f" ({name} = false: no sandbox)" if setting == "auto" else ""
    said = [f"{function} {why}; {name} = {shown(setting)}{scope}; {held}"]
    joint = [use for use in decision.uses if _JOINT.search(use.call)]
    if is_reward and decision.is_shut_in and joint:
        said.append(
            f"{function} may start programs at the same time or from C ({_places(joint)}): such programs can "
            "change each other's files; run a checker only after the answer's program has ended"
        )
    if setting is True and any(use.is_in_process for use in decision.uses):
        said.append(
            f"{function} runs text in its own process: an answer can overwrite the result of its own row"
        )
    return said


def _places(places: Sequence[TextUse] | Sequence[Doubt]) -> str:
    return ", ".join(map(str, places[:_PLACES])) + (", ..." if len(places) > _PLACES else "")


def look_at_functions(facts: RecipeFacts, report: Report) -> None:
    """Call each reward function on two rows and their own answers, in a child process as in a run."""
    _try_functions(facts.named_functions, facts, report)
    judge = facts.judge
    if judge is not None and facts.resolved.has_policy:
        row = next(iter(facts.task.train))
        _try_function(judge, facts, report, [row] * _TRIED)


def look_at_costs(facts: RecipeFacts, report: Report) -> None:
    _try_functions(facts.costs, facts, report)


def _try_functions(functions: Sequence[FunctionPath], facts: RecipeFacts, report: Report) -> None:
    if not facts.resolved.has_policy:
        return
    rows = facts.task.train
    answered = [row for row in rows if row.completion is not None]
    for function in functions:
        _try_function(function, facts, report, (answered or rows)[:_TRIED])


def _try_function(
    function: FunctionPath, facts: RecipeFacts, report: Report, rows: Sequence[Example]
) -> None:
    recipe, answers = facts.recipe, [answer_text(row.completion or "") for row in rows]
    scores, level = _tried(function, facts, rows, answers)
    report.notes += execution_notes(function, "reward.sandbox", recipe.reward.sandbox, level, is_reward=True)
    report.say("reward", [f"{function}", *map(_scored, rows, answers, scores)])
    failed = [score for score in scores if score.outcome in (Outcome.TIMEOUT, Outcome.ERROR)]
    mend = "start or fix the server" if function.address else f"fix {function.file}"
    if level.is_sandbox:
        mend += (
            "; it ran in a sandbox: list files that it reads in reward.files, or set reward.sandbox = false "
        )
        mend += "if it needs a network or a GPU and runs no text of an answer"
    for writer in facts.resolved.writers.values() if failed else ():
        if (note := writer.trial_note(failed[0].message)) is not None:
            report.notes.append(f"{function} {note}")
            return
    if len(failed) > recipe.reward.max_failures * len(scores):
        raise RewardError(
            f"{function} failed on {len(failed)} of the {len(scores)} rows it was tried on: "
            f"{failed[0].message}",
            why="a run stops if more than "
            f"reward.max_failures = {recipe.reward.max_failures:g} of the rows fail",
            fix=f"{mend}; if {recipe.reward.timeout_s:g} s are too few, raise reward.timeout_s",
        )
    if failed:
        report.notes.append(f"{function} failed on one of the rows it was tried on: {failed[0].message}")
    if all(score.outcome is Outcome.ABSTAIN for score in scores):
        report.notes.append(f"{function} returned no score (None) for every row it was tried on")


def _tried(
    function: FunctionPath, facts: RecipeFacts, rows: Sequence[Example], answers: list[str]
) -> tuple[list[Score], Level]:
    prompts: list[Text] = [row.prompt if isinstance(row.prompt, str) else list(row.prompt) for row in rows]
    replies: list[Text] = [
        answer if isinstance(row.prompt, str) else [{"role": "assistant", "content": answer}]
        for row, answer in zip(rows, answers, strict=True)
    ]
    names = sorted(set[str]().union(*(row.columns for row in rows)))
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    columns |= {name: [each.example] * len(rows) for name, each in row_columns().items()}
    for writer in facts.resolved.writers.values():
        written = [writer.columns(answer) for answer in answers]
        columns |= {name: [row[name] for row in written] for name in written[0]}
    with RewardWorkers(function, facts.recipe.reward.model_copy(update={"workers": 1})) as workers:
        scores = workers.score(prompts, replies, columns)
        return scores, workers.level


def _scored(row: Example, answer: str, score: Score) -> str:
    value = f"{score.value:g}" if score.value is not None else score.outcome
    return f"{shown(row.question)} answered with {shown(answer)}: {value}"

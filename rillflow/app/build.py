"""Build: make roles and phases from a recipe, then run them; the heavy half of a launch.

    recipe ─> backend, pools ─> roles ─ executor ─ flow ┐
         task ─> streams, held-out rows ───────────────┴─> phase ─ loop ─> the next phase

Trained models and scorers live as long as the run; a phase is built when its turn comes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from typing import Any

from rillflow.app.encoding import encode_task
from rillflow.app.evaluate import judged
from rillflow.app.facts import RecipeFacts
from rillflow.app.phases import PhasePlan
from rillflow.app.plugins import installed, service
from rillflow.app.resume import keeps_decisions
from rillflow.app.reward_needs import compares
from rillflow.app.role_table import EVAL_REWARD
from rillflow.app.roles import RoleGroups, pools_of
from rillflow.config.problems import together
from rillflow.controller.cadence import Cadence
from rillflow.controller.checkpoint import Checkpoint
from rillflow.controller.decisions import RecordedDecisions
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flow import Flow
from rillflow.controller.interrupt import Interruption
from rillflow.controller.loop import Loop
from rillflow.controller.open_step import Phase
from rillflow.controller.schedules.phase_parts import DecisionHistory, PhaseParts
from rillflow.controller.source import DataStream, GroupSampling, Source
from rillflow.controller.step_executor import StepCalls, StepExecutor
from rillflow.errors import ConfigError
from rillflow.models.language_model import choose_device
from rillflow.records.batch import Batch
from rillflow.records.metrics import Mean
from rillflow.records.row import HELD_OUT_EPOCH
from rillflow.rollout.config import SamplingConfig
from rillflow.runs import layout
from rillflow.runs.progress import Progress
from rillflow.runs.reader import Evaluation
from rillflow.runs.run_directory import RunDirectory
from rillflow.tasks.encoded import Encoded
from rillflow.tasks.kinds import PROMPTS, DataKind
from rillflow.tasks.prompts import PromptStream, StreamPosition
from rillflow.workers.config import SAMPLER
from rillflow.workers.fork_server import ForkServer
from rillflow.workers.start import start_backend

POSITION = frozenset(each.name for each in fields(StreamPosition))
"""Keys of a position in the data that are the stream's own; a source adds others."""
BESIDE_SEED = 2**32
"""Shift of the seed for a step's second batch, so that its order differs; larger than every run's seed."""


class Build:
    """Builder and runner of a recipe.

    Args:
        facts: the recipe, its rows, models and functions.
        run: the run directory that records everything.
        checkpoint: the checkpoint to resume from; None to start from the beginning.
        stack: closes every rank when the run ends, with or without an error.
        repeat: decisions that ready-first phases repeat.
        forks: see ``ProcessBackend``.
    """

    def __init__(
        self,
        facts: RecipeFacts,
        run: RunDirectory,
        checkpoint: Checkpoint | None,
        stack: ExitStack,
        repeat: RecordedDecisions | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        self._repeat = repeat
        self._say: Callable[[str], None] = lambda _: None
        recipe, self._task, self._run, self._checkpoint = facts.recipe, facts.task, run, checkpoint
        self._recipe, self._resolved = recipe, facts.resolved
        placement, device = recipe.placement, recipe.run.device
        pools = pools_of(facts.resolved)
        backend = start_backend(
            placement,
            pools,
            str(choose_device(device)) if placement.is_inline else device,
            facts.given.backend,
            forks,
        )
        stack.callback(backend.close)
        self.devices = backend.devices
        """Device that each pool's ranks compute on, by pool name."""
        self.nodes = backend.nodes
        """Node of every rank; empty if all ranks are on this machine."""
        compare = service("nodes", "a run on several machines") if backend.nodes else None
        self.notes: list[str] = [] if compare is None else compare(facts, run.path, backend)
        """Differences between the nodes of the ranks and this machine."""
        self._roles = RoleGroups(facts, run.path, checkpoint, backend)
        model_input, encoded = self._roles.model_input, facts.encoded
        if encoded is None or not encoded.model_input.reads_as(model_input):
            encoded = encode_task(facts.resolved, self._task, model_input)
        if encoded.problems:
            raise together(encoded.problems, f"the task {self._task.name}")
        self.encoded = encoded
        """The task's rows as tokens."""
        if not (run.path / layout.TOKENS).exists():
            tokenizer = model_input.tokenizer
            run.write_json(layout.TOKENS, {"texts": tokenizer.pieces(range(tokenizer.vocabulary_size))})
        self._roles.start_scorers(facts.functions, facts.costs, facts.judge)

    def train(self, progress: Progress, interruption: Interruption) -> None:
        """Run the remaining steps of every phase."""
        recipe, plans = self._recipe, self._resolved.phases
        self._say = progress.note
        cadence = Cadence(
            evaluate_every=recipe.evaluate.every,
            checkpoint_every=recipe.run.checkpoint_every,
            checkpoint_s=recipe.run.checkpoint_minutes * 60,
            keep_checkpoints=recipe.run.keep_checkpoints,
            max_skipped=recipe.run.max_skipped,
            rollouts_every=recipe.run.rollouts_every,
            rollouts_share=recipe.run.rollouts_share,
            patience=recipe.evaluate.patience,
            last_set=next(iter(self._sets()), ""),
        )
        total = plans[-1].first + plans[-1].config.steps
        evaluate, deadline_s = self._evaluator(plans[-1]), recipe.placement.deadline_s
        clock = self._roles.executor.backend.now
        loop = Loop(self._run, progress, cadence, evaluate, interruption, total, deadline_s, clock)
        state = self._checkpoint.state if self._checkpoint else {"phase": 0, "done": 0, "version": 0}
        index, loop.version = state["phase"], state["version"]
        if state["done"] == plans[index].config.steps and index + 1 < len(plans):
            index, state = index + 1, {"done": 0}
        gc.freeze()  # a collection in a step would scan all objects that imports created
        try:
            for number in range(index, len(plans)):
                resumed = state if number == index and state["done"] else None
                phase = self._phase(plans[number], number, resumed)
                loop.run_phase(phase, resumed["done"] if resumed else 0)
        finally:
            gc.unfreeze()

    def evaluate(self) -> Sequence[Evaluation]:
        """Evaluate the last phase's model on held-out rows before any step; empty if nothing can score."""
        plans = self._resolved.phases
        phase, evaluate = self._phase(plans[-1], len(plans) - 1, None), self._evaluator(plans[-1])
        return () if evaluate is None else evaluate(phase.executor)

    def _phase(self, plan: PhasePlan, index: int, resumed: Mapping[str, Any] | None) -> Phase:
        executor, kept = self._roles.executor, self._checkpoint if resumed is not None else None
        trained = self._roles.begin(plan, kept)
        place = dict(resumed["stream"]) if resumed else {}
        files = kept.collected if kept is not None else {}
        rows = {name: executor.loaded(file.absolute()) for name, file in files.items()}
        source = self._source(plan, place, kept)
        calls = self._calls(trained)
        executor = StepExecutor(executor, source, calls)
        return Phase(
            name=plan.name,
            index=index,
            first=plan.first,
            steps=plan.config.steps,
            rows=plan.config.prompts_per_step,
            step=plan.algorithm.step,
            config=plan.config,
            trained=trained,
            moving=self._roles.moving(plan),
            flow=Flow(executor, resumed["numbers"] if resumed else None, rows, self._recipe.run.seed),
            executor=executor,
            source=source,
            calls=calls,
            beside=self._beside(plan, resumed),
            evaluated=plan.evaluated,
            freshness=plan.schedule.lag,
        )

    def _calls(self, trained: Sequence[str]) -> StepCalls:
        """Return what submits the calls of a phase's steps: a plugin's object, or one for single calls."""
        makers = [each.calls for each in installed().values() if each.calls is not None]
        made = [calls for make in makers if (calls := make(self._resolved, trained, self._say)) is not None]
        if len(made) > 1:
            raise ConfigError(
                f"{' and '.join(type(each).__name__ for each in made)} both submit the calls of a step",
                why="each call is submitted once, and the recipe has settings of both plugins",
                fix="change the settings of one",
            )
        return made[0] if made else StepCalls()

    def _source(self, plan: PhasePlan, place: Mapping[str, Any], kept: Checkpoint | None) -> Source:
        """Return the source of a phase's prompts and rows, from a position in the data on."""
        own = {name: value for name, value in place.items() if name not in POSITION}
        stream = self._stream(plan.algorithm.data, {name: place[name] for name in place if name in POSITION})
        roles = self._roles
        parts = PhaseParts(
            phase=plan.config,
            rollout=self._recipe.rollout,
            calls=plan.heard.calls,
            executor=roles.executor,
            stream=stream,
            position=own,
            sync=roles.delivery if plan.evaluated else None,
            kept=kept,
            history=self._history(),
            changing=(*roles.trained(plan), *roles.moving(plan)),
            restarts=self._recipe.run.restarts,
            restart=lambda pool: roles.restart if roles.may_restart(pool) else None,
            copies=self._copies,
            sampling=partial(self._sampling, plan, kept),
            rows=partial(self._rows, plan),
            say=self._say,
        )
        return plan.schedule.source(parts)

    def _sampling(self, plan: PhasePlan, kept: Checkpoint | None) -> GroupSampling:
        """Return the sampling settings of a phase whose groups are sampled before its steps request them."""
        asked, done = plan.answers, kept.state["done"] if kept is not None else 0
        assert asked is not None  # was checked
        return GroupSampling(
            groups=(plan.config.steps - done) * plan.config.prompts_per_step,
            samples=asked.get("samples", 1),
            sampling=asked.get("sampling"),
            replicas=self._roles.executor.groups[SAMPLER].mesh.groups("tp"),
            deadline_s=self._recipe.placement.deadline_s,
            restarts=self._recipe.run.restarts,
            restart=self._roles.restart_sampler if self._roles.may_restart_sampler else None,
            may_save=self._resolved.writer is None,
            say=self._say,
        )

    def _history(self) -> DecisionHistory:
        """Return the decisions of the run, or of the run that it repeats."""
        changed = sorted({each.key for each in self._run.changes if not keeps_decisions(each.key)})
        blocked = f"changed: {', '.join(changed)}" if changed else ""
        return DecisionHistory(path=self._run.path, log=self._run, repeat=self._repeat, blocked=blocked)

    def _copies(self) -> dict[str, int]:
        """Return the ranks of one copy of each role's model, by role, without roles that need all ranks."""
        recipe, specs = self._recipe, self._resolved.roles
        sizes = {role: recipe.placement.mesh_of(role) for role in self._roles.executor.groups}
        # The weights of a sharded policy are the sampler's or the trainer's on all ranks at once.
        switched = {"policy", *(("reference",) if recipe.policy.model.adapter is not None else ())}
        found = {}
        for role, mesh in sizes.items():
            if not specs[role].is_model or mesh.is_plain:
                found[role] = 1
            elif not mesh.is_sharded and role not in switched:
                found[role] = mesh.replica
        return found

    def _rows(self, plan: PhasePlan, groups: Sequence[Sequence[int]]) -> Batch | None:
        """Return the rows of some groups (epoch, prompt) that the phase has drawn; None if there are none."""
        data, columns = plan.algorithm.data, plan.config.columns
        rows = {row.example.index: row for row in self.encoded.train[data] if row is not None}
        there = [(epoch, prompt) for epoch, prompt in groups if prompt in rows]
        drawn = [rows[prompt] for _, prompt in there]
        return data.batch(drawn, [epoch for epoch, _ in there], columns) if there else None

    def _beside(self, plan: PhasePlan, resumed: Mapping[str, Any] | None) -> DataStream | None:
        """Return the stream of the step's second batch; None if the algorithm has none."""
        data = plan.algorithm.beside(plan.config)
        if data is None:
            return None
        return self._stream(data, resumed["beside"] if resumed else None, shift=BESIDE_SEED)

    def _stream(self, data: DataKind, saved: Mapping[str, int] | None, shift: int = 0) -> DataStream:
        """Return the training rows in epoch order from the saved position on; ``shift`` changes the order."""
        position, left_out = StreamPosition(**(saved or {})), self.encoded.left_out[data]
        there = [row if row and data.is_used(row.example) else None for row in self.encoded.train[data]]
        rows = PromptStream(there, seed=self._recipe.run.seed + shift, position=position)
        columns = self._recipe.algorithm.columns if data is self._recipe.chosen.data else ()

        def take(count: int) -> Batch:
            drawn = rows.take(count)
            taken = data.arranged([draw.row for draw in drawn], self.encoded.model_input.context)
            return data.batch(taken, [draw.epoch for draw in drawn], columns)

        share = Mean(total=float(left_out), count=float(len(self._task.train)))
        return DataStream(
            take=take, state=rows.state, metrics={"data/left_out/share": share} if left_out else {}
        )

    def _evaluator(self, plan: PhasePlan) -> Callable[[GroupExecutor], Sequence[Evaluation]] | None:
        """Return the evaluator of held-out rows and named sets; None without rows or without a scorer."""
        most, sets = self._recipe.evaluate.problems, self._sets()
        data: DataKind = PROMPTS
        scorers = [EVAL_REWARD] if compares(self._recipe.reward.judge) else [EVAL_REWARD, "reward"]
        there = [role for role in scorers if role in self._roles]
        evaluate = partial(self._evaluate_answers, there)
        if plan.algorithm.score is not None:
            data, evaluate = plan.algorithm.data, partial(self._evaluate_ranking, plan)
        elif not there:
            return None
        if not most or not sets:
            return None
        found = {name: data.batch(rows[:most], HELD_OUT_EPOCH) for name, rows in sets.items()}
        return lambda executor: [replace(evaluate(executor, rows), set=name) for name, rows in found.items()]

    def _sets(self) -> dict[str, Sequence[Encoded]]:
        """Return the sets to evaluate on that have rows: the held-out rows, named "", and the named sets."""
        sets = {"": self.encoded.held_out, **self.encoded.sets}
        return {name: rows for name, rows in sets.items() if rows}

    def _evaluate_ranking(self, plan: PhasePlan, executor: GroupExecutor, rows: Batch) -> Evaluation:
        """Evaluate an algorithm's own scores of held-out rows, as their kind of data says."""
        assert plan.algorithm.score is not None
        scores = plan.algorithm.score(Flow(executor), rows, plan.config)
        found = executor.apply(plan.algorithm.data.evaluated, scores, rows, place=scores.places[0])
        evaluation: Evaluation = found.read(self._recipe.placement.deadline_s)
        return evaluation

    def _evaluate_answers(
        self, scorers: Sequence[str], executor: GroupExecutor, prompts: Batch
    ) -> Evaluation:
        """Score the policy's answers by the first scorer; a second one is the model that it trains on."""
        recipe = self._recipe
        sampling = SamplingConfig(
            temperature=recipe.evaluate.temperature,
            max_tokens=recipe.rollout.max_tokens,
            stop=recipe.rollout.stop,
        )
        options = {"samples": recipe.evaluate.samples, "sampling": sampling}
        rollouts = executor.call("policy", "generate", [prompts], options)
        scores = [executor.call(each, "score", [rollouts], {}) for each in scorers]
        success = recipe.evaluate.success
        found = executor.apply(judged, rollouts, *scores, place=rollouts.places[0], success=success)
        evaluation: Evaluation = found.read(recipe.placement.deadline_s)
        return evaluation

"""Source: prompts in order; after the publish of every ``inner_steps``-th step, an exchange on the ranks.

    take(step) ─> rows ─> ... update ─> publish ─ exchange: weights of the newest version ─> sampler

The exchange comes after the publish and before the sampler receives the version, so its weights are sampled
under the step's own version, and a checkpoint of the step has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.schedules.phase_parts import PhaseParts
from rillflow.controller.source import OpenedStep, Source
from rillflow.graph.handle import Options
from rillflow.records.batch import Batch
from rillflow.records.metrics import Max, Mean, Metric
from rillflow.roles.policy import Policy
from rillflow.workers.group import Group
from rillflow.workers.pending import Pending
from rillflow_links.sides.exchange import ExchangeReport, ExchangeTurn, SideSettings, exchange, start
from rillflow_links.sides.schedule import Sides

TOKENS = "side_tokens"
"""Key of the tokens since the last contribution, in the saved position."""
SLACK_S = 3600.0
"""Longest time of an exchange besides its waits."""


class SideSource(Source):
    """Source of a side.

    Args:
        executor: see Source.
        how: arguments of Source.
        settings: settings for the ranks.
        inner_steps: steps between two contributions.
        tokens: tokens since the last contribution.
        is_new: whether the phase begins, and is not resumed.
        say: shows the user a line.
    """

    def __init__(
        self,
        executor: GroupExecutor,
        *,
        how: Mapping[str, Any],
        settings: SideSettings,
        inner_steps: int,
        tokens: int,
        is_new: bool,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(executor, **how)
        self._settings, self._inner_steps, self._say = settings, inner_steps, say
        self._step, self._tokens, self._is_new, self._is_resumed = 0, tokens, is_new, not is_new
        self._counts, self._exchanged = list[Pending](), dict[str, Metric]()
        self._wait_s = SLACK_S + settings.grace_s + settings.start_s

    @classmethod
    def of(cls, schedule: Sides, parts: PhaseParts) -> SideSource:
        """Return the source of a phase."""
        how: dict[str, Any] = {"stream": parts.stream, "sync": parts.sync}
        if parts.kept is not None:
            how["kept"] = parts.kept.sampled
        settings = SideSettings(
            store=schedule.store,
            name=schedule.name,
            folder=parts.history.path.absolute() / "sides",
            coding={"gradients": schedule.codec, "share": schedule.share},
            grace_s=schedule.grace_s,
            start_s=schedule.start_s,
        )
        return cls(
            parts.executor,
            how=how,
            settings=settings,
            inner_steps=schedule.inner_steps,
            tokens=int(parts.position.get(TOKENS, 0)),
            is_new=parts.kept is None,
            say=parts.say,
        )

    def begin(self, close: Callable[[], Sequence[Pending] | None], after: int) -> None:
        """See Source; the first step begins with the newest version."""
        super().begin(close, after)
        if self._is_new:
            begun = self._executor.on_all_ranks("policy", start, self._settings, after)
            report: ExchangeReport = begun.read(self._wait_s)
            if self._sync is not None:
                version = self._executor.on_first_rank("policy", version_now)
                self._sync(version).wait(self._wait_s)
                self._sync.moved()
            self._say(f"side {self._settings.name} begins with version {report.version}")

    def take(self, step: int, groups: int) -> Batch:
        """See Source."""
        self._step, data = step, super().take(step, groups)
        if "loss_mask" in data.fields:
            self._tokens += loss_tokens(data)
        return data

    def rows(self, group: Group, endpoint: str, args: Sequence[Any], options: Options) -> Pending | None:
        """See Source; the sampled rows' tokens are counted where the rows are."""
        made = super().rows(group, endpoint, args, options)
        if made is None and endpoint == "generate":
            made = group.call(endpoint, *args, **options)
        if made is not None and made.lie is not None:
            self._counts.append(self._executor.on_holders(loss_tokens, [[] for _ in made.holders], [made]))
        return made

    def publish(self, published: Pending) -> Pending:
        """See Source; an exchange that is due comes first."""
        is_boundary = self._step % self._inner_steps == 0
        if is_boundary or self._is_resumed:
            self._exchange(is_boundary)
        return super().publish(published)

    def opened(self) -> OpenedStep:
        """See Source."""
        opened = super().opened()
        measured, self._exchanged = {**opened.measured, **self._exchanged}, {}
        return OpenedStep(measured=measured, arriving=opened.arriving, parcels=opened.parcels)

    def position(self) -> Mapping[str, Any]:
        """See Source; waits for the rows of the step."""
        return {**super().position(), TOKENS: self._counted()}

    def _counted(self) -> int:
        """Return the tokens since the last contribution."""
        for each in self._counts:
            found = each.read(self._wait_s)
            self._tokens += sum(found) if isinstance(found, list) else found
        self._counts.clear()
        return self._tokens

    def _exchange(self, is_boundary: bool) -> None:
        turn = ExchangeTurn(
            step=self._step,
            tokens=self._counted(),
            is_boundary=is_boundary,
            is_resumed=self._is_resumed,
        )
        made = self._executor.on_all_ranks("policy", exchange, self._settings, turn)
        report: ExchangeReport = made.read(self._wait_s)
        self._is_resumed = False
        self._tokens -= report.uploaded_tokens
        self._exchanged = metrics_of(report)
        if report.problem:
            self._say(f"warning: the side trains on alone: {report.problem}")


def metrics_of(report: ExchangeReport) -> dict[str, Metric]:
    """Return the metrics of an exchange; docs/sides.md defines each."""
    found: dict[str, Metric] = {
        "links/sides/version/max": Max(value=report.version),
        "links/sides/behind/mean": Mean(total=report.behind, count=1),
        "links/sides/waited_s/mean": Mean(total=report.waited_s, count=1),
        "links/sides/failed/mean": Mean(total=float(bool(report.problem)), count=1),
    }
    if report.sent_bytes:
        found["links/sides/sent_bytes/mean"] = Mean(total=report.sent_bytes, count=1)
        found["links/sides/ratio/mean"] = Mean(total=report.own_bytes, count=report.sent_bytes)
    return found


def loss_tokens(rows: Batch) -> int:
    """Return the number of trained tokens of some rows."""
    return int(rows.ragged("loss_mask").values.sum())


def version_now(policy: Policy) -> int:
    """Return the policy's version."""
    return policy.version

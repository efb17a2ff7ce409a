"""RestartBudget: how often ranks may be replaced before the first cause of their losses ends the run.

lost ─> spend ─┬─ left: replace, and ``succeeded`` once the new process has done a call
               └─ used up: the first cause since the last success is raised
"""

from __future__ import annotations

from rillflow.workers.backend import Place, RankDied


class RestartBudget:
    """Counts the losses of every rank since it last succeeded.

    Args:
        most: replacements of one rank without a success in between; 0: none.

    Example:
        budget = RestartBudget(3)
        budget.spend(error)                      # raises when the rank is lost for the fourth time
        replacement = backend.replace([error.place])
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._causes: dict[Place, list[RankDied]] = {}

    def spend(self, cause: RankDied) -> None:
        """Count the loss of a rank that is to be replaced.

        Raises:
            RankDied: the first cause since the rank's last success, with the number of losses as a note; the
                budget is used up.
        """
        assert cause.place is not None, "a wait for a rank has named it"
        causes = self._causes.setdefault(cause.place, [])
        causes.append(cause)
        if len(causes) > self._most:
            causes[0].add_note(f"{cause.place} was lost {len(causes)} times; the last: {cause.what}")
            raise causes[0]

    def succeeded(self, place: Place) -> None:
        """Forget the losses of a rank whose new process has finished a call."""
        self._causes.pop(place, None)

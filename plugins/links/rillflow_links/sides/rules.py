"""Rules: which contributions the merger waits for, merges and refuses; pure, without a clock.

contributions ─ chosen ─┬─> merge: the newest of each side
                        └─> refused: too late, or superseded
sides ─ expected ─> is_due: a quorum is there, and the others are there too or had their time
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, order=True)
class Contribution:
    """What one side trained from one version on; sorted by side."""

    side: str
    """Name of the side."""
    base: int
    """Version that the side's weights are measured against."""
    step: int
    """Steps of the side's run."""
    tokens: int
    """Tokens that it trained since its last contribution."""
    name: str
    """Name of the file."""


@dataclass(frozen=True, kw_only=True)
class MergeRule:
    """When contributions are merged."""

    quorum: int = 1
    """Least number of sides in a merge."""
    grace_s: float = 30.0
    """Time that the other sides get once a quorum is there."""
    most_late: int = 3
    """Largest number of versions that a contribution's base may be behind the newest version."""

    def chosen(
        self, offers: Sequence[Contribution], newest: int
    ) -> tuple[list[Contribution], dict[str, str]]:
        """Return the contributions to merge, by side's name, and the reasons of the refused ones by file.

        Args:
            offers: contributions that no version has and that are not refused.
            newest: number of the newest version.
        """
        refused, latest = dict[str, str](), dict[str, Contribution]()
        for each in sorted(offers):
            late = newest - each.base
            if late > self.most_late:
                refused[each.name] = f"it is {late} versions late, and {self.most_late} are accepted"
                continue
            if each.side in latest:
                refused[latest[each.side].name] = f"{each.name} of the same side replaces it"
            latest[each.side] = each
        return [latest[side] for side in sorted(latest)], refused

    def is_due(self, ready: Collection[str], expected: Collection[str], waited_s: float) -> bool:
        """Return whether to merge now.

        Args:
            ready: sides with a contribution.
            expected: sides that are waited for.
            waited_s: time since the quorum was there.
        """
        return len(ready) >= self.quorum and (set(expected) <= set(ready) or waited_s >= self.grace_s)

    def expected(self, seen: Mapping[str, int], newest: int) -> set[str]:
        """Return the sides that are waited for: those that were in one of the last merges, or are new.

        Args:
            seen: newest version that a side contributed to, or started from.
            newest: number of the newest version.
        """
        return {side for side, version in seen.items() if newest - version <= self.most_late}

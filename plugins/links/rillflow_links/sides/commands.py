"""``rillflow merge-sides``: wait for contributions, merge them, or replay all merges."""

from __future__ import annotations

import argparse
import time
from functools import partial

from rillflow_links.sides.lease import MergerLease
from rillflow_links.sides.merger import Merger
from rillflow_links.sides.outer import OuterSettings
from rillflow_links.sides.replay import replay
from rillflow_links.sides.rules import MergeRule
from rillflow_links.sides.store import SideStore


def run_merger(arguments: argparse.Namespace) -> int:
    """Merge until ``--until`` is there or the process is stopped; with ``--replay``, check and end."""
    store, say = SideStore(arguments.store), partial(print, flush=True)
    if arguments.replay:
        return 0 if replay(store, say) else 1
    rule = MergeRule(quorum=arguments.quorum, grace_s=arguments.grace_s, most_late=arguments.most_late)
    outer = OuterSettings(lr=arguments.lr, momentum=arguments.momentum)
    lease = MergerLease(store, arguments.poll_s)
    lease.take()
    try:
        merger = Merger(store, rule, outer, say=say, beat=lease.beat, confirm=lease.confirm)
        say(f"merges in {store.url}; the newest version is {merger.newest}")
        while arguments.until is None or merger.newest < arguments.until:
            lease.beat()
            if not merger.poll():
                time.sleep(arguments.poll_s)
    finally:
        lease.release()
    return 0

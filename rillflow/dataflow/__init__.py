"""Dataflow: the single controller an algorithm talks to, and what makes a run resumable.

step(flow, ...) ── flow.policy.generate ──> stage: one call of one role, timed and journalled
                ── flow.compute ─────────> numbers only, no model
                ── flow.publish ─────────> the next policy version
"""

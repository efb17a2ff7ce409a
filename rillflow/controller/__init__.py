"""Dataflow: the single controller that runs an algorithm's step, and the checkpoints of a run.

step(flow, ...) ── flow.policy.generate ──> stage: one call of one role, timed and journalled
                ── flow.compute ─────────> formula over fields, without a model
                ── flow.publish ─────────> the next policy version
"""

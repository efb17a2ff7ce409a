"""Controller: run an algorithm's steps on groups of ranks, and write the checkpoints of a run.

step(flow, ...) ── flow.policy.generate ──> stage: one call of one role, timed and journalled
                ── flow.compute ─────────> formula over fields, without a model
                ── flow.publish ─────────> the next policy version

``loop`` opens and closes steps; ``source`` gives their prompts and sampled rows.
"""

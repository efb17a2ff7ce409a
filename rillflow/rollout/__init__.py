"""Rollout: prompts in, token trajectories out.

prompts [B] ── engine.generate(samples=G) ──> rollouts [B x G]
                 native/: the embedded engine, on the trainer's own module
"""

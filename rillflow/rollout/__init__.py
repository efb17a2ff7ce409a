"""Rollout: prompts in, token trajectories out.

prompts [B] ── engine.generate(samples=G) ──> rollouts [B x G]
                 native/: the embedded engine, which runs the trainer's own module
"""

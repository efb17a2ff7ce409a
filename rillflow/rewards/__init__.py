"""Rewards: a Python function of named columns, called in children that can be killed.

    prompts, completions, columns ──> RewardWorkers ──frames──> child: the user's function
                                            │                      │
    list[Score], in order  <────────────────┴──── one answer, one death, or silence

An outcome is a score, an abstention, a time-out or an error, never a silent 0. See docs/design/rewards.md.
Nothing here imports torch, and the child imports nothing but the standard library and the user's file.
"""

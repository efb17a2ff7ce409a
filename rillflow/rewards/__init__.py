"""Rewards: call a Python function of named columns in child processes that can be killed.

    prompts, completions, columns ──> RewardWorkers ──frames──> child: the user's function
                                            │                      │
    list[Score], in order  <────────────────┴── answer, child's death, or timeout

An outcome is a score, an abstention, a timeout or an error, never a silent 0. See docs/design/rewards.md.
Nothing here imports torch, and the child imports only the standard library and the user's file.
"""

"""Isolation: child processes that end with this one, sandboxes for them, and the frames that they exchange.

    owner ── ChildProcess ──> child: new session, bounded end          child_process.py
          ── JSON frames ───> a child that is not trusted              frames.py
                              in namespaces, behind a seccomp filter   sandbox.py, kernel.py

Reward functions, agents and environments are such children. Standard library only.
"""

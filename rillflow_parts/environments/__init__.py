"""Environments that answer each turn of the policy: classes of the user's, verifiers and OpenEnv."""

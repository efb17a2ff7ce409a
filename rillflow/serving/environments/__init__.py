"""Environments: classes with ``reset`` and ``step``, verifiers environments and OpenEnv servers."""

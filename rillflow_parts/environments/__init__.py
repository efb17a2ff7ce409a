"""Environments of other libraries: verifiers, and servers of OpenEnv."""

"""Environments: many at once behind one interface, single-agent and multi-agent."""

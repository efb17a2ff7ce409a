"""Mapping: the search for the best plan."""

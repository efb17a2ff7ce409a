"""Adapters: merge a trained adapter into its base."""

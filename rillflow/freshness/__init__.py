"""Freshness: the rule for how old a trained token may be, free of clock and device, for simulator and run."""

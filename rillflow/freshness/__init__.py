"""How old a trained token may be: a rule without clock, device or row that simulator and run both obey."""

"""Nodes: compare files, code, variables and clocks of a cluster's nodes with the driver's machine."""

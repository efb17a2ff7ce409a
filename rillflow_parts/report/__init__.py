"""Report: a run as one page, its waiting times, and its predicted seconds beside the measured ones."""

"""Doctor: check this machine for problems of a run."""

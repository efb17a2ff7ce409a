"""Watch: a local page of running and finished runs, which only reads their directories."""

"""Remote samplers: programs on other networks that join a run, over HTTP or through a store."""

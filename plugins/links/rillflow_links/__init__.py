"""Slow links: codecs of the edges of a run, and samplers on other networks."""

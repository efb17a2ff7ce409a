"""Static executor: reactors with logical time on preallocated channels (arXiv 2312.04704)."""

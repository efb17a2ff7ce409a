"""Service: streams of rows over HTTP and sockets, for training and inference engines of other projects.

source of groups ─ begin ─> table ─ take ─> worker of a stage ─ done ─> table ─> next stage
                              └ store: columns in shared memory, on one machine or several
"""

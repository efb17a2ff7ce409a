"""Data plane: the table of groups between stages that do not wait for each other.

    begin, done, lost ─ events ─> Table [groups x stages] ─ instructions ─> the caller takes or drops groups

The columns lie elsewhere: in a run on its ranks, in the service plugin in shared memory.
"""

"""Workers: pools of ranks, the backends that run them, and calls to groups of ranks.

@endpoint(TRANSFER)            a method the controller may call, and how values travel there and back
Group.call ── Pending          returns at once; the ranks' results stay where they were made
     └─ arguments: a Batch is cut here; a Pending is passed on as references, and each rank pulls
        its own rows from the ranks that hold them
"""

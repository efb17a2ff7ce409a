"""Cluster: where things run. Pools of ranks, and two backends that run calls on them alike.

Pool(name, size) ── Backend.open ──> a Site for every rank: a process (Ray), or a thread or none (inline)
submit(Place, function, arguments) ──> references at once; calls of one site run in turn, in the order
                                       given; sites run side by side
read(reference, deadline) ──> the value, or an error that says who did not give it
"""

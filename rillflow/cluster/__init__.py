"""Cluster: pools of ranks, and two interchangeable backends that run calls on them.

Pool(name, size) ── Backend.open ──> a Site for every rank: a process (Ray), a thread (inline), or this thread
submit(Place, function, arguments) ──> references at once; calls of one rank run in submission order,
                                       ranks run in parallel
read(reference, deadline) ──> the value, or an error that names the rank that did not return it
"""

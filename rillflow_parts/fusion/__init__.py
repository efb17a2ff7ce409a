"""Fusion: two pipelined updates on the same devices run as one stage (RLHFuse, arXiv 2409.13221).

placement.fused ─ needs ─> two roles ─ FusedCalls: the first update waits for the second ─┐
rank   baton: both calls take turns ─ SharedPipeline: passes of both meet <─ joined_call ─┘
                   scheduling ─> order of all passes ─> fused_pipeline
"""

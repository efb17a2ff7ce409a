"""The native engine: continuous batching around an unmodified transformers module.

add ──> Sequence ──> Scheduler ── Step ──> Runner <── Cache           one step():
         a row        no torch:   what to   the module, its             schedule
                      events in   run now   attention over the cache    run
                                              │ logits                  postprocess
finished rows <── BatchWorker   <── tokens ── sampling <──┘
                    └── Slots: the running rows' state on the device
"""

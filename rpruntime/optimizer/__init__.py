"""The optimizer process: a pure machine for sums, steps and versions, and the torch code that carries it out.

the machine, without torch    machine, events, outbox, models, model, sums, scales, scaling, buffers, gradients,
                              steps, cancels, saves, restores, succession
the shell, with torch         shell, units (one storage unit: its fp32 copy, state and sums), pieces (the step in
                              pieces), norms, snapshots (copies for saves), kept (what outlives a controller),
                              tracing
"""

"""The optimizer process: a pure machine for sums, steps and versions, and the torch code that carries it out."""

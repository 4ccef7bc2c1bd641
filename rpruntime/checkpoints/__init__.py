"""Checkpoints of a model, from the script's side: saves, loads, what is on the disk."""

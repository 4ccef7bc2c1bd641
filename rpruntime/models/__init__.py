"""Causal language models of `transformers` as lists of layers, their weights, and looking at what they generate."""

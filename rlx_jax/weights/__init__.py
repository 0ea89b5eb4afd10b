"""Checkpoints: opening them, naming their tensors, reading them piece by piece.

`source.open_weights` is the way in. Nothing is imported here, so that reading a `config.json` does
not import JAX.
"""

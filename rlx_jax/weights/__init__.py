"""Checkpoints: opening them, naming their tensors, reading them piece by piece.

`source.open_weights` is the way in.
"""

"""MIR passes: each takes a valid graph and returns a valid graph. `rlx_jax/compiler/passes.py` lists them in order."""

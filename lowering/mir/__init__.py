"""MIR passes: valid in, valid out. The table that they stand in is `rlx_jax/compiler/passes.py`."""

"""MIR: tensor ops, each defined once. `eval` is the meaning, and the shape rule unless `infer` is written."""

"""Random programs that the compiler must not change, and faults that it must be caught with.

- `sketch`: a graph while it grows, with its numbers.
- `tensor_ops`: what a random MIR graph is grown from, the op table above all. `blocks`: the same for HIR.
- `check`: a graph before and after a pass, samples of an op, and a region that runs.
- `planted`: the faults. `hunt`: in which random graphs they show.
"""

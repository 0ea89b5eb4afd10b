"""Every tensor op and every block: what it means in NumPy float64, and samples with operands that fit it.

A new op is a row of `MEANINGS` and a sample in the file of its topic; a new block the same in `blocks`.
"""

from typing import Any

from tests.ops import blocks, elements, images, sequences, shapes
from tests.ops.blocks import BLOCKS
from tests.ops.sample import BF16, F32, I32, MEANING, SIZES, Sample, o, operand

TOPICS = (elements, shapes, sequences, images)
for topic in (*TOPICS, blocks):
    MEANING.update(topic.MEANINGS)
MIR_OPS: dict[Any, list[Sample]] = {}
for topic in TOPICS:
    for samples in topic.SAMPLES:
        for sample in samples():
            MIR_OPS.setdefault(type(sample.op), []).append(sample)

__all__ = ["BF16", "BLOCKS", "F32", "I32", "MEANING", "MIR_OPS", "SIZES", "Sample", "o", "operand"]

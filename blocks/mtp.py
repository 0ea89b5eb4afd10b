"""What a module that predicts several tokens (MTP) begins with: the token behind each, merged with what led to it."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.blocks.linear import block_of
from rlx_jax.blocks.norm import GemmaRmsNorm, RmsNorm
from rlx_jax.errors import ShapeError
from rlx_jax.trace.emit import Emit, FlowValue


@dataclass(frozen=True)
class MtpMerge:
    """`[norm_e(x) ‖ norm_h(h)] Wᵀ`: embeddings `[B,S,H]` → same, h the input `hidden_input` `[B,S,H]`.

    Weight: `weight_key` `[H, 2H]`, whose first H columns meet the embedding; those of the norms `[H]`. Source:
    DeepSeek-V3, arXiv:2412.19437, section 2.2; the order of the halves is that of Qwen 3.5's `mtp.fc.weight`.
    """

    embedding_norm: RmsNorm | GemmaRmsNorm
    hidden_norm: RmsNorm | GemmaRmsNorm
    weight_key: str
    hidden_input: str = "hidden"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, h = emit.require(value, "MtpMerge"), emit.flow_input(self.hidden_input)
        if x.type.shape != h.type.shape:
            raise ShapeError(
                f"{emit.path}: MtpMerge: embeddings are {x.type}, the input {self.hidden_input!r} {h.type}"
            )
        with emit.scope("merge"):
            both = emit.concat([self.embedding_norm.emit(emit, x), self.hidden_norm.emit(emit, h)])
            hidden = x.type.shape[-1]
            with emit.scope(block_of(self.weight_key)):
                return emit.linear(both, self.weight_key, roles=("hidden", None), columns=hidden)

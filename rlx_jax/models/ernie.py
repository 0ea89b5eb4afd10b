"""Define the config and recipe of ERNIE (Sun et al. 2019): BERT, in later versions with embeddings of tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlx_jax.blocks import BlockStage, GatherAdd
from rlx_jax.flow import ModelFlow
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields

TASKS_INPUT = "task_type_ids"


@dataclass(frozen=True)
class ErnieConfig(BertConfig):
    """Sizes of an ERNIE model; `task_type_vocab_size` is 0 if it does not read tasks."""

    task_type_vocab_size: int = 0

    @classmethod
    def read(cls, c: Fields) -> Self:
        tasks = c.integer("task_type_vocab_size", 3)
        return cls(**cls.common_fields(c), task_type_vocab_size=tasks if c.flag("use_task_id", False) else 0)


@dataclass(frozen=True)
class ErnieFlow(BertLike[ErnieConfig]):
    """The recipe of ERNIE: see `EncoderFlow`. Optional inputs are as of `BertFlow`, and `task_type_ids` (default 0)."""

    name: str = "ernie"

    config_type = ErnieConfig

    def add_inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        flow = super().add_inputs(flow, rows)
        if not self.config.task_type_vocab_size:
            return flow
        return flow.input(TASKS_INPUT, (rows, "seq"), dtype="int32", default=0)

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        *stages, norm = super().embedding_stages()
        sizes = (self.config.task_type_vocab_size, self.config.hidden_size)
        tasks = GatherAdd(TASKS_INPUT, self.key("embeddings.task_type_embeddings.weight"), sizes)
        return *stages, *([tasks] if sizes[0] else []), norm

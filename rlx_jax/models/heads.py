"""Define the heads of tasks: the layers that map hidden states to one logit for each label.

A family lists the layers of its heads by task; `architectures` in `config.json` names the task, `id2label` the labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlx_jax.blocks import Activation, BlockStage, Linear
from rlx_jax.errors import ConfigError, LimitError, quote
from rlx_jax.models.config import Fields

# Name of the output of a flow with a head: `[batch, seq, labels]`, of which a task reads one token or all.
LABEL_LOGITS = "label_logits"
# A head with more labels than this is taken for a malformed config.
MAX_LABELS = 2**20
# Number of labels of a config that names none.
DEFAULT_LABELS = 2

SEQUENCE, IMAGE = "SequenceClassification", "ImageClassification"
REGRESSION, SINGLE_LABEL, MULTI_LABEL = "regression", "single_label_classification", "multi_label_classification"


@dataclass(frozen=True)
class HeadLayer:
    """A linear layer of a head.

    Attributes:
        key: the checkpoint's name of the module.
        activation: name of the function after it, as in `Activation`; empty for none.
        bias: whether it has a bias.
        in_encoder: whether `key` follows the prefix of the encoder's keys.
    """

    key: str
    activation: str = ""
    bias: bool = True
    in_encoder: bool = False


# Heads that several families have. The first is read at the first token: BERT's pooler, then the classifier.
POOLER_HEAD = (HeadLayer("pooler.dense", "tanh", in_encoder=True), HeadLayer("classifier"))
DENSE_HEAD = (HeadLayer("classifier.dense", "tanh"), HeadLayer("classifier.out_proj"))
BERT_HEADS = {SEQUENCE: POOLER_HEAD}
ROBERTA_HEADS = {SEQUENCE: DENSE_HEAD}
IMAGE_HEADS = {IMAGE: (HeadLayer("classifier"),)}
DECODER_HEADS = {SEQUENCE: (HeadLayer("score", bias=False),)}

HeadLayers = Mapping[str, tuple[HeadLayer, ...]]


@dataclass(frozen=True)
class TaskHead:
    """The head of a task.

    Attributes:
        task: `SEQUENCE` or `IMAGE`.
        layers: the linear layers; the last one has a row for each label.
        labels: the names of the labels, in the order of the logits.
        problem: `REGRESSION`, `SINGLE_LABEL` or `MULTI_LABEL`, as the config has it; empty if it has none.
        pooling: the token of a text that the logits of `SEQUENCE` are read at: `cls` or `lasttoken`.
        padding_id: the id that `lasttoken` skips at the end of a text, as transformers does; None for none.
    """

    task: str
    layers: tuple[HeadLayer, ...]
    labels: tuple[str, ...]
    problem: str = ""
    pooling: str = "cls"
    padding_id: int | None = None

    def stages(self, width: int, key: Callable[[str], str]) -> tuple[BlockStage, ...]:
        """Return the stages of the head.

        They are applied to every token. A task reads one of them, which gives the same logits as to pool first.

        Args:
            width: size of a hidden state.
            key: maps a key of the encoder to a key of the checkpoint.
        """
        stages: list[BlockStage] = []
        for number, layer in enumerate(self.layers, 1):
            name = key(layer.key) if layer.in_encoder else layer.key
            rows = len(self.labels) if number == len(self.layers) else width
            stages.append(
                Linear(f"{name}.weight", bias_key=f"{name}.bias" if layer.bias else None, shape=(rows, width))
            )
            if layer.activation:
                stages.append(Activation(layer.activation))
        return tuple(stages)


def read_head(
    config: Fields, architecture: str, layers: HeadLayers, pooling: str = "cls", default_padding_id: int | None = None
) -> TaskHead | None:
    """Return the head that the config of a checkpoint names, or None if its task is not among `layers`.

    Args:
        config: the config.
        architecture: the class that the config names, such as `BertForSequenceClassification`.
        layers: the layers of the family's heads by task.
        pooling: see `TaskHead`.
        default_padding_id: `pad_token_id` of a config that lacks the field.

    Raises:
        ConfigError: `id2label` does not name the labels 0, 1, 2 …; or an unknown `problem_type`.
        LimitError: more than `MAX_LABELS` labels.
    """
    _, separator, task = architecture.rpartition("For")
    if not separator or task not in layers:
        return None
    problem = config.text("problem_type", "") if config.raw("problem_type") is not None else ""
    if problem not in ("", REGRESSION, SINGLE_LABEL, MULTI_LABEL):
        expected = f"{REGRESSION}, {SINGLE_LABEL} or {MULTI_LABEL}"
        raise ConfigError(f"{config.where}: field 'problem_type' is {quote(problem)}; expected {expected}")
    padding_id = config.values.get("pad_token_id", default_padding_id)
    if padding_id is not None:
        padding_id = config.integer("pad_token_id", default_padding_id, low=-1)
    return TaskHead(
        task, layers[task], _read_labels(config), problem, pooling, padding_id if pooling == "lasttoken" else None
    )


def _read_labels(config: Fields) -> tuple[str, ...]:
    """Return the names of the labels in order: `id2label`, or LABEL_0, LABEL_1 … for `num_labels`.

    Labels with the same name get their number, so that scores can be looked up by name.
    """
    names = config.raw("id2label")
    if names is None:
        count = config.integer("num_labels", DEFAULT_LABELS, high=MAX_LABELS)
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(names, Mapping) or not names or not all(isinstance(n, str | int) for n in names.values()):
        raise ConfigError(f"{config.where}: field 'id2label' is {quote(names)}; expected an object of names by id")
    if len(names) > MAX_LABELS:
        raise LimitError(f"{config.where}: field 'id2label' has {len(names)} labels; the limit is {MAX_LABELS}")
    ids = [str(i) for i in range(len(names))]
    if {*map(str, names)} != {*ids}:
        raise ConfigError(
            f"{config.where}: field 'id2label' has the ids {quote([*names])}; expected 0 to {len(ids) - 1}"
        )
    by_id = {str(i): str(name) for i, name in names.items()}
    repeated = {name for name, count in Counter(by_id.values()).items() if count > 1}
    return tuple(f"{by_id[i]} ({i})" if by_id[i] in repeated else by_id[i] for i in ids)

"""Define the recipe of a text encoder, which BERT, RoBERTa, MPNet, NomicBERT and the text towers of CLIP and SigLIP
share.

A family is its config, the stages before its layers, and its layer; `families.py` has its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from rlx_jax.blocks import Activation, BlockStage, EncoderLayer, EncoderLayerSpec, LayerNorm, Linear, LmHead, SideOutput
from rlx_jax.blocks.linear import module_keys
from rlx_jax.blocks.vision import pre_norm_layer
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ConfigError, LimitError, quote
from rlx_jax.flow import POSITIONS, ModelFlow
from rlx_jax.models.config import Fields, LayeredConfig, TokenConfig
from rlx_jax.models.hooks import Recipe
from rlx_jax.trace.emit import Emit
from rlx_jax.trace.flow_value import FlowValue
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import RenamedSource

# Name of the output of a flow with a head: `[batch, seq, labels]`, of which a task reads one token or all. The labels
# of a masked language model are the token ids.
LABEL_LOGITS = "label_logits"
# A head with more labels than this is taken for a malformed config.
MAX_LABELS = 2**20
DEFAULT_LABELS = 2

# The tasks, as `architectures` in `config.json` names them after `For`.
SEQUENCE, TOKEN, ANSWER, MASKED = "SequenceClassification", "TokenClassification", "QuestionAnswering", "MaskedLM"
IMAGE = "ImageClassification"
# The labels of tasks that read none from the config.
FIXED_LABELS: Mapping[str, tuple[str, ...]] = {ANSWER: ("start", "end"), MASKED: ()}
REGRESSION, SINGLE_LABEL, MULTI_LABEL = "regression", "single_label_classification", "multi_label_classification"


# The activation of a layer that has the function of the encoder's MLPs: the config's `activation`.
HIDDEN_ACT = "hidden_act"


@dataclass(frozen=True)
class HeadLayer:
    """A linear layer of a head, then a function, then a LayerNorm.

    Attributes:
        key: the checkpoint's name of the module.
        activation: name of the function after it, as in `Activation`, or `HIDDEN_ACT`; empty for none.
        bias: whether it has a bias.
        in_encoder: whether `key` follows the prefix of the encoder's keys.
        norm: the checkpoint's name of a LayerNorm after the function, with the config's epsilon; empty for none.
        norm_bias: whether the LayerNorm has a bias.
        bias_key: the checkpoint's key of the bias, if it is not `bias` of the module.
    """

    key: str
    activation: str = ""
    bias: bool = True
    in_encoder: bool = False
    norm: str = ""
    norm_bias: bool = True
    bias_key: str = ""

    def weight_keys(self, key: Callable[[str], str]) -> tuple[str, str | None]:
        """Return the checkpoint's keys of the weight and the bias; `key` as in `TaskHead.stages`."""
        name = key(self.key) if self.in_encoder else self.key
        return f"{name}.weight", (self.bias_key or f"{name}.bias") if self.bias else None

    def stages(self, shape: tuple[int, int], key: Callable[[str], str], config: Any) -> tuple[BlockStage, ...]:
        """Return the linear layer, with a weight of `shape`, the function and the LayerNorm; see `TaskHead.stages`."""
        weight, bias = self.weight_keys(key)
        activation = config.activation if self.activation == HIDDEN_ACT else self.activation
        norm_bias = f"{self.norm}.bias" if self.norm_bias else None
        return (
            Linear(weight, bias_key=bias, shape=shape),
            *([Activation(activation)] if activation else []),
            *([LayerNorm(f"{self.norm}.weight", norm_bias, config.layer_norm_eps)] if self.norm else []),
        )


HeadLayers = Mapping[str, tuple[HeadLayer, ...]]


def token_heads(*layers: HeadLayer, token: str = "classifier") -> HeadLayers:
    """Return the heads that label every token, and that find answers: `layers`, then one layer, named `token` or
    `qa_outputs`."""
    return {TOKEN: (*layers, HeadLayer(token)), ANSWER: (*layers, HeadLayer("qa_outputs"))}


def masked_head(
    dense: str, norm: str, decoder: str, bias_key: str = "", activation: str = HIDDEN_ACT
) -> tuple[HeadLayer, ...]:
    """Return the head of a masked language model: a dense layer with a LayerNorm, then the projection to token ids.

    Args:
        dense, norm: the checkpoint's names of the modules.
        decoder: the name of the projection. Its weight is the embedding, unless the checkpoint has one of this name.
        bias_key: see `HeadLayer`.
        activation: the function between dense layer and norm.
    """
    return (HeadLayer(dense, activation, norm=norm), HeadLayer(decoder, bias_key=bias_key))


# Heads that several families have. The first is read at the first token: BERT's pooler, then the classifier.
POOLER_HEAD = (HeadLayer("pooler.dense", "tanh", in_encoder=True), HeadLayer("classifier"))
DENSE_HEAD = (HeadLayer("classifier.dense", "tanh"), HeadLayer("classifier.out_proj"))
BERT_MASKED = masked_head(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder",
    "cls.predictions.bias",
)  # fmt: skip
ROBERTA_MASKED = masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", "gelu")
BERT_HEADS: HeadLayers = {SEQUENCE: POOLER_HEAD, **token_heads(), MASKED: BERT_MASKED}
ROBERTA_HEADS: HeadLayers = {SEQUENCE: DENSE_HEAD, **token_heads(), MASKED: ROBERTA_MASKED}
IMAGE_HEADS: HeadLayers = {IMAGE: (HeadLayer("classifier"),)}
DECODER_HEADS: HeadLayers = {SEQUENCE: (HeadLayer("score", bias=False),), **token_heads(token="score")}


@dataclass(frozen=True)
class TokenScore:
    """The logit of a token id, as a language-model head gives it; with a second token id, less that one's logit.

    Args:
        key: the weight of the head `[vocab, width]`.
        shape: its shape.
        token_ids: one or two token ids.
    """

    key: str
    shape: tuple[int, int]
    token_ids: tuple[int, ...]

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "TokenScore")
        with emit.scope("token_score"):
            weight = emit.param(self.key, self.shape, ("vocab", "hidden"))
            rows = emit.concat([weight[i : i + 1] for i in self.token_ids], axis=0)
            logits = emit.linear(x, rows, transpose=True)
            return logits if len(self.token_ids) == 1 else logits[..., :1] - logits[..., 1:]


@dataclass(frozen=True)
class TaskHead:
    """The head of a task.

    Attributes:
        task: `SEQUENCE`, `IMAGE`, `TOKEN`, `ANSWER` or `MASKED`.
        layers: the linear layers; the last one has a row for each label, or of `MASKED` for each token id.
        labels: the names of the labels, in the order of the logits; none of `MASKED`.
        problem: `REGRESSION`, `SINGLE_LABEL` or `MULTI_LABEL`, as the config has it; empty if it has none.
        pooling: the token of a text that the logits of `SEQUENCE` are read at: `cls` or `lasttoken`.
        padding_id: the id that `lasttoken` skips at the end of a text, as transformers does; None for none.
        is_tied: whether the last weight of `MASKED` is the embedding.
        token_ids: the one label is the difference of the logits of these token ids; see `TokenScore`.
    """

    task: str
    layers: tuple[HeadLayer, ...]
    labels: tuple[str, ...]
    problem: str = ""
    pooling: str = "cls"
    padding_id: int | None = None
    is_tied: bool = False
    token_ids: tuple[int, ...] = ()

    def adapt_to(self, source: WeightSource) -> TaskHead:
        """Return the head for how a checkpoint stores the projection to token ids.

        If it has a separate weight or bias of the projection, that one is used, although the config ties it: it may
        differ from the embedding, and comparing the two would read data.
        """
        *layers, last = self.layers
        if self.task != MASKED:
            return self
        if last.bias_key and source.has(f"{last.key}.bias"):
            last = replace(last, bias_key="")
        return replace(self, layers=(*layers, last), is_tied=self.is_tied and not source.has(f"{last.key}.weight"))

    def stages(self, width: int, key: Callable[[str], str], config: Any = None) -> tuple[BlockStage, ...]:
        """Return the stages of the head.

        They are applied to every token. A task reads one of them, which gives the same logits as to pool first.

        Args:
            width: size of a hidden state.
            key: maps a key of the encoder to a key of the checkpoint.
            config: the config of the recipe, which a head with `HIDDEN_ACT`, a norm or token ids reads.
        """
        stages: list[BlockStage] = []
        *layers, last = self.layers
        # ALBERT and ELECTRA have embeddings that are narrower than hidden states, RemBERT others at its output.
        sizes = (getattr(config, name, 0) for name in ("output_embedding_size", "embedding_size"))
        inner = next(filter(None, sizes), width) if self.task == MASKED else width
        for layer in layers:
            stages.extend(layer.stages((inner, width), key, config))
        weight, bias = last.weight_keys(key)
        if self.token_ids:
            return *stages, TokenScore(weight, (config.vocab_size, inner), self.token_ids)
        if self.task != MASKED:
            return *stages, Linear(weight, bias_key=bias, shape=(len(self.labels), inner))
        return *stages, LmHead(config.vocab_size, inner, None if self.is_tied else weight, self.is_tied, bias_key=bias)

    def weight_keys(self, key: Callable[[str], str]) -> set[str]:
        """Return the checkpoint's keys of all weights that the head may have; `key` as in `stages`."""
        keys = {name for layer in self.layers for name in layer.weight_keys(key) if name is not None}
        return keys | {f"{layer.norm}.{name}" for layer in self.layers if layer.norm for name in ("weight", "bias")}


def read_head(
    config: Fields, architecture: str, layers: HeadLayers, pooling: str, default_padding_id: int | None
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
    if task != SEQUENCE or pooling != "lasttoken":
        padding_id = None
    if task in FIXED_LABELS:
        labels = FIXED_LABELS[task]
    else:
        labels = _read_labels(config, unique=task != TOKEN)
    is_tied = task == MASKED and config.flag("tie_word_embeddings", True)
    head = TaskHead(task, layers[task], labels, problem, pooling, padding_id, is_tied)
    # Only a tied projection shares the bias of that other key.
    return head if is_tied else replace(head, layers=(*head.layers[:-1], replace(head.layers[-1], bias_key="")))


def _read_labels(config: Fields, unique: bool) -> tuple[str, ...]:
    """Return the names of the labels in order: `id2label`, or LABEL_0, LABEL_1 … for `num_labels`.

    With `unique` labels with the same name get their number, so that scores can be looked up by name.
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
        raise ConfigError(f"{config.where}: field 'id2label' has ids {quote([*names])}; expected 0 to {len(ids) - 1}")
    by_id = {str(i): str(name) for i, name in names.items()}
    repeated = {name for name, count in Counter(by_id.values()).items() if unique and count > 1}
    return tuple(f"{by_id[i]} ({i})" if by_id[i] in repeated else by_id[i] for i in ids)


EMBEDDING = "embeddings.word_embeddings.weight"

# Prefixes of keys of the heads that transformers defines for BERT-like encoders.
HEAD_PREFIXES = (
    "classifier.", "cls.", "discriminator_predictions.", "generator_lm_head.", "generator_predictions.", "linear.",
    "lm_head.", "lm_predictions.", "mask_predictions.", "pre_classifier.", "predictions.", "qa_classifier.",
    "qa_outputs.", "sequence_summary.", "sop_classifier.", "vocab_",
)  # fmt: skip

# Name of the side output with one vector for each row.
POOLED = "pooled"

# Names of optional inputs `[batch, seq]` int32, and their defaults as in `ModelFlow.input`.
OptionalInputs = tuple[tuple[str, float | str | None], ...]
BERT_INPUTS: OptionalInputs = (("attention_mask", None), ("token_type_ids", 0), ("position_ids", POSITIONS))


L = TypeVar("L", bound=LayeredConfig)
E = TypeVar("E", bound=TokenConfig)


@dataclass(frozen=True)
class TowerFlow(Recipe[L]):
    """The recipe of a stack of layers over texts or images.

    Output: `hidden_states` `[batch, tokens, hidden]`; if the family pools, also `pooled`, one vector for each row. With
    a head the output is `label_logits`: `[batch, tokens, labels]` for texts, `[batch, labels]` for images.

    Args:
        prefix: prefix of the checkpoint keys; may be empty.
        head: the head of a task.
        Others: see `Recipe`.
    """

    name = "tower"
    prefix: str = ""
    head: TaskHead | None = None

    heads: ClassVar[HeadLayers] = {}  # the layers of the family's heads by task
    # The token of a text that a classifier reads, and `pad_token_id` of a config that lacks the field: see `read_head`.
    head_token: ClassVar[tuple[str, int | None]] = ("cls", None)

    def key(self, name: str) -> str:
        """Return the checkpoint's key for a key of the tower."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def norm(self, name: str) -> tuple[BlockStage, ...]:
        """Return the stage of the norm `name`, or no stage for an empty name."""
        config: Any = self.config
        return (LayerNorm(*module_keys(self.key(name)), config.layer_norm_eps),) if name else ()

    def add_inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        """Return the flow with the inputs added; `rows` is the name of their first axis."""
        raise NotImplementedError

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        """Return the stages before the layers; the first one takes the first input."""
        raise NotImplementedError

    def stage(self, index: int, spec: Any) -> BlockStage:
        """Return the stage of a layer."""
        return EncoderLayer(spec) if isinstance(spec, EncoderLayerSpec) else pre_norm_layer(spec)

    def final_stages(self) -> tuple[BlockStage, ...]:
        """Return the stages after the layers."""
        return ()

    def pool(self) -> BlockStage | None:
        """Return the stage that pools the hidden states to one vector; None if the family does not pool."""
        return None

    def task_heads(self) -> HeadLayers:
        """Return the layers of the heads by task."""
        return self.heads

    def head_stages(self, head: TaskHead) -> tuple[BlockStage, ...]:
        """Return the stages from the hidden states to the logits of a head."""
        return head.stages(self.config.hidden_size, self.key, self.config)

    def unread_keys(self) -> tuple[str, ...]:
        """Return keys that are left unread on purpose."""
        raise NotImplementedError

    def assemble(self) -> ModelFlow:
        """Return the flow, bound to its weights if there are any."""
        flow = ModelFlow(self.name, profile=self.hooks.profile, _max_positions=self.max_positions)
        return self.add_tower(flow.with_weights(self.weights, leave=self.unread_keys()))

    def add_tower(self, flow: ModelFlow) -> ModelFlow:
        """Return the flow with the tower's inputs, stages and outputs added."""
        flow, pool = self.add_layers(self.add_inputs(flow).bind(batch=self.batch)), self.pool()
        if self.head is not None:
            stages = self.head_stages(self.head)
            return flow.stage(*stages)._with_outputs(primary=LABEL_LOGITS, label_head=self.head)
        return (flow if pool is None else flow.stage(SideOutput(POOLED, pool))).output("hidden_states")

    def add_layers(self, flow: ModelFlow) -> ModelFlow:
        """Return the flow with the stages from the inputs to the hidden states added."""
        return (
            flow.stage(*self.embedding_stages())
            .patch(self.hooks.stack(self.config.num_hidden_layers, self.spec, self.stage))
            .stage(*self.final_stages())
            .patch(self.hooks.edit)
        )


@dataclass(frozen=True)
class EncoderFlow(TowerFlow[E]):
    """The recipe of an encoder. Inputs: `input_ids` `[batch, seq]`, and optionally the ones in `optional_inputs`, such
    as `attention_mask` (1 keeps a key). Outputs: as `TowerFlow`.

    A family's recipe is a subclass with a name, the class of its config, and `embedding_stages`, `spec` and `stage`;
    `heads` has the layers of its heads by task; if they depend on the config, the method `task_heads` returns them.

    Args:
        prefix: prefix of the keys in task checkpoints; empty for bare encoders.
        batch, seq: sizes to compile for ahead of the first call.
        Others: see `Recipe`.
    """

    name = "encoder"
    seq: int | None = None

    embedding: ClassVar[str] = EMBEDDING
    head_prefixes: ClassVar[tuple[str, ...]] = HEAD_PREFIXES
    optional_inputs: ClassVar[OptionalInputs] = BERT_INPUTS

    @classmethod
    def for_prefill(cls, config: E | Mapping[str, Any], batch: int | None = None, seq: int | None = None) -> Self:
        """Return the forward program of a bare encoder, bound to sizes if given.

        `config` may be the content of `config.json`.
        """
        return replace(super().for_prefill(config, batch), seq=seq)

    def adapt_to(self, source: WeightSource) -> Self:
        """Return the recipe with the prefix of a checkpoint's keys."""
        name = f".{self.embedding}"
        matches = [key[: -len(name)] for key in source.keys() if f".{key}".endswith(name)]
        prefix = matches[0] if len(matches) == 1 else self.prefix
        return replace(self, prefix=prefix, head=None if self.head is None else self.head.adapt_to(source))

    def adapt_weights(self, source: WeightSource) -> WeightSource:
        """Return a checkpoint's weights under the keys that the recipe reads.

        Old checkpoints name the parameters of a LayerNorm `gamma` and `beta`, as TensorFlow does.
        """
        keys = source.keys()
        names = {".gamma": ".weight", ".beta": ".bias"}
        renamed = {k: k.removesuffix(old) + new for k in keys for old, new in names.items() if k.endswith(f"Norm{old}")}
        return RenamedSource(source, {renamed.get(k, k): k for k in keys}) if renamed else source

    @property
    def padding(self) -> tuple[int, int] | None:
        """(tokens, id) that texts are padded to; None if they may have any length and padding is not read."""
        return None

    def task_head_keys(self, source: WeightSource) -> tuple[str, ...]:
        return () if self.head else head_keys(self.head_prefixes, source)

    def unread_keys(self) -> tuple[str, ...]:
        """Return keys that are left unread on purpose: position ids, the pooler and task heads."""
        return (self.key("embeddings.position_ids"), self.key("pooler."), "pooler.", *self.head_prefixes)

    def add_inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        flow = flow.input("input_ids", (rows, "seq"), dtype="int32")
        for name, default in self.optional_inputs:
            flow = flow.input(name, (rows, "seq"), dtype="int32", default=default)
        return flow.bind(seq=self.seq)


def head_keys(heads: tuple[str, ...], source: WeightSource) -> tuple[str, ...]:
    """Return the keys of a task's head in a checkpoint, which begin with one of `heads`, and of its pooler."""
    if not any(key.startswith(heads) for key in source.keys()):
        return ()
    return tuple(key for key in source.keys() if key.startswith((*heads, "pooler.")) or ".pooler." in key)

"""The files of a sentence pipeline, how it pools, and MiniLM and a tiny encoder against `sentence-transformers`."""

import importlib
import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.demo import minilm_directory
from rlx_jax.encode.sentence import SentencePipeline, load_pipeline, pool
from rlx_jax.text.tokenizer import load_tokenizer
from tests.opening import load
from tests.oracles import checkpoints, texts
from tests.test_tokenizer import KINDS, TEXTS, Json, loaded, write


def modules(*kinds: str, package: str = "sentence_transformers.models") -> list[Json]:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return [
        {"idx": i, "name": str(i), "path": paths.get(kind, f"{i}_{kind}"), "type": f"{package}.{kind}"}
        for i, kind in enumerate(kinds)
    ]


ALL = modules("Transformer", "Pooling", "Normalize")
MEAN = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def sentence(directory: Path, listed: Any = ALL, pooling: Any = MEAN, normalize: Any = None, **contents: Any) -> Path:
    write(directory, modules=listed, **contents)
    write(directory / "1_Pooling", config=pooling)
    if normalize is not None:
        write(directory / "2_Normalize", config=normalize)
    return directory


def test_pooling_modes(tmp_path: Path) -> None:
    flags = "mean_sqrt_len_tokens mean_tokens max_tokens cls_token lasttoken weightedmean_tokens"
    named = {"pooling_mode": ["mean_sqrt_len_tokens", "cls"], "pooling_mode_max_tokens": True}
    for pooling, expected in (
        ({f"pooling_mode_{n}": True for n in flags.split()}, MODES),
        (named, ("mean_sqrt_len", "cls")),
        ({"embedding_dimension": 4}, ("mean",)),
    ):
        found = load_pipeline(sentence(tmp_path / expected[0], pooling=pooling))
        assert found is not None and found.pooling == expected


def test_settings_of_the_transformer(tmp_path: Path) -> None:
    def settings(name: str, **contents: Any) -> tuple[int | None, bool]:
        found = load_pipeline(sentence(tmp_path / name, **contents))
        assert found is not None
        return found.max_seq_length, found.do_lower_case

    config, longer = {"max_position_embeddings": 128}, {"model_max_length": 512}
    own, null = {"max_seq_length": 256, "do_lower_case": True}, {"max_seq_length": None, "do_lower_case": False}
    assert settings("none") == (None, False)
    assert settings("own", sentence_bert_config=own, config=config) == (256, True)
    assert settings("positions", tokenizer_config=longer, config=config) == (128, False)
    assert settings("tokenizer", tokenizer_config=longer, config={"max_position_embeddings": -1}) == (512, False)
    assert settings("endless", tokenizer_config={"model_max_length": 10**30}, config={}) == (None, False)
    assert settings("null", sentence_bert_config=null, tokenizer_config={"model_max_length": 64}) == (64, False)
    assert settings("family", **{"sentence_xlm-roberta_config": {"max_seq_length": 7}}) == (7, False)
    new = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
        "processor_kwargs": {"trust_remote_code": True},
    }
    assert settings("new", sentence_bert_config=new, tokenizer_config=longer) == (512, False)


MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")


def reference(hidden: np.ndarray, keep: np.ndarray, modes: tuple[str, ...], normalize: bool) -> np.ndarray:
    """Row by row in float64, from the definitions."""
    rows = []
    for vectors, mask in zip(hidden.astype(np.float64), keep, strict=True):
        kept = vectors[mask]
        start = int(np.argmax(mask))
        weights = (np.arange(len(mask)) - start + 1.0)[mask][:, None]
        parts: dict[str, Any] = {
            "cls": lambda kept=kept: kept[0],
            "max": lambda kept=kept: kept.max(axis=0),
            "mean": lambda kept=kept: kept.mean(axis=0),
            "mean_sqrt_len": lambda kept=kept: kept.sum(axis=0) / np.sqrt(len(kept)),
            "weightedmean": lambda kept=kept, weights=weights: (kept * weights).sum(axis=0) / weights.sum(),
            "lasttoken": lambda kept=kept: kept[-1],
        }
        zeros = np.zeros(vectors.shape[1])
        row = np.concatenate([parts[mode]() if len(kept) else zeros for mode in modes])
        rows.append(row / max(np.linalg.norm(row), 1e-12) if normalize else row)
    return np.stack(rows)


MASKS = np.array(
    [list(map(int, row)) for row in "1111111 1110000 0001111 0101100 0000001 1000000 0000000".split()], bool
)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("modes", [("mean",), MODES, ("lasttoken", "cls", "mean")])
def test_pool(modes: tuple[str, ...], normalize: bool) -> None:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(*MASKS.shape, 16)).astype(np.float32)
    hidden[~MASKS] = np.where(rng.random((*hidden[~MASKS].shape,)) < 0.5, np.nan, np.inf)  # must not matter
    hidden[3] *= 1e-3
    pipeline = SentencePipeline(pooling=modes, normalize=normalize)
    found = jax.jit(lambda h, k: pool(h, k, pipeline))(hidden, MASKS)
    assert found.shape == (len(MASKS), 16 * len(modes)) and found.dtype == jnp.float32
    expected = reference(hidden, MASKS, modes, normalize)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(pool(jnp.array(hidden), jnp.array(MASKS), pipeline)[-1], 0.0)


def test_pool_has_a_gradient_at_an_empty_row() -> None:
    pipeline = SentencePipeline(pooling=MODES, normalize=True)
    slope = jax.jit(jax.grad(lambda h: jnp.sum(pool(h, jnp.array(MASKS), pipeline)[:, ::3])))
    grad = slope(jnp.ones((*MASKS.shape, 4)))
    assert np.isfinite(grad).all() and np.any(np.asarray(grad[0])) and not np.any(np.asarray(grad[-1]))


def live_ids(model: Any, texts: list[str]) -> list[list[int]]:
    """What sentence-transformers makes of each text alone."""
    features = [model.preprocess([t]) if hasattr(model, "preprocess") else model.tokenize([t]) for t in texts]
    return [feature["input_ids"][0].tolist() for feature in features]


@pytest.mark.oracle(warnings="error")
@pytest.mark.filterwarnings("default")
def test_sentence_transformers_tokenisation() -> None:
    library = pytest.importorskip("sentence_transformers")
    minilm = load_tokenizer(minilm_directory())
    assert minilm is not None
    model = library.SentenceTransformer(str(minilm_directory()), device="cpu")
    pipeline = load_pipeline(minilm_directory())
    assert pipeline is not None and pipeline.max_seq_length == model.max_seq_length
    rng = random.Random(0)
    words = "river stone lantern harvest naïve 日本 😀 [MASK] unbelievably 3.14 don't".split()
    texts = TEXTS + [" ".join(rng.choice(words) for _ in range(n)) for n in (1, 5, 120, 126, 127, 128, 300, 2000)]
    texts += ["a " * n for n in (253, 254, 255, 256)] + ["supercalifragilistic" * 60, "\u0301" * 5, "\ufdfa" * 90]
    for length in (256, 128, 16, 3, 2):
        model.max_seq_length = length
        assert minilm.encode_batch(texts, max_length=length) == live_ids(model, texts)


def small_bert(directory: Path) -> Path:
    """A random BERT of one layer with the small WordPiece tokenizer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=80, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    transformers.BertModel(config).save_pretrained(directory)
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "cls", "sep", "pad", "mask")}
    settings = names | {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 64}
    return write(directory, tokenizer=KINDS["wordpiece"], tokenizer_config=settings)


@pytest.mark.oracle(warnings="error")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("lower", [False, True])
def test_a_pipeline_that_sentence_transformers_saves(lower: bool, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    parts = library.models if hasattr(library, "models") else library.sentence_transformer.modules
    small_bert(tmp_path / "bert")
    write(tmp_path / "bert", sentence_bert_config={"max_seq_length": 10, "do_lower_case": lower})
    transformer = parts.Transformer(str(tmp_path / "bert"), max_seq_length=10, do_lower_case=lower)
    pooling = parts.Pooling(8, pooling_mode="cls")
    made = library.SentenceTransformer(modules=[transformer, pooling, parts.Normalize()], device="cpu")
    made.save(str(tmp_path / "saved"), create_model_card=False)
    pipeline = load_pipeline(tmp_path / "saved")
    prompts = dict(made.prompts)  # of a new model: "query" and "document", both empty
    assert pipeline == SentencePipeline(("cls",), normalize=True, max_seq_length=10, width=8, prompts=prompts)
    tokenizer = load_tokenizer(tmp_path / "bert", lowercase=lower)  # the save loses do_lower_case
    assert tokenizer is not None
    assert tokenizer.encode_batch(TEXTS, max_length=10) == live_ids(made, TEXTS)


@pytest.mark.oracle(warnings="error")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("lower", [None, True, False])
@pytest.mark.parametrize("accents", ["absent", None, True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_reads_the_same_settings(lower: object, accents: object, side: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings: Json = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "cls", "sep", "pad", "mask")}
    settings |= {"tokenizer_class": "BertTokenizer", "truncation_side": side, "model_max_length": 64}
    settings |= {} if lower is None else {"do_lower_case": lower}
    settings |= {} if accents == "absent" else {"strip_accents": accents}
    ours = loaded(tmp_path, KINDS["wordpiece"], tokenizer_config=settings)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.pad_id, ours.model_max_length) == (theirs.pad_token_id, theirs.model_max_length)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, max_length=7) == theirs(text, truncation=True, max_length=7)["input_ids"]


@pytest.mark.oracle(warnings="error")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", MODES)
def test_sentence_transformers_pooling(mode: str) -> None:
    library, torch = pytest.importorskip("sentence_transformers"), pytest.importorskip("torch")
    parts = library.models if hasattr(library, "models") else library.sentence_transformer.modules
    hidden = np.random.default_rng(2).normal(size=(len(MASKS) - 1, MASKS.shape[1], 8)).astype(np.float32)
    keep = MASKS[:-1]  # without the empty row, where theirs gives -inf or the first token
    theirs = parts.Pooling(8, pooling_mode={"mean_sqrt_len": "mean_sqrt_len_tokens"}.get(mode, mode))
    features = {"token_embeddings": torch.from_numpy(hidden), "attention_mask": torch.from_numpy(keep.astype(np.int64))}
    expected = torch.nn.functional.normalize(theirs(features)["sentence_embedding"], dim=-1).numpy()
    found = pool(jnp.array(hidden), jnp.array(keep), SentencePipeline(pooling=(mode,), normalize=True))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


FIXTURES = checkpoints.FIXTURES
BASE = FIXTURES / "sentence" / "base"
SENTENCES: list[str] = json.loads((FIXTURES / "sentence.json").read_text("utf-8"))
ALLOWED = 1e-5


def assert_embeddings(got: Any, want: npt.NDArray[Any]) -> None:
    """float32, of the right shape, and nowhere off by more than 1e-5."""
    got = np.asarray(got)
    assert got.dtype == np.float32 and got.shape == want.shape
    assert np.abs(got - want).max() <= ALLOWED


@pytest.fixture(scope="module")
def minilm() -> Any:
    """The real encoder."""
    return load(minilm_directory())


@pytest.fixture(scope="module")
def recorded() -> npt.NDArray[np.float32]:
    """Embeddings of the 50 texts by `sentence-transformers`."""
    with np.load(FIXTURES / "minilm50.npz") as file:
        embeddings: npt.NDArray[np.float32] = file["embeddings"]
    return embeddings


@pytest.fixture(scope="module")
def variants() -> dict[str, npt.NDArray[np.float32]]:
    """Recorded embeddings by variant."""
    with np.load(FIXTURES / "sentence.npz") as file:
        return dict(file)


# Each differs from one of the others in one way; the slow tier has the rest.
QUICK = ("mean", "cls", "max", "new_mean", "weighted", "prompt")
VARIANTS = checkpoints.SENTENCE_VARIANTS | checkpoints.SENTENCE_EXTRAS


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in VARIANTS])
def test_variants(name: str, variants: dict[str, npt.NDArray[np.float32]], tmp_path: Path) -> None:
    """Pooling modes, normalisation, truncation, lower-casing and prompts are the checkpoint's own, in old and new
    spelling; what is rarely used may be refused, but not ignored."""
    directory = checkpoints.sentence_directory(BASE, tmp_path / name, **VARIANTS[name])
    profile = rlx.CompileProfile().replace(buckets={"prompt": [40], "batch": [8]})  # one program
    try:
        embeddings = load(directory, profile=profile).embed(SENTENCES)
    except (errors.ConfigError, errors.UnsupportedError):
        assert name in checkpoints.SENTENCE_EXTRAS
    else:
        assert_embeddings(embeddings, variants[name])


@pytest.mark.oracle
def test_live_fifty_texts(minilm: Any, recorded: npt.NDArray[np.float32]) -> None:
    """`sentence-transformers`, today and as recorded, on 50 texts: empty, blank, many scripts, emoji, code, 600 words.

    And on 50 more made of their words."""
    st = importlib.import_module("sentence_transformers")
    model = st.SentenceTransformer(str(minilm_directory()), device="cpu")
    more = [texts.words(3 * i + 1, seed=i) for i in range(50)]
    for batch in (texts.fifty(), more):
        assert_embeddings(minilm.embed(batch), model.encode(batch, show_progress_bar=False))
    assert_embeddings(minilm.embed(texts.fifty()), recorded)
    assert np.asarray(minilm.embed([])).shape == (0, 384)
    assert_embeddings(model.encode(texts.fifty(), show_progress_bar=False), recorded)

"""The scripts of `examples/`, which users start from: the numbers of transformers and PEFT, recorded and live."""

import functools
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from tests.oracles import adapters, checkpoints, hugging_face, vision
from tests.oracles.comparing import assert_close
from tests.oracles.hugging_face import Checkpoint
from tests.oracles.make_fixtures import tiny
from tests.oracles.recorded import load_record

EXAMPLES = Path(__file__).parents[1] / "examples"
GPT2 = checkpoints.FIXTURES / "gpt2" / "bare_v4"
CLIP, LLAMA = vision.VISION / "dual" / "clip", checkpoints.FIXTURES / "llama" / "gqa_tied_llama3_v5"
pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning")


@functools.cache
def example(name: str) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: Any) -> None:
    """The script as a reader runs it, in this process."""
    source = (EXAMPLES / f"{name}.py").read_text("utf-8")
    module = ModuleType("__main__")
    before, sys.argv = sys.argv, [f"{name}.py", *map(str, arguments)]
    try:
        exec(compile(source, f"{name}.py", "exec", dont_inherit=True), vars(module))
    finally:
        sys.argv = before


@functools.cache
def causal(name: str, directory: Path) -> rlx.CausalLM:
    """The model of one of the two scripts that generate."""
    return rlx.CausalLM(getattr(example(name), name)(directory))


def shown_pairs(side: int, end: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Sixteen texts of two words and an end, and an image of one noisy colour for each."""
    rng, ids = np.random.default_rng(0), np.arange(16)
    images = rng.normal(size=(16, 3, 1, 1)) + 0.1 * rng.normal(size=(16, 3, side, side))
    return np.stack([3 + ids % 4, 20 + ids // 4, np.full(16, end)], axis=1), images.astype("f4")


def test_all_are_here(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that nobody runs would rot. Without arguments each says what is to be given, with status 2; `search.py`,
    the demo, takes none."""
    paths = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert set(paths) == {"gpt2", "clip", "mixtral", "lora", "explicit_cache", "search", "ray_batch"}
    del paths["search"]
    for path in paths.values():
        with pytest.raises(SystemExit) as left:
            run(path.stem)
        assert left.value.code == 2 and f"usage: {path.name} [-h] " in capsys.readouterr().err


@pytest.mark.slow
def test_a_cache_that_the_caller_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """Padded to a bucket, it gives the tokens of `generate`."""
    run("explicit_cache", LLAMA)
    assert capsys.readouterr().out == f"{rlx.load(LLAMA).generate([3, 1, 4], 16)}\n"


def test_greedy_tokens() -> None:
    """Of a ragged batch, with a cache: those of transformers."""
    record = load_record(GPT2)
    rows = [row[:n].tolist() for row, n in zip(record["ragged_tokens"], record["ragged_lengths"], strict=True)]
    assert causal("gpt2", GPT2).generate(rows, max_new_tokens=24) == record["greedy"].tolist()


def test_both_towers() -> None:
    """Vectors of unit length and the similarity, as transformers' CLIPModel gives them."""
    record = load_record(CLIP)
    out = rlx.compile(example("clip").clip(CLIP))(record["ids"], record["pixels"])
    for name, key in (("logits", "logits"), ("text_embeds", "text_embeds"), ("image_embeds", "image_embeds")):
        assert_close(out[name], record[key])


@pytest.mark.slow
def test_clip_trains() -> None:
    """In 30 steps the loss of pairs falls, at the temperature that CLIP begins with; that of the record is about 1."""
    clip, source = example("clip"), rlx.open_weights(CLIP)
    weights = {key: source.read(key) for key in source.keys()} | {"logit_scale": np.array(np.log(1 / 0.07), "f4")}
    _, losses = clip.train(clip.clip(CLIP).with_weights(weights), *shown_pairs(16, 60), rate=3e-3)
    assert len(losses) == 30 and losses[0] > 2.5 and losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_lora_from_text_to_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script as it is run: the loss falls, the adapter loads, and so does what is merged; both say the same."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 60, "utf-8")
    run("lora", LLAMA, tmp_path / "text.txt", tmp_path / "runs" / "it")
    first, _, last = capsys.readouterr().out.split()
    assert float(last) < 0.5 * float(first)
    tokens = load_record(LLAMA)["tokens"]
    adapted = rlx.compile(rlx.lora(rlx.recipe_for(LLAMA), adapter=tmp_path / "runs" / "it"))(tokens)
    merged = rlx.load(tmp_path / "runs" / "it-merged")
    assert np.abs(np.asarray(adapted) - load_record(LLAMA)["logits"]).max() > 0.1
    assert_close(merged.logits(tokens), np.asarray(adapted))
    assert merged.tokenizer is not None


LIVE = {
    "gpt2": tiny(
        "GPT2LMHeadModel", 21, vocab_size=71, n_positions=37, n_embd=35, n_layer=2, n_head=5, n_inner=52,
    ),
    "mixtral": tiny(
        "MixtralForCausalLM", 22, 67, 36, 27, 2, 6, 3, 10, num_local_experts=7, num_experts_per_tok=3,
        sliding_window=None,
    ),
}  # fmt: skip


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("name", LIVE)
def test_live_causal(name: str, tmp_path: Path) -> None:
    """Logits and tokens of random models of odd sizes."""
    hugging_face.write(LIVE[name], tmp_path / "it")
    theirs = hugging_face.load(tmp_path / "it", "AutoModelForCausalLM")
    rows, greedy = hugging_face.clear_prompts(theirs, (9,), 8, 3, distinct=4)
    lm = causal(name, tmp_path / "it")
    assert_close(lm.logits(np.array(rows)), hugging_face.llama_batch(theirs, np.array(rows))[1])
    assert lm.generate(rows, max_new_tokens=8) == greedy


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("name", ["clip", "clip_oldest"])
def test_live_towers(name: str, tmp_path: Path) -> None:
    """Other sizes, and both rules of where a text ends."""
    torch = importlib.import_module("torch")
    config = vision.towers({"projection_dim": 11}, {}, {"image_size": 15, "patch_size": 5, "num_hidden_layers": 3})
    config["text_config"]["eos_token_id"] = 60 if name == "clip" else 2
    hugging_face.write(Checkpoint("CLIPModel", config, seed=23), tmp_path / "it")
    theirs = hugging_face.load(tmp_path / "it", "CLIPModel")
    rng = np.random.default_rng(4)
    ids, pixels = rng.integers(3, 60, (4, 9)), rng.normal(size=(3, 3, 15, 15)).astype("f4")
    ids[np.arange(4), [8, 3, 5, 1]] = 60
    with torch.no_grad():
        want = theirs(input_ids=torch.tensor(ids), pixel_values=torch.tensor(pixels))
    out = rlx.compile(example("clip").clip(tmp_path / "it"))(ids, pixels)
    assert_close(out["logits"], want.logits_per_text.numpy())
    assert_close(out["text_embeds"], want.text_embeds.numpy())
    assert_close(out["image_embeds"], want.image_embeds.numpy())


@pytest.mark.oracle
def test_live_lora(tmp_path: Path) -> None:
    """What the script trains, PEFT loads, with equal logits, merged too."""
    peft, lora = importlib.import_module("peft"), example("lora")
    tokens = load_record(adapters.BASE)["tokens"]
    model, losses = lora.fine_tune(adapters.BASE, tokens.astype("i4"), steps=8)
    assert losses[-1] < 0.9 * losses[0]
    rlx.save_lora(model, tmp_path / "adapter")
    rlx.save(lora.merge(adapters.BASE, model), tmp_path / "merged")
    theirs = peft.PeftModel.from_pretrained(
        hugging_face.load(adapters.BASE, "AutoModelForCausalLM"), tmp_path / "adapter"
    ).eval()
    assert_close(model(tokens), adapters.first_output(theirs, tokens))
    merged = hugging_face.load(tmp_path / "merged", "AutoModelForCausalLM")
    assert_close(adapters.first_output(theirs.merge_and_unload(), tokens), adapters.first_output(merged, tokens))


def test_passages_are_the_first_paragraphs() -> None:
    """Paragraphs are joined until they have some length; a title is left out of what is shown."""
    search = example("search")
    long = "word " * 100
    text = f"The title\n*********\n\n{long}\n\nshort\n\n{long}\n\nthe end\n"
    first, second, third = search.split_passages({"topic": text}, 5)
    assert first.summary == long.strip() and first.topic == "topic"
    assert second.text.startswith("short\n\nword") and third.text == "the end"
    assert search.split_passages({"topic": text, "other": long}, 1) == [first, search.Passage("other", long.strip())]


@pytest.mark.slow
def test_the_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds what `try` does, tells a share of the peak, and nothing is over 80 columns or coloured in a file."""
    search = example("search")
    names = {"break", "continue", "for", "while", "try", "raise", *sorted(topics)[::9]}
    monkeypatch.setattr(search, "topics", {name: topics[name] for name in sorted(names)})
    assert search.main(1) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines()) and "\x1b" not in out
    answer = dict(re.findall(r"^  (How .*\?)\n    0\.\d\d  help\('(.*?)'\)", out, re.MULTILINE))
    assert answer["How do I leave a loop early?"] in ("break", "continue", "for", "while")
    assert answer["How do I run code whether or not an exception was raised?"] in ("try", "raise")
    (share,) = re.findall(r"the model reaches (\d+)% of it", out)
    assert 1 <= int(share) <= 200
    cosines = [float(c) for c in re.findall(r"cosine (0\.\d\d)", out)]
    assert len(cosines) == len(search.QUESTIONS) and all(0.2 < c < 0.99 for c in cosines)

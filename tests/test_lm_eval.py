"""`rlx_jax.eval.LMEval` against the harness's own `hf` model, on tasks of local JSON; nothing is downloaded."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors, eval
from tests.oracles import checkpoints

TIED = checkpoints.FIXTURES / "llama" / "gqa_tied_llama3_v5"
WORDS = "The sky is blue and the sea is deep green where old ships go down to sleep".split()


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said where it is wanted."""
    monkeypatch.setattr(eval, "IMPORT_ERROR", ModuleNotFoundError("lm_eval", name="lm_eval"))
    with pytest.raises(errors.UnsupportedError, match=r"pip install 'rlx-jax\[eval\]'"):
        eval.LMEval(rlx.load(TIED))


def sentences(rng: np.random.Generator, count: int, longest: int) -> list[str]:
    """Of random words."""
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest)).tolist()) for _ in range(count)]


def write_tasks(folder: Path) -> None:
    """Tasks that ask all three kinds of questions, with their data beside them."""
    rng = np.random.default_rng(3)
    questions: list[dict[str, Any]] = [
        {"q": q, "choices": sentences(rng, 3, 4), "label": int(rng.integers(3)), "text": t}
        for q, t in zip(sentences(rng, 3, 30), sentences(rng, 3, 90), strict=True)
    ]
    data = folder / "data.json"
    data.write_text("\n".join(json.dumps(question) for question in questions), "utf-8")
    data_files = {"data_files": {"test": str(data)}}
    common: dict[str, Any] = {"dataset_path": "json", "dataset_kwargs": data_files, "test_split": "test"}
    common |= {"num_fewshot": 0}
    tasks: dict[str, dict[str, Any]] = {
        "local_choice": {
            "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_target": "label",
            "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}],
        },
        "local_rolling": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "local_until": {
            "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "exact_match"}],
            "generation_kwargs": {"until": ["a", "\n"], "max_gen_toks": 12, "do_sample": False},
        },
    }  # fmt: skip
    for name, task in tasks.items():
        # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}), "utf-8")


@pytest.mark.oracle
def test_it_answers_as_the_hf_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request and each metric; texts over the model's positions, empty contexts, flags, texts until a string."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    write_tasks(tmp_path)
    ours = eval.LMEval(rlx.load(TIED), batch_size=4)
    theirs = HFLM(pretrained=str(TIED), device="cpu", dtype="float32", batch_size=8)
    assert ours.max_length == theirs.max_length == 128
    assert (ours.eot_token_id, ours.prefix_token_id) == (theirs.eot_token_id, theirs.prefix_token_id)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    names: list[Any] = ["local_choice", "local_rolling", "local_until"]
    mine, wanted = (
        lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True)
        for model in (ours, theirs)
    )
    for name in names:
        for metric, value in wanted["results"][name].items():
            if isinstance(value, float):
                np.testing.assert_allclose(mine["results"][name][metric], value, rtol=1e-4, err_msg=f"{name} {metric}")
        for a, b in zip(mine["samples"][name], wanted["samples"][name], strict=True):
            compare(a["resps"], b["resps"])

    letters = [("The sky is blue and", letter) for letter in (" a", " b", "c")]
    odd = [*letters, ("", "blue"), ("The sky ", "is"), ("sky " * 200, " blue"), ("The", " sky" * 30)]
    asked = [SimpleNamespace(args=pair) for pair in odd]
    compare(ours.loglikelihood(asked), theirs.loglikelihood(asked))  # greedy texts have the flag
    greedy = [
        SimpleNamespace(args=(q, theirs.generate_until([SimpleNamespace(args=(q, {"max_gen_toks": 5}))])[0]))
        for q in ("The sky", "blue")
    ]
    compare(ours.loglikelihood(greedy), theirs.loglikelihood(greedy))


@pytest.mark.oracle
def test_its_arguments() -> None:
    """Shorter rows as those of the `hf` model; default lengths, seeds and batches; what is refused is named."""
    from lm_eval.models.huggingface import HFLM

    lm = rlx.load(TIED)
    short = eval.LMEval(lm, batch_size=2, max_length=24, max_gen_toks=6, seed=1)
    theirs = HFLM(pretrained=str(TIED), device="cpu", dtype="float32", batch_size=8, max_length=24)
    text = [SimpleNamespace(args=(" ".join(WORDS * 4),))]
    compare(short.loglikelihood_rolling(text), theirs.loglikelihood_rolling(text))
    assert short.loglikelihood_rolling(text) != eval.LMEval(lm).loglikelihood_rolling(text)

    def ask(model: Any, **wanted: Any) -> list[str]:
        return model.generate_until([SimpleNamespace(args=(q, wanted)) for q in ("The sky", " ".join(WORDS * 2))])

    assert ask(short) == ask(short, max_gen_toks=6) == ask(theirs, max_gen_toks=6) != ask(short, max_gen_toks=3)
    drawn = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "max_gen_toks": 8}
    other = eval.LMEval(lm, batch_size=2, max_length=24, seed=2)
    assert ask(short, **drawn) != ask(other, **drawn)

    with pytest.raises(errors.RequestError, match="arguments of generation 'num_beams'"):
        ask(short, num_beams=2)
    with pytest.raises(errors.SequenceLengthError, match="24 new tokens, and a row has 24"):
        ask(short, max_gen_toks=24)
    with pytest.raises(errors.RequestError, match="cannot continue an assistant"):
        short.apply_chat_template([{"role": "assistant", "content": "a"}], add_generation_prompt=False)
    with pytest.raises(errors.SequenceLengthError, match="max_length is 129; the model has 128"):
        eval.LMEval(lm, max_length=129)
    with pytest.raises(errors.RequestError, match="got int"):
        eval.LMEval(3)  # type: ignore[arg-type]
    with pytest.raises(errors.RequestError, match="has no tokenizer"):
        eval.LMEval(rlx.CausalLM(lm.model, eos_ids=1))
    with pytest.raises(errors.RequestError, match="has no end token"):
        lm.eos_ids = ()
        eval.LMEval(lm)


def compare(mine: Any, wanted: Any) -> None:
    """Numbers within 1e-4, flags and texts equal, in lists of lists."""
    if isinstance(wanted, list | tuple):
        assert len(mine) == len(wanted)
        for a, b in zip(mine, wanted, strict=True):
            compare(a, b)
    elif isinstance(wanted, float):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4)
    else:
        assert mine == wanted

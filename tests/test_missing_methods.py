"""A method or an argument that a class lacks: the error names what to use."""

import pytest

import rlx_jax as rlx
from rlx_jax.text.token_model import METHOD_CLASSES, TaskModel


def test_a_missing_method_names_the_classes_that_have_it() -> None:
    """Each class that the table names has the method; a model of any other class says so, and what it has instead."""
    classes = {name for names in METHOD_CLASSES.values() for name in names}
    for method, names in METHOD_CLASSES.items():
        for name in classes:
            model = object.__new__(getattr(rlx, name))
            assert hasattr(type(model), method) == (name in names), (name, method)
            if name not in names:
                with pytest.raises(AttributeError, match=f"'{name}' .*{method}.*rlx_jax.{names[0]}.*this model has: "):
                    getattr(model, method)
    with pytest.raises(AttributeError, match=r"'CausalLM' object has no attribute 'genrate'; did you mean 'generate'"):
        getattr(object.__new__(rlx.CausalLM), "genrate")  # noqa: B009 - a type checker refuses the attribute
    assert not hasattr(object.__new__(rlx.Encoder), "__wrapped__")


def test_a_suggestion_is_a_public_attribute() -> None:
    """Also one that only the instance has; a private one is no suggestion."""
    model = object.__new__(rlx.CausalLM)
    model.tokenizer = None
    with pytest.raises(AttributeError, match=r"no attribute 'tokeniser'; did you mean 'tokenizer'\?$"):
        getattr(model, "tokeniser")  # noqa: B009
    with pytest.raises(AttributeError, match="no attribute 'methods'$"):
        getattr(model, "methods")  # noqa: B009


def test_a_property_that_fails_keeps_its_error() -> None:
    class Broken(TaskModel):
        @property
        def width(self) -> int:
            return None.width  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'width'"):
        _ = Broken().width


def test_device_is_not_an_argument() -> None:
    with pytest.raises(TypeError, match=r"load\(\) got .* argument 'device'; use .*default_device.*mesh="):
        rlx.load("nowhere", device="cpu")

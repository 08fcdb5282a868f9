"""What the API reference is made of: every public name says what it takes, gives and raises."""

import ast
import importlib
import inspect
import re
import textwrap

import pytest

from tools import make_docs

EVERYWHERE = {"backend"}  # the same argument of every op, explained in rlkernels.backend


def public_names():
    """Yield every public function and class, each once, with its name as id."""
    documented = set()
    for module_name in make_docs.importable(make_docs.public_modules()):
        module = importlib.import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isfunction(value) or inspect.isclass(value)) and value not in documented:
                documented.add(value)
                yield pytest.param(value, id=f"{module_name}.{name}")


def sections(text):
    """Return Google's sections of a docstring: heading -> lines below it."""
    return dict(re.findall(r"^(Args|Returns|Yields|Raises):\n((?:(?: .*)?(?:\n|$))+)", text, re.MULTILINE))


def raises(function):
    """Return whether the function itself raises, or checks its arguments."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
    has_raise = any(isinstance(node, ast.Raise) for node in ast.walk(tree))
    return has_raise or any(name.startswith("_check") for name in calls)


@pytest.mark.parametrize("value", list(public_names()))
def test_docstring_is_complete(value):
    text = inspect.getdoc(value) or ""
    assert text.strip(), "no docstring"
    if inspect.isclass(value):
        for name, method in vars(value).items():
            if not name.startswith("_") and inspect.isfunction(method):
                assert (inspect.getdoc(getattr(value, name)) or "").strip(), f"{name} has no docstring"
        return
    named_sections = sections(text)
    signature = inspect.signature(value)
    for name in signature.parameters.keys() - EVERYWHERE:
        line = rf"^ +[\w, *]*\b{name}\b[\w, ]*:"
        assert re.search(line, named_sections.get("Args", ""), re.MULTILINE), f"Args lacks {name}"
    if signature.return_annotation not in (None, inspect.Signature.empty):
        assert named_sections.keys() & {"Returns", "Yields"}
    if raises(value):
        assert "Raises" in named_sections


def test_links_of_a_page_lead_into_the_site():
    page = make_docs.ROOT / "docs" / "trust.md"
    text = "[a](scale.md#x) [b](../README.md) [c](../setup.py) ![d](images/trl.png) [e](https://x.y)\n```\n[f](g)\n```"
    assert make_docs.rewrite_links(text, page) == (
        "[a](scale.md#x) [b](index.md) c ![d](images/trl.png) [e](https://x.y)\n```\n[f](g)\n```"
    )
    with pytest.raises(FileNotFoundError, match=r"docs/trust.md links to gone.md"):
        make_docs.rewrite_links("[a](gone.md)", page)


@pytest.mark.parametrize("part", make_docs.TRAINER)
def test_a_page_of_the_trainer_has_a_module_and_an_introduction(part):
    assert importlib.import_module(f"python_trainer.{part}").__doc__

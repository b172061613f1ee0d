"""The budget of tokens: how much code the project may have, and how dense it may be.

A feature that does not fit takes the tokens of another one. `python -m tests.support.code_size` prints the
packages and the places that break a limit.
"""

from functools import cache

import pytest

from tests.support.code_size import (
    PRODUCT,
    Size,
    complex_functions,
    files_of,
    long_statements,
    size_of,
    sizes_by_package,
    table,
)
from tests.support.sources import ROOT

MAX_TOKENS = 333_975
"""Tokens of the product."""
MAX_TOKENS_PER_LINE = 10.0
MAX_TOKENS_PER_STATEMENT = 13.0
MAX_TEST_TOKENS_PER_LINE = 11.0
MAX_COMPLEX_FUNCTIONS = 120
MAX_SKIPS = 20
"""Tables of data in the product that the formatter leaves alone."""


@cache
def product() -> dict[str, Size]:
    """Measure the packages of the product once."""
    return sizes_by_package(PRODUCT)


def test_the_product_keeps_its_budget_of_tokens() -> None:
    total = sum(product().values(), Size())
    if total.tokens > MAX_TOKENS:
        pytest.fail(f"more than {MAX_TOKENS:,} tokens:\n{table(product())}", pytrace=False)


def test_no_package_is_dense() -> None:
    dense = {
        name: size
        for name, size in product().items()
        if size.tokens_per_line > MAX_TOKENS_PER_LINE
        or size.tokens_per_statement > MAX_TOKENS_PER_STATEMENT
    }
    assert not dense, table(dense)


def test_no_test_is_dense() -> None:
    sizes = sizes_by_package(("tests",))
    assert sizes["tests"].tokens_per_line <= MAX_TEST_TOKENS_PER_LINE, table(sizes)


def test_no_statement_is_long() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {count} tokens"
        for path in files_of(PRODUCT)
        for line, count in long_statements(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_few_functions_are_complex() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name} {complexity}"
        for path in files_of(PRODUCT)
        for line, name, complexity in complex_functions(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MAX_COMPLEX_FUNCTIONS, "\n".join(found)


def test_the_formatter_is_rarely_switched_off() -> None:
    assert sum(product().values(), Size()).skips <= MAX_SKIPS, table(product())


def test_prose_imports_and_layout_count_as_no_tokens() -> None:
    text = '"""Docstring."""\n\nimport os\n\n# comment\nx = 1\n"""About x."""\n'
    assert size_of(text) == Size(tokens=3, code_lines=1, statements=1)


def test_a_statement_counts_without_its_body_and_data_not_at_all() -> None:
    names = ", ".join(f"n{i}" for i in range(30))
    assert long_statements(f"table = ({names})\n") == []
    assert long_statements(f"value = f({names})\n") == [(1, 64)]
    body = "\n".join(f"    n{i} = {i}" for i in range(30))
    assert long_statements(f"def f():\n{body}\n") == []


def test_a_branching_function_is_complex() -> None:
    branches = "\n".join(f"    if x == {i}:\n        return {i}" for i in range(10))
    assert complex_functions(f"def f(x):\n{branches}\n") == [(1, "f", 11)]
    assert complex_functions(f"def f(x):\n{branches[: branches.rfind('    if')]}\n") == []

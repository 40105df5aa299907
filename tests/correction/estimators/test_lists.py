"""What an estimator's class alone does not bring: the lines of public names and pages, each named if it is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import milvus_hubness
from milvus_hubness.basics.estimator_names import own_estimators
from milvus_hubness.correction.estimators.base import ALIASES, ESTIMATORS
from milvus_hubness.errors import InvalidParameter
from tests.docs import pages

ROOT = Path(__file__).parents[3]
OWN = pytest.mark.parametrize("estimator", own_estimators(), ids=lambda one: one.class_name)


def text_of(path):
    return (ROOT / path).read_text("utf-8")


def test_the_files_name_the_classes_that_register_themselves():
    own = {
        name for name, kind in ESTIMATORS.items() if kind.__module__.startswith("milvus_hubness.")
    }
    assert {estimator.class_name: estimator.alias for estimator in own_estimators()} == {
        name: alias for alias, name in ALIASES.items() if name in own
    }


@OWN
def test_an_estimator_is_a_public_name(estimator):
    name = estimator.class_name
    line = f"from {estimator.module} import {name} as {name}"
    assert name in dir(milvus_hubness), f"milvus_hubness/__init__.pyi lacks: {line}"


@OWN
def test_an_estimator_is_in_the_table_of_methods(estimator):
    """The table of this page holds what is known, and no more."""
    rows = pages.table_rows(text_of("docs/how-to/choose-a-method.md"), "Methods")
    listed = {re.search(r"`(\w+)", row[0])[1]: re.match(r"`(\w+)", row[1])[1] for row in rows}
    assert listed.get(estimator.alias) == estimator.class_name, (
        f"docs/how-to/choose-a-method.md lacks: | `{estimator.alias}` | `{estimator.class_name}(…)` | …"
    )
    assert listed.keys() <= {own.alias for own in own_estimators()}


@OWN
def test_an_estimator_is_in_the_reference_of_the_api(estimator):
    reference = text_of("docs/reference/python.md")
    assert re.search(rf"^::: \S+\.{estimator.class_name}$", reference, re.MULTILINE), (
        f"docs/reference/python.md lacks: ::: {estimator.module}.{estimator.class_name}"
    )


@OWN
def test_an_estimator_is_a_choice_in_the_reference_of_the_configuration(estimator):
    [row] = re.findall(r"^\| `method` \|.*$", text_of("docs/reference/configuration.md"), re.M)
    assert f"`{estimator.alias}`" in row, (
        f"docs/reference/configuration.md, key `method`, lacks: `{estimator.alias}`"
    )


def test_two_estimators_of_one_name_are_refused():
    from milvus_hubness.correction.estimators import Estimator

    for name, alias in (("Another", "csls"), ("CSLS", "another")):
        with pytest.raises(InvalidParameter, match=r"taken by milvus_hubness\..*csls\.CSLS"):
            type(name, (Estimator,), {"__module__": "elsewhere"}, alias=alias)
    assert ALIASES["csls"] == "CSLS"
    assert "another" not in ALIASES

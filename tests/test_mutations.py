"""The list of mutations fits the code: every place is there, every test exists. `make mutate` runs them."""

import pathlib
import re

import pytest

from tests.mutations import MUTATIONS

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m.what for m in MUTATIONS])
def test_the_place_and_the_test_exist(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    path, _, name = mutation.test.partition("::")
    assert (ROOT / path).is_file()
    assert not name or re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M)


def test_each_is_told_apart():
    assert len({m.what for m in MUTATIONS}) == len(MUTATIONS)

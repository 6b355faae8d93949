"""Fingerprints differ where two pipelines do in any one place, and nowhere else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from tests import data_fingerprint_test
from tests.made_pipelines import RECIPES, fingerprint_of, pairs, plain
from tfamp.data.fingerprints import fingerprint

ROOT = Path(__file__).parents[1]
SETTINGS = hypothesis.settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)


def differ(pair):
    one, other = pair
    found = fingerprint_of(one)
    assert found.digest == fingerprint_of(plain(one)).digest
    assert found.digest != fingerprint_of(other).digest
    assert found.unseen == ()


@hypothesis.settings(SETTINGS, max_examples=40)
@hypothesis.given(pairs())
def test_what_differs_in_one_place_has_another_fingerprint(pair):
    differ(pair)


@pytest.mark.whole("the same with fewer examples, above")
@hypothesis.settings(SETTINGS, max_examples=400)
@hypothesis.given(pairs())
def test_what_differs_in_one_place_has_another_fingerprint_in_many(pair):
    differ(pair)


def digests(recipes):
    """Returns the digests of recipes, and of all that other tests make, as JSON."""
    makers = data_fingerprint_test.MAKERS.values()
    found = [fingerprint_of(recipe).digest for recipe in recipes]
    return json.dumps(found + [fingerprint(make(1)).digest for make in makers])


def test_another_process_gives_the_same_fingerprints():
    recipes = []

    @hypothesis.settings(SETTINGS, max_examples=25)
    @hypothesis.given(RECIPES)
    def collect(recipe):
        recipes.append(plain(recipe))

    collect()
    program = (
        "import json, sys; from tests.data_fingerprint_property_test import digests; "
        "print(digests(json.load(sys.stdin)))"
    )
    # Hashes of strings, which order sets, are others there.
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "7"},
        input=json.dumps(recipes),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == digests(recipes)

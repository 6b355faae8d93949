"""Error rates of verdicts where the truth is known, simulated in NumPy and printed."""

import importlib.util
from pathlib import Path

import pytest

from tfamp.evidence.looks import rate_of

pytest.importorskip("scipy")


def load():
    """Returns benchmarks/verdict_rates.py as a module, without running it."""
    path = Path(__file__).parents[1] / "benchmarks" / "verdict_rates.py"
    spec = importlib.util.spec_from_file_location("verdict_rates", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RATES = load()
MOST_FALSE = 0.05


@pytest.mark.parametrize("name", RATES.SETTINGS)
def test_false_claims_are_at_most_one_in_twenty(name):
    comparisons = 40 if "report" in name else 100 if "examples" in name else 300
    rate = RATES.rate(name, comparisons)
    print(f"{100 * rate:.1f} % of {comparisons} comparisons: {name}")
    assert rate <= MOST_FALSE


def test_whoever_chooses_when_to_look_errs_in_at_most_one_of_twenty():
    rate = RATES.worst_choice_of_seeds(5, points=121)
    print(f"{100 * rate:.1f} % of comparisons whose looks are chosen so as to err")
    assert MOST_FALSE / 2 < rate <= MOST_FALSE

    # Half of what is left at each look is too much, though it adds up to 5 %.
    def halves(look):
        return MOST_FALSE / 2**look

    assert RATES.worst_choice_of_seeds(5, rate_of=halves, points=121) > MOST_FALSE
    assert sum(rate_of(look) for look in range(1, 99)) < MOST_FALSE


def test_what_is_the_same_is_mostly_called_as_accurate():
    given = {"seeds": 5, "examples": 10_000, "loss": 0.0, "flips": 0.01}
    rng = RATES.np.random.default_rng(0)
    found = [RATES.is_called_equivalent(rng, **given) for _ in range(50)]
    assert sum(found) > 0.9 * len(found)

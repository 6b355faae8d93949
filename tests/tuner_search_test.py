"""The search for the fewest layers in float32, against exhaustive search and others."""

import itertools

import numpy as np

from tfamp.tuning.search import Evaluation, Search, Suspect


def suspects(errors, guilty, savings=None):
    savings = savings if savings is not None else [0.1] * len(errors)
    return [Suspect(str(i), e, savings[i], i in guilty) for i, e in enumerate(errors)]


class World:
    """Models in which some layers really need float32, whatever a ranking says."""

    def __init__(self, needed):
        self.needed = {str(i) for i in needed}
        self.asked = []

    def __call__(self, float32):
        self.asked.append(float32)
        holds = self.needed <= set(float32)
        worse = 0.0 if holds else 0.5
        return Evaluation(tuple(float32), worse, worse, holds, 100)


def run(world, given, **options):
    search = Search(given, world, **{"max_evaluations": 11, **options})
    return search.run(), search


def test_guilty_layers_that_are_needed_stay_and_others_are_given_back():
    given = suspects([5.0, 0.01, 4.0, 0.02, 3.0], {0, 2, 4})
    best, search = run(World([0, 4]), given)
    assert set(best.float32) == {"0", "4"}
    assert len(search.tried) <= 6


def test_layers_that_the_ranking_missed_are_found_by_doubling():
    errors = [0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02]
    best, search = run(World([3]), suspects(errors, []))
    assert "3" in best.float32
    assert [len(each.float32) for each in search.tried[:4]] == [0, 1, 3, 7]


def test_layers_taken_in_on_the_way_to_a_missed_one_are_given_back_at_once():
    """Two are guilty, the tenth as well, which the ranking holds for harmless."""
    errors = [5.0, 4.0, *np.linspace(0.09, 0.01, 15)]
    best, search = run(World([0, 1, 9]), suspects(errors, {0, 1}))
    assert set(best.float32) == {"0", "1", "9"}
    assert len(search.tried) <= 11


def test_a_saving_that_no_clock_sees_is_not_worth_an_evaluation():
    given = suspects([5.0, 4.0], {0, 1}, savings=[1e-5, 1e-5])
    best, search = run(World([]), given, min_saving=0.005)
    assert set(best.float32) == {"0", "1"} and len(search.tried) == 1


def test_random_models_keep_most_of_the_best_saving_in_few_evaluations():
    """60 models of 8 layers, rankings that err in one of ten layers."""
    generator = np.random.default_rng(0)
    shares, counts = [], []
    for _ in range(60):
        number = generator.integers(0, 4)
        needed = {*generator.choice(8, size=number, replace=False).tolist()}
        errors = np.where([i in needed for i in range(8)], 1.0, 0.01)
        errors *= generator.lognormal(0, 1, 8)
        guilty = {i for i in range(8) if (i in needed) != (generator.random() < 0.1)}
        savings = generator.uniform(0.02, 0.2, 8)
        world = World(needed)
        best, search = run(world, suspects(errors, guilty, savings), min_saving=0.005)
        assert best is not None and world(best.float32).holds
        sets = (s for n in range(9) for s in itertools.combinations(range(8), n))
        most = max(
            sum(savings) - savings[list(s)].sum() for s in sets if needed <= set(s)
        )
        kept = sum(savings) - sum(savings[int(path)] for path in best.float32)
        shares.append(kept / most)
        counts.append(len(search.tried) + 1)  # and the one on fresh data
    assert np.mean(shares) >= 0.9
    assert max(counts) <= 12

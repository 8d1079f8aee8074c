"""Rules against plain references, in any order of updates, with weights, and the bounds that their docstrings state."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.byzantine import (
    AdaptiveClipping,
    Bucketing,
    Bulyan,
    CenteredClipping,
    CovarianceFilter,
    DistinctUpdates,
    GeometricMedian,
    Krum,
    MeaMed,
    Mean,
    Median,
    MinimumDiameter,
    MultiKrum,
    NearestNeighbourMixing,
    Rule,
    TrimmedMean,
    parse,
)
from holdfast.byzantine.attacks import attack_named
from holdfast.byzantine.rules.covering import smallest_diameter
from holdfast.byzantine.rules.words import LAST
from holdfast.byzantine.weighting import WEIGHT_RATIO_MAX, bounded
from tests.byzantine import references

WORDS = sorted(references.RULES)


def draw_updates(seed: int, n: int, f: int, d: int, kind: str) -> torch.Tensor:
    """n - f updates around a point, f of a kind somewhere among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator) + torch.randn(d, generator=generator)
    hostile = torch.randperm(n, generator=generator)[:f]
    if kind == "far":
        x[hostile] = 1e4 * torch.randn(f, d, generator=generator)
    elif kind == "together":
        x[hostile] = 20.0 * torch.randn(d, generator=generator)
    elif kind == "near":
        x[hostile] = x.mean(dim=0) - 1.2 * x.std(dim=0, correction=0)
    elif kind == "huge":
        x[hostile] = 1e20 * torch.randn(f, d, generator=generator).sign()
    return x


def value(rule: Rule, x: torch.Tensor, f: int, weights: list[float] | None = None) -> torch.Tensor:
    found = rule.aggregate(x, f, weights).value
    assert isinstance(found, torch.Tensor)
    return found


def close(found: torch.Tensor, expected: references.Array) -> bool:
    scale = max(1.0, float(np.max(np.abs(expected))))
    return bool(np.max(np.abs(found.double().numpy() - expected)) <= 1e-5 * scale)


@pytest.mark.parametrize("word", WORDS)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    f=st.integers(0, 2),
    more=st.integers(0, 3),
    d=st.integers(1, 40),
    kind=st.sampled_from(["alike", "far", "together", "near"]),
)
def test_a_rule_gives_what_its_definition_says(word: str, seed: int, f: int, more: int, d: int, kind: str) -> None:
    rule = parse(word)
    n = rule.least(f) + more
    x = draw_updates(seed, n, f, d, kind)
    if word == "caf" and d == 1:
        d = 2
        x = draw_updates(seed, n, f, d, kind)
    if word.startswith("distinct"):  # with few numbers all may be nearly alike, and then what is a copy hangs by a hair
        x = draw_updates(seed, n, f, d + 8, kind)
    assert close(value(rule, x, f), references.RULES[word](x.double().numpy(), f))


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), f=st.integers(0, 3), kind=st.sampled_from(["alike", "far", "together", "near"]))
def test_no_point_nearby_has_a_smaller_sum_of_distances(seed: int, f: int, kind: str) -> None:
    x = draw_updates(seed, 2 * f + 4, f, 12, kind)
    plain = x.double().numpy()
    found = value(GeometricMedian(), x, f).double().numpy()
    best = references.sum_of_distances(plain, references.geometric_median(plain, f))
    assert references.sum_of_distances(plain, found) <= best * (1.0 + 1e-6)


@pytest.mark.parametrize("word", [*WORDS, "geometric-median", "nnm+geometric-median"])
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    order=st.permutations(range(13)),
    kind=st.sampled_from(["alike", "far", "together"]),
)
def test_the_order_of_updates_does_not_matter(word: str, seed: int, order: list[int], kind: str) -> None:
    rule, x = parse(word), draw_updates(seed, 13, 2, 300, kind)
    one, other = rule.aggregate(x, 2), rule.aggregate(x[order], 2)
    trusted, scores = ([given[number] for number in order] for given in (one.trusted, one.scores))
    if word == "mda" and trusted != list(other.trusted):  # several subsets may have the same diameter
        diameters = [torch.cdist(kept, kept).max() for kept in (x[list(one.trusted)], x[order][list(other.trusted)])]
        assert torch.isclose(*diameters) and sum(trusted) == sum(other.trusted)
        return
    if word == "bulyan":  # the last that is chosen is one of two that are each other's nearest, with the same score
        turns = [[min(score, 8) for score in given] for given in (scores, other.scores)]
        assert turns[0] == turns[1]
    if word != "bulyan" or trusted == list(other.trusted):
        assert torch.allclose(one.value, other.value, rtol=0, atol=1e-6 * max(1.0, float(one.value.abs().max())))
    if word not in ("bulyan", "nnm+krum"):  # two that are mixed alike have the same score
        assert trusted == list(other.trusted)


ROBUST = [
    Median(),
    TrimmedMean(),
    MeaMed(),
    GeometricMedian(),
    Krum(),
    Krum(left_out=1),
    MultiKrum(),
    MultiKrum(keep=2),
    Bulyan(),
    MinimumDiameter(),
    NearestNeighbourMixing(then=TrimmedMean()),
    NearestNeighbourMixing(then=Krum(left_out=1)),
    NearestNeighbourMixing(then=Median()),
    AdaptiveClipping(then=TrimmedMean()),
    AdaptiveClipping(then=NearestNeighbourMixing(then=Median())),
]


@pytest.mark.parametrize("rule", ROBUST, ids=repr)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    f=st.integers(1, 2),
    more=st.integers(0, 2),
    kind=st.sampled_from(["alike", "far", "together", "near", "huge"]),
)
def test_the_stated_bound_holds_for_every_subset(rule: Rule, seed: int, f: int, more: int, kind: str) -> None:
    n = rule.least(f) + more
    x = draw_updates(seed, n, f, 6, kind)
    found, plain, kappa = value(rule, x, f).double().numpy(), x.double().numpy(), rule.coefficient(n, f)
    assert kappa is not None and kappa >= f / (n - 2 * f)
    for subset in itertools.combinations(range(n), n - f):
        honest = plain[list(subset)]
        variance = np.mean(np.sum((honest - honest.mean(axis=0)) ** 2, axis=1))
        assert np.sum((found - honest.mean(axis=0)) ** 2) <= kappa * variance * (1.0 + 1e-5) + 1e-9


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    f=st.integers(1, 2),
    more=st.integers(0, 3),
    kind=st.sampled_from(["alike", "far", "together", "near", "huge"]),
)
def test_the_covariance_filter_keeps_to_its_bound_in_the_worst_direction(
    seed: int, f: int, more: int, kind: str
) -> None:
    rule, n = CovarianceFilter(), 5 * f + more
    x = draw_updates(seed, n, f, 6, kind)
    found, plain, kappa = value(rule, x, f).double().numpy(), x.double().numpy(), rule.coefficient(n, f)
    assert kappa is not None
    for subset in itertools.combinations(range(n), n - f):
        honest = plain[list(subset)]
        largest = np.linalg.eigvalsh(np.cov(honest.T, bias=True))[-1]
        assert np.sum((found - honest.mean(axis=0)) ** 2) <= kappa * largest * (1.0 + 1e-5) + 1e-9


def test_no_bound_of_the_covariance_filter_is_known_for_many_hostile_ones() -> None:
    assert CovarianceFilter().coefficient(9, 2) is None and CovarianceFilter().coefficient(10, 0) == 0.0


def test_the_trimmed_mean_attains_the_bound_that_no_rule_can_better() -> None:
    """S in two heaps: where f of it are trimmed on one side, and f others with the hostile ones."""
    n, f = 10, 3
    x = torch.tensor([[0.0]] * (n - 2 * f) + [[1.0]] * f + [[0.0]] * f)
    honest = x[: n - f].double()
    error = (value(TrimmedMean(), x, f).double() - honest.mean(dim=0)).square().sum()
    assert torch.isclose(error, TrimmedMean().coefficient(n, f) * honest.var(dim=0, correction=0).sum(), rtol=1e-6)


def test_centered_clipping_is_the_published_iteration_from_any_start() -> None:
    """Libraries differ in where they begin (the mean, zero, the medians), in how often they go round and in the radius
    that they take unasked; with the same three, they give the same."""
    x = draw_updates(3, 12, 2, 30, "together")
    radius, rounds = 4.0, 5
    for start, point in (("zero", torch.zeros(30)), ("median", x.double().median(dim=0).values), (None, x.mean(dim=0))):
        point = torch.quantile(x.double(), 0.5, dim=0) if start == "median" else point.double()
        rule = CenteredClipping(radius=radius, rounds=rounds, start=point.float() if start is None else start)
        for _ in range(rounds):
            away = x.double() - point
            point = point + (away * (radius / away.norm(dim=1, keepdim=True)).clamp(max=1.0)).mean(dim=0)
        assert torch.allclose(value(rule, x, 2).double(), point, atol=1e-5), start


def test_the_mean_is_beyond_any_bound_and_says_so() -> None:
    assert Mean().coefficient(10, 1) is None and Mean().coefficient(10, 0) == 0.0
    x = draw_updates(1, 10, 2, 50, "huge")
    assert value(Mean(), x, 2).abs().max() > 1e15


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), f=st.integers(1, 3), rounds=st.integers(1, 4))
def test_nobody_moves_centered_clipping_by_more_than_its_radius(seed: int, f: int, rounds: int) -> None:
    rule = CenteredClipping(radius=0.7, rounds=rounds, start="zero")
    n = 2 * f + 3
    x = draw_updates(seed, n, 0, 20, "alike")
    attacked = x.clone()
    attacked[:f] = 1e6 * torch.randn(f, 20, generator=torch.Generator().manual_seed(seed))
    moved = (value(rule, x, f).double() - value(rule, attacked, f).double()).norm()
    assert moved <= 2 * f / n * 0.7 * rounds * (1 + 1e-5)


def test_centered_clipping_starts_where_it_is_told() -> None:
    x = draw_updates(7, 9, 2, 30, "far")
    last = torch.randn(30)
    found = value(CenteredClipping(radius=2.0, rounds=2, start=last), x, 2)
    assert close(found, references.centered_clipping(x.double().numpy(), 2, 2.0, 2, last.double().numpy()))


def test_a_far_away_attacker_takes_no_precision_from_the_others() -> None:
    """With plain inner products in float64, 1e20 squared would leave nothing of honest distances."""
    x = draw_updates(11, 11, 0, 500, "alike")
    clean = {word: value(parse(word), x[2:], 0) for word in ("krum", "multi-krum", "mda", "nnm+trimmed-mean")}
    x[0], x[1] = 1e20, -1e20
    for word, expected in clean.items():
        found = value(parse(word), x, 2)
        reference = references.RULES[word](x.double().numpy(), 2)
        assert close(found, reference), word
        if word != "krum":
            assert torch.allclose(found, expected, atol=1e-5), word
    assert (value(GeometricMedian(), x, 2).double() - x[2:].double().mean(dim=0)).norm() < 8.0


def unlike(seed: int, count: int = 16, d: int = 400) -> torch.Tensor:
    """Updates that have a sixth of their length in common."""
    generator = torch.Generator().manual_seed(seed)
    common, own = torch.randn(d, generator=generator), torch.randn(count, d, generator=generator)
    return (0.17 * common + own) * (0.5 + torch.rand(count, 1, generator=generator))


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0))


def test_copies_of_an_update_weigh_as_much_as_one_whatever_their_lengths() -> None:
    x = unlike(1)
    lengths = torch.tensor([1.0, 0.5, 2.0, 4.0])
    outcome = DistinctUpdates(then=Mean()).aggregate(torch.cat([x, lengths[:, None] * x[:1]]), 4)
    together = (x.sum(dim=0) - x[0] + x[0] * torch.tensor([1.0, *lengths]).mean()) / 16
    assert torch.allclose(outcome.value, together, atol=1e-5)
    assert [round(score, 3) for score in outcome.scores] == [5.0, *[1.0] * 15, *[5.0] * 4]
    assert torch.equal(value(DistinctUpdates(then=Mean()), x, 4), value(Mean(), x, 4)), "honest ones lose nothing"


def test_updates_that_are_all_alike_are_no_copies() -> None:
    """What is a copy is a matter of how alike the others are."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, generator=generator) + 0.05 * torch.randn(12, 400, generator=generator)
    assert max(DistinctUpdates().aggregate(x, 2).scores) == 1.0
    same = torch.ones(5, 3)
    assert torch.equal(value(DistinctUpdates(), same, 1), same[0])
    assert torch.equal(value(DistinctUpdates(), torch.zeros(5, 3), 1), torch.zeros(3))
    assert torch.equal(value(DistinctUpdates(then=Mean()), x[:1], 0), x[0])


def test_weights_are_shared_among_copies() -> None:
    x = torch.eye(4)[[0, 0, 1, 2]]
    found = value(DistinctUpdates(then=Mean()), x, 1, [1.0, 1.0, 1.0, 2.0])
    assert torch.allclose(found, torch.tensor([1.0, 1.0, 2.0, 0.0]) / 4.0, atol=1e-6)


@pytest.mark.parametrize("word", ["ipm", "model-replacement", "mimic"])
def test_colluders_that_send_the_same_are_one_where_honest_updates_differ(word: str) -> None:
    honest = unlike(2)
    sent, mean = torch.cat([honest, attack_named(word)(honest, 4, seed=1)]), honest.double().mean(dim=0)
    assert cosine(value(DistinctUpdates(), sent, 4), mean) > 0.95
    assert cosine(value(CenteredClipping(), sent, 4), mean) < 0.9


def test_colluders_that_keep_apart_are_withstood_as_without() -> None:
    honest = unlike(2)
    sent = torch.cat([honest, attack_named("apart")(honest, 4, seed=1)])
    assert torch.allclose(value(DistinctUpdates(), sent, 4), value(CenteredClipping(), sent, 4), atol=1e-6)


def test_buckets_are_means_and_count_as_updates() -> None:
    x = draw_updates(2, 10, 0, 40, "alike")
    rule = Bucketing(size=3, seed=4, then=Median())
    order = sorted(range(10), key=rule._lot)
    means = torch.stack([x[order[start : start + 3]].double().mean(dim=0) for start in range(0, 10, 3)])
    assert close(value(rule, x, 1), np.median(means.float().double().numpy(), axis=0))
    assert rule.least(1) == 7 and Bucketing(size=2, then=Bulyan()).least(1) == 13
    assert not torch.equal(value(rule, x, 1), value(Bucketing(size=3, seed=5, then=Median()), x, 1))


def test_buckets_are_dealt_anew_in_every_round_also_behind_other_rules() -> None:
    x = draw_updates(2, 12, 0, 40, "alike")
    for rule in (parse("bucketing:2+median"), parse("arc+bucketing:2+median"), parse("clip:3+nnm+bucketing:2+median")):
        first, again, other = (value(rule.in_round(number), x, 1) for number in (1, 1, 2))
        assert torch.equal(first, again) and not torch.equal(first, other)
    assert parse("nnm+trimmed-mean").in_round(3) == parse("nnm+trimmed-mean")


@settings(max_examples=60)
@given(
    points=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=9),
    f=st.integers(0, 4),
)
def test_the_smallest_diameter_is_found_and_the_first_of_several(points: list[tuple[int, int]], f: int) -> None:
    f = min(f, len(points) - 1)
    distances = [[float((a - c) ** 2 + (b - d) ** 2) for c, d in points] for a, b in points]
    subsets = itertools.combinations(range(len(points)), len(points) - f)
    expected = min(subsets, key=lambda subset: max(distances[i][j] for i in subset for j in subset))
    assert tuple(smallest_diameter(distances, f)) == expected


def test_the_smallest_diameter_of_many_takes_no_time() -> None:
    x = np.random.default_rng(0).normal(size=(50, 3))
    chosen = smallest_diameter(references.squared(x).tolist(), 20)
    assert len(chosen) == 30


WEIGHTED = ["mean", "median", "trimmed-mean", "meamed", "multi-krum", "mda", "nnm+trimmed-mean", "bucketing:2+median"]


@pytest.mark.parametrize("word", WEIGHTED)
def test_equal_weights_change_nothing(word: str) -> None:
    x = draw_updates(5, 12, 2, 200, "far")
    assert torch.allclose(value(parse(word), x, 2, [7.0] * 12), value(parse(word), x, 2), rtol=0, atol=1e-6)


def test_a_weight_of_two_is_like_being_there_twice() -> None:
    x = draw_updates(6, 7, 0, 100, "alike")
    weights = [1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    twice = torch.cat([x, x[[1, 4]]])
    assert torch.allclose(value(Mean(), x, 0, weights), twice.mean(dim=0), atol=1e-6)
    assert torch.allclose(value(Median(), x, 0, weights), torch.quantile(twice, 0.5, dim=0), atol=1e-6)
    assert torch.allclose(value(TrimmedMean(), x, 0, weights), twice.mean(dim=0), atol=1e-6)


def test_weights_decide_what_is_left_after_trimming() -> None:
    x, weights = torch.tensor([[1.0], [2.0], [4.0], [10.0], [-5.0]]), [1.0, 1.25, 1.0, 1.0, 1.0]
    assert value(TrimmedMean(), x, 1, weights).item() == pytest.approx((1 + 2.5 + 4) / 3.25)
    assert value(MeaMed(), x, 1, weights).item() == pytest.approx((1 + 2.5 + 4 - 5) / 4.25)


HONEST_CLAIMS = {
    "equal": lambda chance, count: [10.0] * count,
    "unlike": lambda chance, count: list(chance.lognormal(0.0, 2.0, count)),
    "light": lambda chance, count: [1e-9] * (count - 1) + [1.0],
}
ABSURD_CLAIMS = (1e30, 1e-30, 40.0, 1.0)


@pytest.mark.parametrize("rule", [*ROBUST, CovarianceFilter()], ids=repr)
@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    f=st.integers(1, 2),
    more=st.integers(0, 8),
    kind=st.sampled_from(["far", "together", "near", "huge", "edge"]),
    claims=st.sampled_from(sorted(HONEST_CLAIMS)),
    absurd=st.sampled_from(ABSURD_CLAIMS),
)
def test_the_stated_bound_holds_whatever_weights_are_claimed(
    rule: Rule, seed: int, f: int, more: int, kind: str, claims: str, absurd: float
) -> None:
    """About the honest ones' mean and variance, by weights of which none is more than the ratio times another."""
    n, chance = rule.least(f) + more + (5 * f if isinstance(rule, CovarianceFilter) else 0), np.random.default_rng(seed)
    x = draw_updates(seed, n - f, 0, 6, "alike")
    if kind == "edge":  # just where the honest ones end, in every coordinate
        attack = x.max(dim=0).values.expand(f, 6)
    else:
        attack = draw_updates(seed + 1, n, f, 6, kind)[torch.randperm(n, generator=torch.Generator().manual_seed(0))][
            :f
        ]
        attack = attack * (1e4 if kind == "together" else 1.0)
    weights = [*HONEST_CLAIMS[claims](chance, n - f), *[absurd] * f]
    ratio, kappa = rule.weight_ratio(n, f), rule.weighted_coefficient(n, f)
    counted = bounded(weights, n).within(ratio, range(n))
    assert kappa is not None and max(counted) <= min(counted) * ratio * (1 + 1e-12)
    assert f * max(counted) <= max(1 / 3, f / n) * (f * max(counted) + (n - f) * min(counted)) * (1 + 1e-12)
    found, honest, own = value(rule, torch.cat([x, attack]), f, weights), x.double().numpy(), counted[: n - f]
    mean = own @ honest / own.sum()
    spread = (honest - mean).T @ ((honest - mean) * own[:, None]) / own.sum()
    largest = np.linalg.eigvalsh(spread)[-1] if isinstance(rule, CovarianceFilter) else np.trace(spread)
    assert np.sum((found.double().numpy() - mean) ** 2) <= kappa * largest * (1.0 + 1e-5) + 1e-9


@pytest.mark.parametrize(("n", "f"), [(7, 2), (10, 2), (5, 1), (9, 4), (20, 4), (3, 1)])
@pytest.mark.parametrize("word", ["median", "meamed", "trimmed-mean", "centered-clipping", "geometric-median"])
def test_heavy_claims_buy_no_place_outside_of_the_honest_ones(word: str, n: int, f: int) -> None:
    """Eight of four clients' weight are against eight of others: half of it, and the attacker is in the median."""
    x = torch.linspace(0.0, 1.0, n)[:, None].repeat(1, 3)
    x[n - f :] = 1e6
    found = value(parse(word), x, f, [10.0] * (n - f) + [1e12] * f)
    worst = {"centered-clipping": 4.0, "geometric-median": 4.0}.get(word, 1.0)
    assert -worst < found.min() and found.max() < worst


def test_light_honest_ones_are_not_outweighed() -> None:
    x = torch.tensor([[0.0], [0.1], [0.2], [0.3], [0.4], [1e6], [1e6]])
    for claims in ([1e-9] * 4 + [1.0], [1e-9, 1e-9, 1.0, 1.0, 1.0]):
        for word in ("median", "meamed", "trimmed-mean"):
            assert value(parse(word), x, 2, [*claims, 1.0, 1.0]).abs().max() < 1.0, (word, claims)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), f=st.integers(1, 3), more=st.integers(0, 9))
def test_heavy_claims_move_centered_clipping_by_their_bounded_share(seed: int, f: int, more: int) -> None:
    rule, n = CenteredClipping(radius=0.7, rounds=2, start="zero"), 2 * f + 1 + more
    x, claims = draw_updates(seed, n, 0, 20, "alike"), [10.0] * (n - f) + [1e30] * f
    attacked = x.clone()
    attacked[n - f :] = 1e6 * torch.randn(f, 20, generator=torch.Generator().manual_seed(seed))
    moved = (value(rule, x, f, claims).double() - value(rule, attacked, f, claims).double()).norm()
    assert moved <= 2 * max(1 / 3, f / n) * 0.7 * 2 * (1 + 1e-5)


def test_the_ratio_of_weights_follows_from_n_and_f_alone() -> None:
    assert [Median().weight_ratio(n, f) for n, f in ((7, 2), (10, 2), (6, 2), (5, 2), (50, 1), (3, 1))] == [
        1.25, 2.0, 1.0, 1.0, 4.0, 1.0
    ]  # fmt: skip
    assert Bulyan().weight_ratio(10, 1) == 3.5 and Bulyan().weight_ratio(15, 3) == 1.0
    assert Bucketing(size=2, then=Median()).weight_ratio(20, 2) == 2.0 == parse("arc+clip:3+median").weight_ratio(10, 2)
    assert Median().weighted_coefficient(6, 2) == Median().coefficient(6, 2) and Median().weight_ratio(7, 0) > 1e6


def test_an_absurd_weight_counts_a_few_times_and_no_more() -> None:
    x = torch.zeros(9, 4)
    x[0] = 1.0
    claimed = [1e30, *[10.0] * 8]
    assert value(Mean(), x, 0, claimed)[0].item() == pytest.approx(WEIGHT_RATIO_MAX / (WEIGHT_RATIO_MAX + 8))
    for absurd in (float("nan"), float("inf"), -1.0):
        outcome = TrimmedMean().aggregate(x, 1, [absurd, *[10.0] * 8])
        assert outcome.value.abs().max() == 0 and not outcome.trusted[0] and outcome.scores[0] == float("inf")
    none = Mean().aggregate(x, 0, [0.0, *[10.0] * 8])
    assert none.value.abs().max() == 0 and not none.trusted[0]


@pytest.mark.parametrize("word", [word for word in LAST if word not in ("mean", "krum")])
def test_who_shouts_is_not_trusted_and_scored_highest(word: str) -> None:
    x = draw_updates(9, 15, 0, 2000, "alike")
    x[[3, 8]] = 50.0 * torch.randn(2, 2000, generator=torch.Generator().manual_seed(1))
    outcome = parse(word).aggregate(x, 2)
    assert not outcome.trusted[3] and not outcome.trusted[8]
    others = [score for number, score in enumerate(outcome.scores) if number not in (3, 8)]
    assert min(outcome.scores[3], outcome.scores[8]) >= max(others)
    assert sum(outcome.trusted) >= 11

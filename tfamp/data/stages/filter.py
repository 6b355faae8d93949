"""The stage that fills, clips, reshapes or drops elements, and counts what it drops."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import (
    TENSOR,
    as_arguments,
    inputs_of,
    looks_batched,
    named_columns,
    with_inputs,
)
from tfamp.data.stages import (
    Settings,
    Stage,
    acts_on_batches,
    as_written,
    map_in_order,
)
from tfamp.data.stages.dropped import DropLog, drop
from tfamp.data.stages.filter_rules import (
    Clip,
    DropMissing,
    DropOutliers,
    Fill,
    Reshape,
    Rule,
    shapes_of,
)
from tfamp.data.statistics import Column, Statistics, TextColumn
from tfamp.data.statistics.conditioning import ColumnRule
from tfamp.data.statistics.record import (
    FILLS,
    check_fill,
    check_rule,
    collapses,
    fill_text,
    fill_values,
    outlier_limits,
)
from tfamp.records import checks, units

SHAPE_ACTIONS = ("drop", "error", "crop_or_pad")
OUTLIER_ACTIONS = ("drop", "clip")
# Codes of elements are positions in here, from 1.
REASONS = ("other shape", "missing value", "outlier", "predicate")


def _argument() -> Any:
    """Returns the field of an argument that counts by the rules made of it."""
    return dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Filter(Stage):
    """Fills, clips and reshapes inputs, and drops elements, in one pass.

    `Pipeline.filter` explains the arguments, of which the rules are made. An element is
    dropped, and counted, for its first reason.
    """

    name: ClassVar[str] = "filter"
    predicate: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    missing: Any = _argument()
    outliers: Any = _argument()
    outlier_action: str | None = _argument()
    statistics: Statistics | None = _argument()
    shape: Any = _argument()
    shape_action: str | None = _argument()
    stays_behind: str = dataclasses.field(default="", compare=False, repr=False)
    rules: tuple[Rule, ...] = dataclasses.field(init=False)
    log: DropLog = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self._checked_rules()))
        object.__setattr__(self, "log", DropLog(REASONS))

    @property
    def takes_batches(self) -> bool:  # type: ignore[override]
        """Whether it acts on batches where it is written behind these."""
        return self.predicate is not None

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions in it."""
        return () if self.predicate is None else (self.predicate,)

    def behind(self, name: str) -> "Filter":
        """Returns the filter as it stays behind another stage, with the same counts."""
        moved = dataclasses.replace(self, stays_behind=name)
        object.__setattr__(moved, "log", self.log)
        return moved

    @property
    def drops(self) -> bool:
        """Whether elements may go, so that the length is not known beforehand."""
        return self.predicate is not None or any(rule.drops for rule in self.rules)

    def for_build(self) -> "Filter":
        """Returns the filter with counts of its own."""
        return dataclasses.replace(self)

    def with_counts_of(self, builds: Sequence[Any]) -> "Filter":
        """Returns the filter with the counts of several builds."""
        joined = dataclasses.replace(self)
        for build in builds:
            log = build.log
            joined.log.add((log.seen, *log.dropped.values()), passes=log.passes)
        return joined

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if elements are batches, or if a rule or the predicate can't act."""
        if acts_on_batches(self):
            self._check_batches(dataset)
            return
        if looks_batched(dataset.element_spec):
            raise ValueError(
                f"Elements {dataset.element_spec} look like batches; expected single "
                "examples, since `.filter` keeps or drops one at a time. Pass "
                "`dataset.unbatch()`."
            )
        columns = named_columns(inputs_of(dataset.element_spec))
        for rule in self.rules:
            rule.check(columns)
        if self.predicate is None:
            return
        ruled = dataset.map(self._judge(dataset, by_rules=True))
        ruled = ruled.map(lambda code, x: x)
        self._check_answer(ruled)

    def _check_batches(self, dataset: tf.data.Dataset) -> None:
        """Raises unless it is a predicate on whole batches and nothing else."""
        if self.predicate is None or self.rules:
            raise ValueError(
                f"`.filter` behind `.{self.stays_behind}` has rules on values; "
                "expected a predicate alone, which gets whole batches there. Write the "
                "rules in a `.filter` of their own, before `.batch` and what follows."
            )
        self._check_answer(dataset)

    def _check_answer(self, dataset: tf.data.Dataset) -> None:
        """Raises unless the predicate gives one boolean for an element."""
        answer = dataset.map(self.predicate).element_spec
        if answer != tf.TensorSpec((), tf.bool):
            raise ValueError(
                f"`predicate` returns {answer!r}; expected one boolean for an element, "
                "or for a batch behind `.batch`, True to keep it. Reduce it with "
                "`tf.reduce_all`."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Judges in parallel, drops in order."""
        if acts_on_batches(self):
            return dataset.filter(self.predicate)
        judge = self._judge(dataset)
        if self.drops:
            return drop(map_in_order(dataset, judge, settings), self.log)
        return map_in_order(dataset, lambda *parts: judge(*parts)[1], settings)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        words = [rule.description for rule in self.rules]
        if self.predicate is not None:
            name = getattr(self.predicate, "__name__", repr(self.predicate))
            words.append(f"keep where {name}")
        if not self.drops:
            return units.join_words(words), "keeps every element"
        why = as_written(self.stays_behind) or "before the cache, done once"
        so_far = str(self.log) if self.log.seen else "drops are counted"
        if acts_on_batches(self):
            so_far = "drops are not counted"
        return units.join_words(words), f"{why}; {so_far}"

    def _judge(
        self, dataset: tf.data.Dataset, *, by_rules: bool = False
    ) -> Callable[..., tuple[tf.Tensor, Any]]:
        """Returns a function from parts to the reason's number, 0 to keep, and x.

        It is mapped over `dataset`. With `by_rules` the predicate is not asked.
        """
        is_tuple = isinstance(dataset.element_spec, tuple)

        def judge(*parts: Any) -> tuple[tf.Tensor, Any]:
            code, element = self._ruled(parts if is_tuple else parts[0])
            if self.predicate is None or by_rules:
                return code, element
            keep = tf.cond(
                tf.equal(code, 0),
                lambda: tf.convert_to_tensor(self.predicate(*as_arguments(element))),
                lambda: tf.constant(True),
            )
            last = tf.constant(len(REASONS), tf.int32)
            return tf.where(keep, code, last), element

        return judge

    def _ruled(self, element: Any) -> tuple[tf.Tensor, Any]:
        """Returns the number of the first reason to drop, and the element."""
        inputs = inputs_of(element)
        columns = named_columns(inputs)
        code = tf.constant(0)
        for rule in self.rules:
            columns, is_bad = rule.act(columns)
            if rule.drops:
                reason = tf.constant(REASONS.index(rule.reason) + 1, tf.int32)
                code = tf.where(tf.logical_and(is_bad, code == 0), reason, code)
        new = columns if isinstance(inputs, Mapping) else columns[TENSOR]
        return code, with_inputs(element, new)

    def _checked_rules(self) -> Iterator[Rule]:
        """Yields the rules of the arguments, once these are checked."""
        if self.predicate is not None and not callable(self.predicate):
            raise TypeError(
                f"`predicate` is {self.predicate!r}; expected something that can be "
                "called with one element. Pass a function, such as `lambda x, y: y < "
                "10`."
            )
        missing, outliers, shape = self.missing, self.outliers, self.shape
        _check_pair("outliers", outliers, self.outlier_action, OUTLIER_ACTIONS)
        _check_pair("shape", shape, self.shape_action, SHAPE_ACTIONS)
        if all(value is None for value in (self.predicate, missing, outliers, shape)):
            raise ValueError(
                "`.filter` came without anything to do; expected `predicate`, "
                "`missing`, `outliers` or `shape`. Pass one, or leave the filter out."
            )
        if shape is not None:
            yield Reshape(shapes_of(shape), str(self.shape_action))
        if missing is not None:
            yield _missing_rule(missing, self.statistics)
        if outliers is not None:
            statistics = _needed(self.statistics, "outliers", outliers)
            limits = _limits_of(statistics, check_rule("outliers", outliers))
            drops = self.outlier_action == "drop"
            yield DropOutliers(limits) if drops else Clip(limits)
        is_used = outliers is not None or isinstance(missing, str)
        if self.statistics is not None and not is_used:
            raise ValueError(
                "`statistics` came without `outliers` or a `missing` that reads them; "
                "expected one of these. Leave `statistics` out."
            )


def _declared(column: Column | TextColumn) -> ColumnRule:
    """Returns what a column is like and what stands for a missing value in it."""
    if isinstance(column, TextColumn):
        texts = column.missing_values
        return ColumnRule(
            name=column.name, text=True, scalar=column.scalar, missing_texts=texts
        )
    return ColumnRule(
        name=column.name,
        text=False,
        scalar=column.scalar,
        missing_values=column.missing_values,
        # Without a limit or a fill, these numbers say how many features there are.
        fill=(math.nan,) * len(column.features),
    )


def _filled(column: Column | TextColumn, how: str) -> ColumnRule:
    """Returns what to fill a column with: its mean, median or mode."""
    if isinstance(column, TextColumn):
        return dataclasses.replace(_declared(column), fill_text=fill_text(column, how))
    fill = tuple(fill_values(column, how).tolist())
    return dataclasses.replace(_declared(column), fill=fill)


def _limits_of(statistics: Statistics, rule: Any) -> tuple[ColumnRule, ...]:
    """Returns the limits of outliers for each column of numbers of training data."""
    rules = []
    for column in statistics.columns:
        if isinstance(column, TextColumn):
            continue
        lower, upper = outlier_limits(column, rule)
        for feature, low, high in zip(column.features, lower, upper, strict=True):
            if collapses(feature, low, high):
                raise ValueError(
                    f"`outliers` is {rule!r}, which leaves feature {feature.name!r} "
                    f"one value, since nearly all are equal; expected features that "
                    "vary. Fit `statistics` with `columns` that leave it out."
                )
        low, high = tuple(lower.tolist()), tuple(upper.tolist())
        rules.append(dataclasses.replace(_declared(column), lower=low, upper=high))
    if not rules:
        raise ValueError(
            f"`outliers` is {rule!r}, and all columns of `statistics` are text; "
            "expected numbers. Leave `outliers` out."
        )
    return tuple(rules)


def _missing_rule(missing: Any, statistics: Statistics | None) -> Rule:
    """Returns the rule about missing values."""
    if missing == "drop":
        columns = None if statistics is None else map(_declared, statistics.columns)
        return DropMissing(None if columns is None else tuple(columns))
    if isinstance(missing, str):
        checks.choice("missing", missing, ("drop", *FILLS))
        found = _needed(statistics, "missing", missing)
        fills = tuple(_filled(column, missing) for column in found.columns)
        return Fill(fills, None, missing)
    if callable(getattr(missing, "transform", None)):
        raise TypeError(
            f"`missing` is {missing!r}; expected 'drop', one of {FILLS!r} or a number. "
            "Fit an imputer to the training rows and call its `transform` in `.map`, "
            "by `tf.numpy_function`, or on the arrays beforehand."
        )
    number = check_fill(missing)
    return Fill(None, number, repr(number))


def _needed(statistics: Any, argument: str, value: Any) -> Statistics:
    """Returns the statistics, or says that an argument needs them."""
    if isinstance(statistics, Statistics):
        return statistics
    raise TypeError(
        f"`{argument}` is {value!r} and `statistics` is {statistics!r}; expected what "
        "`tfamp.data.fit_statistics` returns. Fit them on the training data and pass "
        "`statistics=...`."
    )


def _check_pair(argument: str, value: Any, action: Any, options: Sequence[str]) -> None:
    """Raises unless a setting and what to do about it came together."""
    action_argument = f"{argument.removesuffix('s')}_action"
    if value is None and action is None:
        return
    if value is None:
        raise ValueError(
            f"`{action_argument}` is {action!r} and `{argument}` is None; expected "
            f"both or none. Pass `{argument}`, or leave `{action_argument}` out."
        )
    if action is None:
        raise ValueError(
            f"`{argument}` is {value!r} and `{action_argument}` is None; expected one "
            f"of {tuple(options)!r}. Say what to do with the elements it finds."
        )
    checks.choice(action_argument, action, options)

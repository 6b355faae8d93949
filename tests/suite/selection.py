"""Which of the collected tests run, and in which order: options of this suite."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import pytest

from tests.suite import durations, imports, sampling

# For `--thin`: a slower case than this is left to the newest versions.
THIN_SECONDS = 0.4


def add_options(parser: pytest.Parser) -> None:
    """Adds the options that choose among the tests."""
    group = parser.getgroup("tfamp", "choosing tests")
    group.addoption("--whole", action="store_true", help="every case of every test")
    group.addoption("--thin", action="store_true", help="one fast case of each test")
    group.addoption("--seed", help="choose cases as at this commit (default: HEAD)")
    group.addoption(
        "--changed", metavar="COMMIT", help="tests that reach what differs from COMMIT"
    )
    group.addoption(
        "--near", metavar="FILE", action="append", help="tests that reach a file"
    )
    group.addoption(
        "--seconds",
        type=float,
        metavar="S",
        help="with --changed or --near: the nearest tests that take S seconds",
    )
    group.addoption("--shard", metavar="I/N", help="part I of N, counted from 1")
    group.addoption("--record", action="store_true", help="write tests/durations.json")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the options say, and what the tests took when last measured."""

    seed: str
    seconds: Mapping[str, float]
    is_complete: bool = False
    is_whole: bool = False
    is_thin: bool = False
    near: tuple[str, ...] | None = None
    max_seconds: float | None = None
    shard: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, config: pytest.Config) -> "Choice":
        """Returns the choice of this process, which is made once.

        Raises:
            pytest.UsageError: An option's value is not what it takes.
        """
        if _CHOICE not in config.stash:
            config.stash[_CHOICE] = cls._read(config)
        return config.stash[_CHOICE]

    @classmethod
    def _read(cls, config: pytest.Config) -> "Choice":
        option = config.option
        try:
            index, num = map(int, (option.shard or "1/1").split("/"))
        except ValueError:
            index = num = 0
        if not 1 <= index <= num:
            raise pytest.UsageError(
                f"Got --shard={option.shard}; expected I/N with I from 1 to N, as 2/4."
            )
        named = any("::" in argument for argument in config.args)
        near = tuple(option.near or ())
        if option.changed:
            near += tuple(imports.changed_files(option.changed))
        return cls(
            seed=option.seed or sampling.commit_of(imports.ROOT),
            seconds=durations.load(),
            is_complete=not (config.option.keyword or config.option.markexpr)
            and config.args_source is not pytest.Config.ArgsSource.ARGS,
            # Who names a test wants to see it.
            is_whole=option.whole or (named and not option.seed),
            is_thin=option.thin,
            near=near if option.changed or option.near else None,
            max_seconds=option.seconds,
            shard=(index, num),
        )

    def text(self) -> str:
        """Returns what a reader needs to run the same cases again."""
        cases = "every case" if self.is_whole else f"cases chosen by --seed={self.seed}"
        if self.near is None:
            return cases
        limit = "" if self.max_seconds is None else f" that take {self.max_seconds:g} s"
        return f"the nearest to {len(self.near)} changed files{limit}, {cases}"


_CHOICE = pytest.StashKey[Choice]()


def anchors_of(item: pytest.Item) -> tuple[str, ...]:
    """Returns the patterns of the cases that a test always runs."""
    mark = item.get_closest_marker("anchors")
    return mark.args if mark else ()


def lost_anchors(items: Iterable[pytest.Item]) -> list[str]:
    """Returns the anchors that match no case, as "file::test: pattern"."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(sampling.test_of(item.nodeid), []).append(item)
    return [
        f"{test}: {pattern}"
        for test, group in cases.items()
        for pattern in anchors_of(group[0])
        if not any(sampling.is_anchor(item.nodeid, [pattern]) for item in group)
    ]


def case_of(item: pytest.Item, seconds: Mapping[str, float]) -> sampling.Case:
    """Returns what the sampler knows of a collected test."""
    spec = getattr(item, "callspec", None)
    return sampling.Case(
        item.nodeid,
        dict(spec.indices) if spec else {},
        seconds.get(item.nodeid, 0.0),
        sampling.is_anchor(item.nodeid, anchors_of(item)),
    )


def chosen(items: Sequence[pytest.Item], choice: Choice) -> list[pytest.Item]:
    """Returns the tests that run, in the order in which they are to run."""
    if choice.is_whole:
        kept = list(items)
    else:
        lost = lost_anchors(items) if choice.is_complete else []
        if lost:
            raise pytest.UsageError(f"Anchors that match no case: {', '.join(lost)}")
        short = [i for i in items if not i.get_closest_marker("whole")]
        cases = [case_of(item, choice.seconds) for item in short]
        if choice.is_thin:
            names = sampling.one_of_each(cases, choice.seed, THIN_SECONDS)
        else:
            names = sampling.chosen(cases, choice.seed, sampling.TEST_SECONDS)
        wanted = set(names)
        kept = [item for item in short if item.nodeid in wanted]
    return ordered(kept, choice) if choice.near is None else nearest(kept, choice)


def nearest(items: Sequence[pytest.Item], choice: Choice) -> list[pytest.Item]:
    """Returns the nearest tests that reach what changed, as long as seconds last."""
    near = imports.nearness(choice.near or ())
    reached = [item for item in items if file_of(item) in near]
    reached.sort(key=lambda item: near[file_of(item)])
    kept, spent = [], 0.0
    for item in reached:
        spent += choice.seconds.get(item.nodeid, 0.0)
        if choice.max_seconds is None or spent <= choice.max_seconds:
            kept.append(item)
    return kept


def file_of(item: pytest.Item) -> str:
    """Returns the path of a test's file from the root of the repository."""
    return item.nodeid.partition("::")[0]


def ordered(items: Sequence[pytest.Item], choice: Choice) -> list[pytest.Item]:
    """Returns this shard's tests: files stay together, the slowest come first.

    Two processes start at the first and at the middle test and later take from each
    other's end, so every other file goes to the second half.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(file_of(item), []).append(item)
    cost = {
        file: sum(choice.seconds.get(item.nodeid, 0.0) for item in group)
        for file, group in files.items()
    }
    slow_first = sorted(files, key=lambda file: (-cost[file], file))
    index, num = choice.shard
    mine = slow_first[index - 1 :: num]
    return [item for file in (*mine[::2], *mine[1::2]) for item in files[file]]


class Selection:
    """Lets pytest run the chosen tests in their order."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Chooses after `-m` and `-k` have, so that no test loses its last case."""
        kept = chosen(items, Choice.of(config))
        names = {item.nodeid for item in kept}
        left_out = [item for item in items if item.nodeid not in names]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
        items[:] = kept

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Lets a change pass that no test reaches, such as one of a text."""
        is_near = Choice.of(session.config).near is not None
        if is_near and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

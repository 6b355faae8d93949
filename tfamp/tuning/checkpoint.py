"""Keeps the evaluations of a search in a file, so that a later call goes on."""

import json
import os
from collections.abc import Sequence
from typing import Any

from tfamp.records.files import whole
from tfamp.tuning.search import Evaluation


class Checkpoint:
    """The evaluations that were made of one search.

    Args:
        path: The file; None keeps them in memory alone.
        identity: What they hold for, as plain JSON values.

    Raises:
        ValueError: The file is damaged, or of another search.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, identity: Sequence[Any]
    ) -> None:
        self._path, self._identity = path, list(identity)
        self._known = {self._key(each.float32): each for each in self._read()}

    def get(self, float32: Sequence[str]) -> Evaluation | None:
        """Returns what came of a plan with these layers in float32, if it was tried."""
        return self._known.get(self._key(float32))

    def add(self, evaluation: Evaluation) -> None:
        """Keeps an evaluation, in the file at once."""
        self._known[self._key(evaluation.float32)] = evaluation
        if self._path is None:
            return
        held = {
            "of": self._identity,
            "evaluations": [each.to_dict() for each in self._known.values()],
        }
        with whole(self._path) as beside:
            beside.write_text(json.dumps(held, indent=1), encoding="utf-8")

    @staticmethod
    def _key(float32: Sequence[str]) -> tuple[str, ...]:
        return tuple(sorted(float32))

    def _read(self) -> list[Evaluation]:
        if self._path is None or not os.path.exists(self._path):
            return []
        name = os.fspath(self._path)
        with open(name, encoding="utf-8") as file:
            try:
                held = json.load(file)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"`checkpoint` {name!r} is not JSON ({error}); expected one that "
                    "`tune` wrote. Delete it, or pass another path."
                ) from error
        if not isinstance(held, dict) or held.get("of") != self._identity:
            raise ValueError(
                f"`checkpoint` {name!r} is of another model, policy, metric or "
                "tolerance; expected that of this call. Delete it, or pass another "
                "path."
            )
        return [Evaluation.from_dict(each) for each in held["evaluations"]]

"""Tells whether two pipelines give the same elements, across processes.

A fingerprint counts all that Python can see of what makes the elements: values,
functions, classes, layers, graphs and files (`fingerprints/`). Installed packages
count by version. What cannot be seen is named.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from typing import Any

from tfamp.data.fingerprints import packages
from tfamp.data.fingerprints.values import parts_of
from tfamp.data.fingerprints.walk import Walk

# Hexadecimal digits kept: two of a thousand pipelines agree by chance in 1 of 3e8.
_DIGITS = 12


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What was put into a digest, part by part.

    Attributes:
        parts: Name and digest of each part: versions, source, every step.
        unseen: What the digest could only name, not look into.
    """

    parts: tuple[tuple[str, str], ...]
    unseen: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """All parts in one word of 12 hexadecimal digits."""
        text = repr(self.parts).encode()
        return hashlib.blake2b(text).hexdigest()[:_DIGITS]


def fingerprint(parts: Mapping[str, Any]) -> Fingerprint:
    """Returns the fingerprint of named parts and of the versions here.

    Args:
        parts: Values of any kind: numbers, arrays, functions, layers, datasets,
            dataclasses of tfamp, whose fields with `compare=False` do not count.

    Example:
        >>> def scaled(factor):
        ...     return fingerprint({"map": lambda x: x * factor}).digest
        >>> scaled(2) == scaled(2), scaled(2) == scaled(3)
        (True, False)
    """
    names = ("tfamp", "tensorflow", "keras", "numpy")
    versions = {
        "versions": (
            *(f"{name} {packages.version(name)}" for name in names),
            f"tfamp's code {packages.own_code()}",
            f"Python {sys.version_info.major}.{sys.version_info.minor}",
        )
    }
    found, unseen, num_files = [], [], 0
    for name, value in {**versions, **parts}.items():
        walk = Walk(parts_of)
        found.append((name, walk.digest(value).hex()[:_DIGITS]))
        unseen += walk.unseen
        num_files += walk.num_files
    named = [one.name for one in unseen if not (one.unless_files and num_files)]
    return Fingerprint(tuple(found), tuple(dict.fromkeys(named)))

"""What tests of sources that read files share: settings, files, and refusals."""

import re

import pytest

from tfamp.data.stages import Settings
from tfamp.data.stages.dropped import ErrorLog, OnError

RAISE = Settings(num_threads=2, autotune=False)


def skip(max_fraction=0.5):
    """Returns settings under which damaged data is left out."""
    return Settings(2, False, OnError(max_fraction, ErrorLog(max_fraction), True))


def skipped(settings):
    """Returns places and messages of what was left out."""
    return [(one.where, one.message) for one in settings.errors.log.skipped]


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def read(source, settings=RAISE):
    return list(source.dataset(settings).as_numpy_iterator())


def refused_files(source, table, files=dict):
    """Returns a test of rows of files, maybe arguments and a kind, by their message.

    `files` makes a dict {name: content} of what a row begins with. `paths` among the
    arguments stands in the folder, which is taken without it.
    """

    @pytest.mark.parametrize("message", table, ids=table)
    def test(message, tmp_path):
        row = table[message]
        given, options, kind = (*row, *({}, ValueError)[len(row) - 1 :])
        for name, data in files(given).items():
            write(tmp_path / name, data)
        paths = tmp_path / options.get("paths", "")
        rest = {name: value for name, value in options.items() if name != "paths"}
        with pytest.raises(kind, match=re.escape(message)):
            source(paths, **rest)

    return test

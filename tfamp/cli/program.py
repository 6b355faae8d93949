"""`tfamp run`: an unchanged program under a policy, as plain Python would run it."""

import argparse
import os
import re
import runpy
import sys
import types
from typing import Any

import tfamp
from tfamp.trials import targets

_LIBRARIES = re.compile(r"[\\/](tfamp|keras|tensorflow)[\\/]")


def run(read: argparse.Namespace) -> int:
    """Enables tfamp, and runs a script or module as `__main__`.

    The program's `SystemExit` and errors go on as they are, so that exit codes and
    tracebacks are those of plain Python.
    """
    if read.policy is not None:
        # Children that call `tfamp.enable()` take it, too.
        os.environ["TFAMP_POLICY"] = read.policy
    tfamp.enable(read.policy or "auto")
    sys.excepthook = _trimmed(sys.excepthook)
    sys.argv = [*([read.m] if read.m else []), *read.program]
    place = os.getcwd()
    if read.m is None:
        place = os.path.dirname(os.path.realpath(sys.argv[0]))
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        sys.path[0] = place
    if read.m is None:
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(read.m, run_name="__main__", alter_sys=True)
    return 0


def _trimmed(hook: Any) -> Any:
    """Returns a hook that tells errors without what stands between it and a program."""

    def tell(
        kind: type[BaseException],
        error: BaseException,
        trace: types.TracebackType | None,
    ) -> None:
        own = targets.own_frames(error.with_traceback(trace))
        if isinstance(error, tfamp.LossScaleError):
            # It tells all by itself: no frame of Keras and tfamp below the program's.
            error.__suppress_context__, error.__cause__ = True, None
            last = own
            while last is not None and last.tb_next is not None:
                if _LIBRARIES.search(last.tb_next.tb_frame.f_code.co_filename):
                    last.tb_next = None
                last = last.tb_next
        hook(kind, error.with_traceback(own), own)

    return tell

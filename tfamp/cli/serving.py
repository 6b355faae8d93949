"""`tfamp serve`, apart from commands whose imports bring TensorFlow."""

import argparse

from tfamp.serving.server import main


def serve(read: argparse.Namespace) -> int:
    """Serves exported models until SIGTERM or Ctrl-C."""

    def say(address: str) -> None:
        print(f"Serving at {address}; Ctrl-C or SIGTERM ends it.", flush=True)

    own = ("paths", "argv", "complain")
    given = {name: value for name, value in vars(read).items() if name not in own}
    main.serve(read.paths, on_start=say, **given)
    return 0

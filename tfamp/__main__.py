"""`python -m tfamp` is the `tfamp` command."""

import sys

from tfamp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

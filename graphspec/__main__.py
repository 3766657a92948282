"""`python -m graphspec`."""

import sys

from graphspec.cli import main

if __name__ == "__main__":
    sys.exit(main())

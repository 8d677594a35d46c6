"""`python -m kvio` is the command `kvio`."""
import sys

from kvio.cli import main

if __name__ == "__main__":
    sys.exit(main())

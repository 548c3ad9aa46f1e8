"""``python -m bert`` is ``bert``."""

import sys

from bert.commands import main

if __name__ == "__main__":
    sys.exit(main())

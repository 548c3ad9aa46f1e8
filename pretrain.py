"""Pretrains BERT: the same as ``bert pretrain``."""

import sys

from bert.commands.pretrain import main

if __name__ == "__main__":
    sys.exit(main())

"""Pretrains BERT. Equivalent to ``bert pretrain``."""

import sys

from bert.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["pretrain", *sys.argv[1:]]))

"""Fine-tunes BERT. Equivalent to ``bert finetune``."""

import sys

from bert.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["finetune", *sys.argv[1:]]))

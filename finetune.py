"""Fine-tunes BERT: the same as ``bert finetune``."""

import sys

from bert.commands.finetune import main

if __name__ == "__main__":
    sys.exit(main())

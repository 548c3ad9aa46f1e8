"""Fine-tunes BERT: the same as ``bert finetune``."""

import sys

from bert.runtime.malloc import use_huge_pages

if __name__ == "__main__":
    use_huge_pages()
    from bert.commands import main  # not before: it would be loaded twice

    sys.exit(main(["finetune", *sys.argv[1:]]))

"""Pretrains BERT: the same as ``bert pretrain``."""

import sys

from bert.runtime.malloc import reexec_with_huge_pages

if __name__ == "__main__":
    reexec_with_huge_pages()
    from bert.commands import main  # not before: it would be loaded twice

    sys.exit(main(["pretrain", *sys.argv[1:]]))

"""The program ``bert``, which ``python -m bert`` is as well."""

import sys

from bert.runtime.malloc import reexec_with_huge_pages


def main() -> int:
    """Runs the command line of this process and returns its exit status."""
    reexec_with_huge_pages()
    from bert import commands  # not before: it would be loaded twice

    return commands.main()


if __name__ == "__main__":
    sys.exit(main())

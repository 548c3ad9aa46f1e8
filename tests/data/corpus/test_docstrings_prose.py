from bert.data.corpus.docstrings import module_docstrings, prose_paragraphs

DOC = """\
frobnicate(x, y=None) -> int

Turn the knob by x degrees, which takes
about per second on a slow machine.

    >>> frobnicate(3)
    3
    >>> frobnicate("")

Options
-------

x -- the angle, measured in degrees from the top
y -- nobody knows what it is, so leave it alone

Name      Meaning       Default
a         first thing   1
b         second        2

    for item in items:
        print(item)

- The first point is made here, and
  goes on in the next line
- The second point is shorter than that.
"""


def test_prose_keeps_sentences_and_drops_code_sessions_tables_and_headings():
    assert prose_paragraphs(DOC) == [
        "Turn the knob by x degrees, which takes about per second on a slow machine.",
        "x -- the angle, measured in degrees from the top.",
        "y -- nobody knows what it is, so leave it alone.",
        "The first point is made here, and goes on in the next line.",
        "The second point is shorter than that.",
    ]


def test_docstrings_come_in_the_order_of_the_source_also_from_inner_blocks() -> None:
    source = b'''"""Module."""
try:
    class First:
        """Class."""
        async def method(self):
            """Method."""
            def inner():
                """Inner."""
except ImportError:
    def first():
        """Fallback."""
if True:
    x = """No docstring."""
else:
    def second():
        """
        Indented.

          More.
        """
'''
    expected = ["Module.", "Class.", "Method.", "Inner.", "Fallback.", "Indented.\n\n  More."]
    assert module_docstrings(source) == expected


def test_sources_that_cannot_be_parsed_have_no_docstrings() -> None:
    assert module_docstrings(b'"""Broken."""\nprint "old"\n') == []
    assert module_docstrings(b'"""Nul."""\n\x00') == []

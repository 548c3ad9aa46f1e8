"""Functions of Python files and the parts of their docstrings, in the three usual styles."""

from bert.data.corpus.functions import Docstring, module_functions, parse_docstring

GOOGLE = """Adds numbers.

More about x.

Args:
  x (int): the first
    number.
  *rest: others.

Returns:
  int: the sum
  of all.

Raises:
  ValueError: if wrong.
"""
NUMPY = """Add numbers.

Parameters
----------
x : int
    The first.

    More.
y, z
    Others.

Returns
-------
int
    The sum.

Notes
-----
Not prose.
"""
SPHINX = """Add numbers.

:param int x: the first
   number
:param y: others
:returns: the
   sum
:rtype: int
"""


def test_google_style() -> None:
    prose = ("Adds numbers.", "More about x.")
    assert parse_docstring(GOOGLE) == Docstring(prose, ("the first number.", "others."), "the sum of all.")


def test_numpy_style() -> None:
    assert parse_docstring(NUMPY) == Docstring(("Add numbers.",), ("The first. More.", "Others."), "The sum.")


def test_sphinx_style() -> None:
    assert parse_docstring(SPHINX) == Docstring(("Add numbers.",), ("the first number", "others"), "the sum")


def test_several_returned_values_have_no_description() -> None:
    two = NUMPY.replace("int\n    The sum.", "a : int\n    One.\nb : int\n    Two.")
    assert parse_docstring(two).returns == ""


def test_sessions_are_not_prose() -> None:
    assert parse_docstring("Adds.\n\n>>> add(1, 2)\n3\n\nSee below.").prose == ("Adds.", "See below.")


def test_functions_have_their_parameters_in_order() -> None:
    source = b'''
class Box:
    """Not a function."""
    def fill(self, a, /, b, *rest, c=1, **more):
        """Fills."""
    def silent(self): ...
if True:
    async def wait(cls, seconds):
        """Waits."""
'''
    functions = module_functions(source)
    assert [(function.name, function.parameters) for function in functions] == [
        ("fill", ("a", "b", "rest", "c", "more")),
        ("wait", ("seconds",)),
    ]


def test_a_broken_file_has_no_functions() -> None:
    assert module_functions(b"def broken(:") == []

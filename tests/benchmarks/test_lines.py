# SPDX-License-Identifier: MIT
"""Lines of code are counted without docstrings, comments and empty lines."""

from tests.benchmarks.lines import code_lines


def test_docstrings_comments_and_empty_lines_are_not_code():
    source = (
        '"""Role.\n\nMore.\n"""\n\n# why\nx = 1  # here\n\n\ndef f(\n    a,\n):\n    """Do."""\n'
    )
    assert code_lines(source) == 4
    assert code_lines(source + '    text = """a\n\n    b"""\n    return text\n') == 8
    assert code_lines("") == 0

"""The course "build this engine": seven lessons, each a cell of Python that the reader edits and runs.

A cell has functions of examples/one_file_engine.py with lines left out; the file's own text is the right answer. A
check puts the reader's functions into the file, runs it, and compares it with the file as it is. The last check runs
the file with all parts of the reader beside the real engine.

    cell.py       a reader's code: its functions, its errors, what it prints
    one_file.py   the file, its parts, and the file with other parts
    steps.py      what checks share: a small model, and steps of both files side by side
    real.py       the file beside the real engine
    answers.py    what the page asks (web/python/page_engine.py)
    lessons/      a lesson: its words, its cell at the start, its check with hints
"""

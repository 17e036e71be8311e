"""The lessons in order. Each module has these names;

TITLE, TEXT    what to understand, and what to write, in paragraphs
PARTS          functions of the file that the cell has
START          the cell at first
ANSWER         a right one, where it is not the file's own text
check          runs the file with the cell's parts: it prints what to see, yields between parts of its work, and raises
               Hint where something is wrong
"""

from types import ModuleType

from . import cache, chunks, loop, pages, preemption, prefixes, sampling

LESSONS: dict[str, ModuleType] = {
    one.__name__.rpartition(".")[2]: one for one in (loop, cache, pages, prefixes, chunks, sampling, preemption)
}

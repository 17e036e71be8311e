"""Answers to the course that a reader may type: right ones, and typical wrong ones with a part of the hint for each."""

from web.course.answers import answer

WRONG = {  # by lesson: what becomes of a line of the right answer, and what the hint says
    "loop": (
        ("tokens.append(int(logits.argmax()))", "tokens = [int(logits.argmax())]", "needs the whole text"),
        ("logits.argmax()", "logits.argmin()", "look at argmax"),
        ("            break\n", "            pass\n", "went on after the end token"),
    ),
    "cache": (
        ("attend(rows, *kv[:, at])", "attend(rows, k, v)", "Look at what attend gets"),
        ("kv[:, batch.slots] = k, v", "kv[0, batch.slots] = k", "no values"),
    ),
    "pages": (
        ("[:, None] * page_size +", "[:, None] +", "from p * page_size on"),
        ("if not self.refcounts[page]:", "if True:", "while another table has it"),
    ),
    "prefixes": (
        ("sha256(before + tokens)", "sha256(tokens)", "look at what goes into sha256"),
        ("self.available.pop(page, None)", "pass", "still available"),
    ),
    "chunks": (
        ("budget -= stop - sequence.computed", "pass", "what is left of the budget"),
        ("if stop == len(s.tokens) else None", "if stop else None", "in the middle of its prompt"),
    ),
    "sampling": (
        ("number * ends[-1]", "number", "less than 1"),
        ("counter=position", "counter=0", "look at Philox's counter"),
    ),
    "preemption": (
        ("sequence.computed = 0", "pass", "would not be computed again"),
        ("self.waiting.appendleft(", "self.waiting.append(", "look at the end of the deque"),
    ),
}


def wrong_answers(lesson):
    """The code and the part of its hint, for each."""
    for old, new, hint in WRONG[lesson]:
        right = answer(lesson)
        assert right.count(old) == 1, (lesson, old)
        yield right.replace(old, new), hint

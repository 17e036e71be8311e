"""Ids of replies, requests and tool calls: different ones, but no secrets.

`secrets` asks the system for each, and gives the interpreter to the engine thread meanwhile: a millisecond a request.
"""

import random
import secrets

_numbers = random.Random(secrets.randbits(256))


def new_hex(size: int) -> str:
    """An id of `size` bytes, in hexadecimal digits. Any thread may ask for one."""
    return f"{_numbers.getrandbits(8 * size):0{2 * size}x}"

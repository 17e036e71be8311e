"""A subscriber of KV events, from vLLM's published form (vllm/distributed/kv_events.py) and the MessagePack spec."""

from struct import unpack_from


def unpack(data):
    """The one value that MessagePack `data` is."""
    value, end = _value(data, 0)
    assert end == len(data), "bytes are left over"
    return value


def _value(data, at):
    mark = data[at]
    at += 1
    if mark < 0x80:
        return mark, at
    if 0x90 <= mark < 0xA0:
        return _array(data, at, mark & 15)
    if 0xA0 <= mark < 0xC0:
        return data[at : at + (mark & 31)].decode(), at + (mark & 31)
    if mark == 0xC0:
        return None, at
    if mark in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB):
        size = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}[mark]
        length = int.from_bytes(data[at : at + size], "big")
        found = data[at + size : at + size + length]
        return (found if mark < 0xD0 else found.decode()), at + size + length
    if mark == 0xCB:
        return unpack_from(">d", data, at)[0], at + 8
    if 0xCC <= mark <= 0xCF:
        size = 1 << (mark - 0xCC)
        return int.from_bytes(data[at : at + size], "big"), at + size
    assert mark in (0xDC, 0xDD), f"{mark:x} stands for nothing that KV events have"
    size = 2 if mark == 0xDC else 4
    return _array(data, at + size, int.from_bytes(data[at : at + size], "big"))


def _array(data, at, length):
    found = []
    for _ in range(length):
        value, at = _value(data, at)
        found.append(value)
    return found, at


class Subscriber:
    """The blocks of one publisher, by (group, hash): each with its parent and its tokens. ask(number): a replay."""

    def __init__(self, ask):
        self.blocks = {}
        self.expected = None
        self.replays = 0
        self._ask = ask

    def receive(self, number, payload):
        """Take a published batch; where some were lost before it, those are asked for."""
        if self.expected is not None and number < self.expected:
            return  # it came with a replay
        if self.expected is None or number > self.expected:
            self.replays += 1
            for at, lost in self._ask(self.expected or 0):
                self._apply(at, lost)
        if self.expected is None or number >= self.expected:
            self._apply(number, payload)

    def _apply(self, number, payload):
        seconds, events, rank = unpack(payload)
        assert isinstance(seconds, float) and rank == 0
        for tag, *fields in events:
            {"BlockStored": self._stored, "BlockRemoved": self._removed, "AllBlocksCleared": self._cleared}[tag](
                *fields
            )
        self.expected = number + 1

    def _stored(self, hashes, parent, tokens, size, lora_id, medium, lora_name, extra=None, group=0):
        assert (lora_id, medium, lora_name) == (None, "GPU", None)
        assert len(tokens) == size * len(hashes)
        for at, name in enumerate(hashes):
            salt = None if extra is None else extra[at]
            self.blocks[group, name] = (parent, tuple(tokens[at * size : (at + 1) * size]), salt)
            parent = name

    def _removed(self, hashes, medium, group=0):
        assert medium == "GPU"
        for name in hashes:
            del self.blocks[group, name]

    def _cleared(self):
        self.blocks.clear()

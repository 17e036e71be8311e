"""A memory that fails while pages are moved: the books stay right, and every request ends."""

import pytest

from tests.engine.scripted import ScriptedModel
from tests.engine.test_engine import request
from tokenwright.engine import Engine, Group, PagePool, Scheduler, SwapSpace


class Failing(ScriptedModel):
    """`fault` is raised by the next call of `call`, once."""

    call, fault = "", None

    def _perhaps(self, call):
        if self.fault is not None and call == self.call:
            fault, self.fault = self.fault, None
            raise fault

    def read(self, group, pages):
        self._perhaps("read")
        return super().read(group, pages)

    def write(self, group, pages, contents):
        self._perhaps("write")
        super().write(group, pages, contents)


def build():
    groups = [Group(6, page_bytes=1)]
    model = Failing(lambda text: text[-1] + 1, groups, 2)
    pool = PagePool(groups, 2, model)
    return Engine(model, model, Scheduler(pool, 32, 4, swap=SwapSpace(pool, 100)), 100), model


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize("fault", [RuntimeError("no memory"), MemoryError(), KeyboardInterrupt()])
def test_texts_end_right_all_the_same(call, fault):
    engine, model = build()
    model.call, model.fault = call, fault
    texts = [engine.submit(request(10 * n, 10 * n + 1, most=8, share=False)) for n in (1, 2, 3)]
    steps = 0
    while engine.busy:
        steps += 1
        assert steps < 200, "nothing advances"
        try:
            engine.step()
        except KeyboardInterrupt:
            assert call in ("read", "write")
        engine.scheduler.check()
    assert model.fault is None, "the fault has happened"
    assert all(text.tokens == list(range(text.tokens[0], text.tokens[0] + 10)) for text in texts)
    assert (engine.pool.available, engine.scheduler.kv.swap.used) == (6, 0)

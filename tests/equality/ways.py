"""The ways in which a text may come about. Each must give what the naive run gives."""

from dataclasses import replace
from pathlib import Path

from tests.equality.harness import CONTEXT, NEW, PROMPT, Case, Drafts, Seen, alone, compare, restored, way
from tests.oracle.harness import prompt_of
from tests.profiles import some
from tokenwright.cache.disk_pages import DiskPages
from tokenwright.cache.page_folder import PageFolder
from tokenwright.engine import Request, State
from tokenwright.engine import Sequence as Text

LATE = 5  # tokens after which something happens to a text
FEW = 3  # tokens written where there are many texts


@way("no cache, in parts")
def naive_in_parts(case: Case, folder: Path) -> None:
    compare(case, "no cache, in parts", alone(case, case.bench(budget=7), cache=False), case.naive())


@way("pages of 1, 16 and 64")
def pages(case: Case, folder: Path) -> None:
    for page_size in (1, 16, 64):
        compare(case, "pages of 1, 16 and 64", alone(case, case.bench(page_size=page_size)), case.naive())


@way("chunks of 1, 7 and the whole")
def chunks(case: Case, folder: Path) -> None:
    for budget in (1, 7, CONTEXT):
        compare(case, "chunks of 1, 7 and the whole", alone(case, case.bench(budget=budget)), case.naive())


@way("batch of 1, 2, 8 and 17")
def batch(case: Case, folder: Path) -> None:
    for size in (1, 2, 8, 17):
        bench = case.bench(pages=80)
        others = [bench.engine.submit(case.request(prompt_of(5 + 3 * n, seed=n))) for n in range(1, size)]
        text = bench.engine.submit(case.request())
        bench.run()
        compare(case, "batch of 1, 2, 8 and 17", Seen(bench.rows(text), text.tokens), case.naive())
        if others:  # a neighbour too, whose prompt is of another length
            other = others[-1]
            oracle = case.naive(other.request.prompt)
            compare(case, "batch of 1, 2, 8 and 17", Seen(bench.rows(other), other.tokens), oracle)


@way("a prefix found, at every cut")
def prefix(case: Case, folder: Path) -> None:
    """Another text begins with the first `cut` tokens; a salt for each cut keeps the others' pages out.

    With the reference kernels at every fourth cut: which tokens a cut spares is the engine's matter, not the kernels'.
    """
    prompt, oracle = prompt_of(PROMPT), case.naive()
    strange = [(token + 1) % 300 + 5 for token in prompt]
    cuts_of_one = range(0, PROMPT + 1, 4) if case.weights == "reference" else some(range(PROMPT + 1), 3)
    for page_size, cuts in ((1, cuts_of_one), (16, range(0, PROMPT + 1, 8))):
        bench = case.bench(page_size=page_size)
        for cut in cuts:
            salt = str(cut).encode()
            donor = bench.engine.submit(case.request([*prompt[:cut], *strange[cut:]], salt=salt, most=1))
            bench.run()
            text = bench.engine.submit(case.request(salt=salt, most=FEW))
            bench.run()
            found = case.found(min(cut, PROMPT - 1), page_size)
            assert text.counts.reused == found, "what is shared is not computed"
            assert text.counts.forwarded + text.counts.reused == len(text.tokens) - 1
            compare(case, "a prefix found, at every cut", Seen(bench.rows(text), text.tokens), oracle.first(FEW))
            assert donor.state is State.FINISHED


@way("after one that was given up half-way")
def given_up(case: Case, folder: Path) -> None:
    """The same text was begun and ended after some chunks of its prompt: what is left of it is whole, or not found."""
    for steps in (1, 3, 5):
        bench = case.bench(budget=7, page_size=4)
        donor = bench.engine.submit(case.request())
        for _ in range(steps):
            bench.engine.step()
        bench.engine.abort(donor.id)
        text = bench.engine.submit(case.request())
        bench.run()
        assert text.counts.reused == 7 * steps, "its last page is found, though it is not full"
        compare(case, "after one that was given up half-way", Seen(bench.rows(text), text.tokens), case.naive())


@way("put off at every step, computed again")
def preempted(case: Case, folder: Path) -> None:
    """With pages that can be found again, and without."""
    for share in (True, False):
        bench = case.bench(page_size=16 if share else 7)
        text = bench.engine.submit(case.request(share=share))

        def put_off() -> None:
            for group in list(bench.scheduler.running):  # noqa: B023  (called at once)
                bench.scheduler.preempt(group)  # noqa: B023

        bench.run(put_off)
        assert text.counts.preemptions == NEW - 1
        assert bool(text.counts.reused) is share
        compare(case, "put off at every step, computed again", Seen(bench.rows(text), text.tokens), case.naive())


@way("saved and restored")
def saved(case: Case, folder: Path) -> None:
    for page_size in (1, 16):
        donor, bench = case.bench(page_size=page_size), case.bench(page_size=page_size)
        first = donor.engine.submit(case.request())
        donor.run()
        spared = restored(bench, donor, first.tokens, folder / "chat.kv")
        computed = len(first.tokens) - 1
        at_end = case.states is not None and computed % page_size == 0  # the state at the end of a text is kept
        assert spared == (computed if at_end else case.found(computed, page_size))
        text = bench.engine.submit(case.request(first.tokens[:-3]))
        bench.run()
        assert text.counts.reused == case.found(min(spared, len(first.tokens) - 4), page_size)
        compare(case, "saved and restored", Seen(bench.rows(text), text.tokens), case.naive(first.tokens[:-3]))


@way("read from a disk")
def from_disk(case: Case, folder: Path) -> None:
    """Another engine over the same folder finds the full pages, in every format and group."""
    for page_size in (1, 16):
        donor, bench = case.bench(page_size=page_size, budget=7), case.bench(page_size=page_size)
        texts = []
        for one in (donor, bench):
            like = [one.store.read(group, [0]) for group in range(len(one.store.groups))]
            disk = DiskPages(PageFolder(folder / "disk", 1 << 30, bytes([page_size]) * 32), like, page_size)
            one.engine.prefixes.tier, one.engine.prefixes.secret = disk, disk.secret
            texts.append(one.engine.submit(case.request()))
            one.run()
            disk.close()
        whole = case.found(PROMPT - 1, page_size)
        assert [text.counts.restored for text in texts] == [0, whole]
        assert texts[1].counts.forwarded == len(texts[1].tokens) - 1 - whole
        compare(case, "read from a disk", Seen(bench.rows(texts[1]), texts[1].tokens), case.naive())


def _forking(case: Case, parent: Text) -> Request:
    return replace(case.request(parent.tokens), parent=parent, shared=len(parent.tokens))


@way("forked")
def forked(case: Case, folder: Path) -> None:
    """A text goes on twice from its middle: once as it would, once with other tokens; then the child goes on twice."""
    whole = case.naive().tokens
    for page_size in (1, 16):
        other = [*whole[: PROMPT + LATE], *prompt_of(NEW, seed=8)]
        bench = case.bench(page_size=page_size, forced={1: other, 2: [*other[: PROMPT + LATE + 3], *whole[:NEW]]})
        parent = bench.engine.submit(case.request())
        bench.engine.pause(parent.id, PROMPT + LATE)
        bench.run()
        child = bench.engine.submit(_forking(case, parent))
        bench.engine.pause(child.id, PROMPT + LATE + 3)
        bench.engine.resume(parent.id)
        bench.run()
        grandchild = bench.engine.submit(_forking(case, child))
        bench.engine.resume(child.id)
        bench.run()
        assert child.counts.reused == PROMPT + LATE - 1
        assert grandchild.counts.reused == PROMPT + LATE + 2
        compare(case, "forked", Seen(bench.rows(parent), parent.tokens), case.naive())
        for text in (child, grandchild):
            oracle = case.naive(text.request.prompt, forced=bench.sampler.forced[text.id])
            compare(case, "forked", Seen(bench.rows(text), text.tokens), oracle)


@way("held and resumed")
def held(case: Case, folder: Path) -> None:
    """Held at every token; in the middle another text takes its pages."""
    most = max(
        sum(group.window.max_pages(PROMPT + NEW, CONTEXT, 8) for group in [one]) for one in case.bench().store.groups
    )
    bench = case.bench(page_size=8, pages=most)
    text = bench.engine.submit(case.request())
    for written in range(1, NEW):
        bench.engine.pause(text.id, PROMPT + written)
        bench.run()
        assert text.paused and len(text.written) == written
        if written == LATE:
            other = bench.engine.submit(case.request(prompt_of(PROMPT, seed=4)))
            bench.run()
            compare(
                case, "held and resumed", Seen(bench.rows(other), other.tokens), case.naive(prompt_of(PROMPT, seed=4))
            )
            alone_fits = all(
                spec.state_bytes for spec in case.specs
            )  # a state needs one page, however long the text is
            assert text.counts.preemptions == (0 if alone_fits else 1), "there was no room for both"
    bench.engine.resume(text.id)
    bench.run()
    compare(case, "held and resumed", Seen(bench.rows(text), text.tokens), case.naive())


@way("with drafts that hold and fail")
def drafted(case: Case, folder: Path) -> None:
    """Alone; and beside others, put off again and again, to be computed again."""
    texts = [case.naive(prompt_of(length, seed=seed)) for length, seed in ((PROMPT, 0), (33, 3), (21, 6))]
    for page_size, share, count in ((16, True, 1), (1, True, 3), (7, True, 3), (7, False, 3)):
        bench = case.bench(page_size=page_size, proposer=Drafts(*(text.tokens for text in texts)))
        prompts = [text.tokens[:-NEW] for text in texts[:count]]
        written = [bench.engine.submit(case.request(prompt, share=share)) for prompt in prompts]
        steps = iter(range(1000))

        def put_off() -> None:
            for group in list(bench.scheduler.running) if count > 1 and next(steps) % 2 else ():  # noqa: B023
                bench.scheduler.preempt(group)  # noqa: B023

        bench.run(put_off)
        counts = [text.counts for text in written]
        assert all(0 < one.accepted < one.drafted for one in counts), "some drafts hold, and some fail"
        for text, oracle in zip(written, texts, strict=False):
            compare(case, "with drafts that hold and fail", Seen(bench.rows(text), text.tokens), oracle)


@way("the cache switched off and on")
def switched(case: Case, folder: Path) -> None:
    bench = case.bench(budget=9)
    text = bench.engine.submit(case.request())
    steps = iter(range(1000))

    def switch() -> None:
        if text.state is not State.FINISHED and next(steps) % 4 == 3:
            bench.engine.use_cache(text.id, not text.cache)

    bench.run(switch)
    compare(case, "the cache switched off and on", Seen(bench.rows(text), text.tokens), case.naive())

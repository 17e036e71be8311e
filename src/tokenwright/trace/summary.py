"""A finished run in figures: sums over its frames, and the work that the same text costs with and without the cache."""

from collections.abc import Sequence

from tokenwright.trace.schema import StepFrame, Summary


def summarise(frames: Sequence[StepFrame], layers: int) -> Summary | None:
    """The summary of `frames`, the steps of one run from its first; None if none of them wrote a token."""
    contexts = [frame.start + frame.length for frame in frames if frame.token is not None]  # tokens before each pick
    if not contexts:
        return None
    first = next(index for index, frame in enumerate(frames) if frame.token is not None)
    times = [frame.step_us for frame in frames]
    decode_us, prefix = sum(times[first + 1 :]), frames[0].start
    cached = layers * (contexts[-1] - prefix)
    naive = layers * sum(contexts)
    computed = sum(frame.layer_tokens for frame in frames)
    return Summary(
        written=len(contexts),
        layer_tokens=computed,
        cached=cached,
        naive=naive,
        times=naive / cached,
        reused=naive - computed,
        prefix=prefix,
        ttft_us=sum(times[: first + 1]),
        engine_us=sum(times),
        tokens_per_s=(len(contexts) - 1) * 1e6 / decode_us if decode_us else None,
    )

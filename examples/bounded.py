"""Bounded answers: the same questions without limits, with few tokens, and with a grammar for the answer."""

import time

from tokenwright import LLM, Grammar, SamplingParams

QUESTIONS = (
    ("Lily had a red ball. She took it to the park. The color of the ball was", ["red", "blue", "green"]),
    ("Tom was very sad because his toy broke. Tom did not feel", ["happy", "sad"]),
    ("Max was a big dog. Mia was a small cat. The dog's name was", ["Max", "Mia"]),
    ("It was dark and the moon was in the sky. It was time to go to", ["bed", "school"]),
    ("Ben ate the whole cake. Was there any cake left? The answer was", ["yes", "no"]),
    ("Sue was hungry and wanted some fruit, so her mom gave her an", ["apple", "orange"]),
)
WAYS = ("free", "few tokens", "one of a list")


def params(way, answers):
    if way == "free":
        return SamplingParams(temperature=0, max_tokens=100)
    grammar = Grammar.choice([f" {answer}" for answer in answers]) if way == "one of a list" else None
    return SamplingParams(temperature=0, max_tokens=8, grammar=grammar)


def ask(llm, way, question, answers):
    """The text, its tokens, the seconds to the first token (a grammar's compilation included) and those after it."""
    begun = time.perf_counter()
    [done] = llm.generate([question], params(way, answers), salt=way)  # no way reuses another's cached pages
    after = done.usage.total_s - done.usage.ttft_s
    return done.text, len(done.token_ids), time.perf_counter() - begun - after, after


def gain(free, bounded):
    """The saved seconds by cause: time to first token, fewer tokens, and time per token."""
    steps, fewer = sum(free[1]) - len(free[1]), sum(bounded[1]) - len(bounded[1])
    pace = sum(free[3]) / steps
    return sum(free[2]) - sum(bounded[2]), (steps - fewer) * pace, fewer * pace - sum(bounded[3])


if __name__ == "__main__":
    with LLM("stories") as llm:
        for way in WAYS:
            ask(llm, way, "The sun is", ["warm"])  # warm-up: first calls are slow
        rows: dict[str, list[tuple[str, int, float, float]]] = {way: [] for way in WAYS}
        for question, answers in QUESTIONS:
            print(question)
            for way in WAYS:
                rows[way].append(ask(llm, way, question, answers))
                print(f"{way:>15}: {' '.join(rows[way][-1][0].split())[:80]}")
    table = {way: list(zip(*asked, strict=True)) for way, asked in rows.items()}
    print(f"\n{'of one question':>15} | tokens | to the first | each after it |   total")
    for way, (_, tokens, first, after) in table.items():
        count, steps = len(tokens), sum(tokens) - len(tokens)
        each = f"{sum(after) / steps * 1e3:10.1f} ms" if steps else " " * 12 + "-"
        total = (sum(first) + sum(after)) / count
        print(f"{way:>15} | {sum(tokens) / count:6.1f} | {sum(first) / count * 1e3:9.1f} ms | {each} | {total:5.2f} s")
    for way in WAYS[1:]:
        parts = [seconds / len(QUESTIONS) for seconds in gain(table["free"], table[way])]
        print(
            f"{way} gains {sum(parts):.2f} s a question: {parts[0]:+.3f} to the first token, "
            f"{parts[1]:+.3f} by fewer tokens, {parts[2]:+.3f} by the time of each"
        )

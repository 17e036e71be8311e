"""The two loops that generate text with `logits, cache = model(tokens, cache)`: naive, and with the KV cache."""

from tokenwright import LLM


def naive(model, tokens, max_new, eos):
    for _ in range(max_new):
        logits, _ = model(tokens)  # recomputes every token at every step
        tokens = [*tokens, int(logits[-1].argmax())]
        if tokens[-1] in eos:
            break
    return tokens


def cached(model, tokens, max_new, eos):
    fresh, cache = tokens, None
    for _ in range(max_new):
        logits, cache = model(fresh, cache)  # the prompt once, then one token at a time
        fresh = [int(logits[-1].argmax())]
        tokens = [*tokens, *fresh]
        if fresh[0] in eos:  # the first token may be an end token too
            break
    return tokens


if __name__ == "__main__":
    with LLM("stories") as llm:
        prompt = llm.tokenizer.encode("Once upon a time")
        for loop in (naive, cached):
            print(f"{loop.__name__:>6}:", llm.tokenizer.decode(loop(llm.model, prompt, 40, llm.eos_ids)))

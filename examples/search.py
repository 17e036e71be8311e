"""Search: the texts whose embeddings are nearest to the query's. A model that was trained for it finds better."""

from tokenwright import LLM

TEXTS = ["The cat sat on the mat.", "The dog ran in the park.", "Mom made a big cake.", "The sun is hot and bright."]

with LLM("stories") as llm:
    query, *rows = llm.embed(["A cat sits on a mat.", *TEXTS], pooling="mean", normalize=True)
    ranked = sorted(zip((float(row @ query) for row in rows), TEXTS, strict=True), reverse=True)
    for score, text in ranked:
        print(f"{score:.3f}  {text}")
    print(llm.rerank("A cat sits on a mat.", TEXTS).argmax() == TEXTS.index(ranked[0][1]))

"""Tokenwright, through `LLM`."""

from __future__ import annotations

from protocol import Job, Written, serve

from tokenwright import LLM, SamplingParams

PAGE = 16  # tokens
WEIGHTS = {"bf16": "native", "gguf": "native", "int8": "int8", "int4": "int4"}


class Ours:
    def __init__(self, job: Job) -> None:
        pages = job.streams * -(-job.length // PAGE)  # sized for the number of streams, as in the other adapters
        self.llm = LLM(str(job.model), weights=WEIGHTS[job.format], page_size=PAGE, pages=pages)
        self.texts = 0

    def run(self, prompts: list[list[int]], tokens: int) -> Written:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.texts += 1
        done = self.llm.generate(prompts, params, salt=str(self.texts))  # a salt of its own: no prefix hits
        written = Written(len(prompts))
        written.ids = [list(one.token_ids) for one in done]
        written.seconds = [list(one.usage.token_s) for one in done]
        return written

    def picks(self, ids: list[int]) -> list[tuple[int, float]]:
        [done] = self.llm.generate([ids], max_tokens=0, prompt_logprobs=2)
        return [(first.token, first.logprob - second.logprob) for first, second in done.prompt_top_logprobs]


if __name__ == "__main__":
    serve(Ours)

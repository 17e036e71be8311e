"""onnxruntime-genai, through its generator: one batch from the first token to the last."""

from __future__ import annotations

import json

import numpy
import onnxruntime_genai
from protocol import Job, Written, serve


class OnnxRuntime:
    def __init__(self, job: Job) -> None:
        config = onnxruntime_genai.Config(str(job.model))
        threads = {"intra_op_num_threads": job.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        self.model = onnxruntime_genai.Model(config)

    def run(self, prompts: list[list[int]], tokens: int) -> Written:
        length = len(prompts[0]) + tokens
        params = onnxruntime_genai.GeneratorParams(self.model)
        params.set_search_options(batch_size=len(prompts), min_length=length, max_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(self.model, params)
        written = Written(len(prompts))
        generator.append_tokens(numpy.array(prompts, dtype=numpy.int32))
        for _ in range(tokens):
            generator.generate_next_token()
            written.step(list(generator.get_next_tokens()))
        return written


if __name__ == "__main__":
    serve(OnnxRuntime)

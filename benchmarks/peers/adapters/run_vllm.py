"""vLLM's CPU build, through the steps of its engine, in this process."""

from __future__ import annotations

import os

from protocol import Job, Written, serve


class Vllm:
    def __init__(self, job: Job) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: job.threads]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "HF_HUB_OFFLINE": "1",
        }
        from vllm import LLM  # reads the environment at import

        self.engine = LLM(
            str(job.model),
            dtype="bfloat16",
            max_model_len=job.length,
            max_num_seqs=job.streams,
            max_num_batched_tokens=job.length,
            enable_prefix_caching=False,
        ).llm_engine
        self.requests = 0

    def run(self, prompts: list[list[int]], tokens: int) -> Written:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        written = Written(len(prompts))
        names = {str(self.requests + at): at for at in range(len(prompts))}
        self.requests += len(prompts)
        for name, at in names.items():
            self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompts[at]), params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                stream = names[output.request_id]
                written.add(stream, *output.outputs[0].token_ids[len(written.ids[stream]) :])
        return written


if __name__ == "__main__":
    serve(Vllm)

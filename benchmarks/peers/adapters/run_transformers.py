"""transformers, through the model's forward and its dynamic cache."""

from __future__ import annotations

import torch
import transformers
from protocol import Job, Written, serve


class Transformers:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
        self.model = loaded.eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], tokens: int) -> Written:
        cache = transformers.DynamicCache(config=self.model.config)
        fed = torch.tensor(prompts)  # [streams, tokens]
        written = Written(len(prompts))
        for _ in range(tokens):
            logits = self.model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            fed = logits.argmax(-1)  # [streams, 1]
            written.step(fed[:, 0].tolist())
        return written


if __name__ == "__main__":
    serve(Transformers)

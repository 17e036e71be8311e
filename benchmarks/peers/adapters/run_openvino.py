"""OpenVINO GenAI, through the steps of its continuous batching."""

from __future__ import annotations

import numpy
import openvino
import openvino_genai
from protocol import Job, Written, serve


class OpenVino:
    def __init__(self, job: Job) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = job.streams
        scheduler.max_num_batched_tokens = job.streams * job.length  # a prompt is computed in one step
        properties = {"INFERENCE_NUM_THREADS": job.threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(job.model), scheduler, "CPU", properties)
        self.requests = 0

    def run(self, prompts: list[list[int]], tokens: int) -> Written:
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        inputs = [openvino.Tensor(numpy.array([ids], dtype=numpy.int64)) for ids in prompts]
        written = Written(len(prompts))
        handles = [self.pipeline.add_request(self.requests + at, one, config) for at, one in enumerate(inputs)]
        self.requests += len(prompts)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for stream, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        written.add(stream, *output.generated_ids)
        return written


if __name__ == "__main__":
    serve(OpenVino)

"""llama.cpp, through the functions of its C library: batches of 512, one context for each number of streams."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy
from protocol import Job, Written, serve

BATCH = 512


class LlamaCpp:
    def __init__(self, job: Job) -> None:
        llama_cpp.llama_backend_init()
        self.job = job
        self.model = llama_cpp.llama_model_load_from_file(
            str(job.model).encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {job.model}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.context, self.streams = None, 0

    def run(self, prompts: list[list[int]], tokens: int) -> Written:
        self.prepare(len(prompts))
        written = Written(len(prompts))
        fed = [(one, at, stream) for stream, ids in enumerate(prompts) for at, one in enumerate(ids)]
        last = len(prompts[0]) - 1
        for start in range(0, len(fed), BATCH):
            part = fed[start : start + BATCH]
            ends = [row for row, (_, at, _) in enumerate(part) if at == last]
            found = self.decode(part, ends)
            for row, one in zip(ends, found, strict=True):
                written.add(part[row][2], one)
        for at in range(last + 1, last + tokens):
            step = [(ids[-1], at, stream) for stream, ids in enumerate(written.ids)]
            written.step(self.decode(step, list(range(len(step)))))
        return written

    def picks(self, ids: list[int]) -> list[tuple[int, float]]:
        self.prepare(1)
        found = []
        for start in range(0, len(ids) - 1, BATCH):
            part = ids[start : min(start + BATCH, len(ids) - 1)]
            self.decode([(one, start + at, 0) for at, one in enumerate(part)], list(range(len(part))))
            for row in range(len(part)):
                logits = self.logits(row)
                second, first = numpy.argpartition(logits, -2)[-2:]
                if logits[second] > logits[first]:
                    first, second = second, first
                found.append((int(first), float(logits[first] - logits[second])))
        return found

    def prepare(self, streams: int) -> None:
        """Create an empty cache for a number of streams; outside the timed part."""
        if streams != self.streams:
            if self.context is not None:
                llama_cpp.llama_free(self.context)
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = streams * -(-self.job.length // 256) * 256
            params.n_batch = params.n_ubatch = BATCH
            params.n_seq_max = streams
            params.n_threads = params.n_threads_batch = self.job.threads
            self.context, self.streams = llama_cpp.llama_init_from_model(self.model, params), streams
            if not self.context:
                raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def decode(self, rows: list[tuple[int, int, int]], wanted: list[int]) -> list[int]:
        """Compute rows of (id, position, stream). Returns the argmax ids of the `wanted` rows."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for row, (one, at, stream) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.seq_id[row][0] = one, at, 1, stream
            batch.logits[row] = False
        for row in wanted:
            batch.logits[row] = True
        if (code := llama_cpp.llama_decode(self.context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        return [int(self.logits(row).argmax()) for row in wanted]

    def logits(self, row: int) -> numpy.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        return numpy.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,))


if __name__ == "__main__":
    serve(LlamaCpp)

"""A mixture of experts beside the time of reading the experts that its steps choose.

    python -m benchmarks.experts [--weights int8 bf16] [--layers 4] [--streams 1 8] [--tokens 64] [--root FOLDER]
    python -m benchmarks.experts --weights q8_0 --llama VENV/bin/python    # beside llama.cpp, on one GGUF file

The model has the shapes of Qwen3-30B-A3B, cut to some layers, and random weights. Of every text the experts that each
token chooses in each layer are recorded first, one text at a time. The same texts are then written together, greedily;
since a row has the same bits in any company, they choose the same experts again. So the bytes of each step are counted,
not estimated: each expert that some stream chooses, once, and all else that a step reads.

    decode        milliseconds of a decode step, the median over all steps and rounds
    reading       the time of reading that many bytes, the median of measurements in turn with the rounds
    experts       distinct ones in a layer, the mean over steps; `chosen`, if no two streams shared any
    llama.cpp     milliseconds of its decode step over the same prompts; its rounds and ours take turns

With q8_0 the model is a GGUF file, written by the `gguf` package, that both read; --llama is a Python that has
llama-cpp-python (benchmarks/peers_setup.py makes one). It writes the file, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.quality import table
from tokenwright import LLM, SamplingParams
from tokenwright.backends import Kernels
from tokenwright.backends.layout import Weights
from tokenwright.backends.torch.backend import TorchBackend
from tokenwright.backends.torch.counted import CountedKernels
from tokenwright.bench import shapes
from tokenwright.bench.limits import Bound, StepWork, processor
from tokenwright.checkpoints.files.atomic_write import draft_folder
from tokenwright.models.experts import Experts, Routing
from tokenwright.trace.messages.schema import StepFrame

HERE = Path(__file__).parent
WEIGHTS = {"int8": "int8", "bf16": "native", "int4": "int4", "q8_0": "native"}
PROMPT = 32
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "bos_token_id": 0, "eos_token_id": 1,
    "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip

Chosen = list[list[set[int]]]  # of each decode step, of each layer


@dataclass(frozen=True)
class Row:
    """The result of one format and number of streams; seconds, and bytes of the mean step."""

    weights: str
    streams: int
    decode: float
    reading: float
    nbytes: float
    experts: float
    chosen: int
    peer: float | None = None  # llama.cpp's `decode`


class Llama:
    """llama.cpp in a process of its own; adapters/protocol.py has what it is asked."""

    def __init__(self, python: str, file: Path, streams: int, tokens: int) -> None:
        command = [python, str(HERE / "adapters" / "run_llama_cpp.py")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        what = {"threads": torch.get_num_threads(), "streams": streams, "length": PROMPT + tokens}
        self._ask("load", model=str(file), format="q8_0", **what)

    def run(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        """Each stream's seconds from the request to each token."""
        seconds: list[list[float]] = self._ask("run", prompts=prompts, tokens=tokens)["seconds"]
        return seconds

    def close(self) -> None:
        self._process.communicate()  # closing its stdin ends it

    def _ask(self, do: str, **what: object) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes were asked for"
        self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "it has ended"}')
        if "error" in answer:
            raise SystemExit(f"llama.cpp: {answer['error']}")
        return answer


def ready(root: Path, layers: int) -> Path:
    """The folder of the model; written if it does not exist."""
    folder = root.expanduser() / f"qwen3moe-{layers}"
    if not folder.exists():
        config = {**CONFIG, "num_hidden_layers": layers}
        with draft_folder(folder) as draft:
            (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
            shapes.write_tokenizer(draft, config["vocab_size"])
            shapes.write_weights(draft / "model.safetensors", config, seed=0)
    return folder


def ready_file(folder: Path, python: str) -> Path:
    """The model as a GGUF file in Q8_0; written if it does not exist."""
    file = folder.with_name(f"{folder.name}-q8_0.gguf")
    if not file.exists():
        draft = file.with_suffix(".draft")
        subprocess.run([python, HERE / "adapters" / "to_gguf.py", folder, "q8_0", draft], check=True)
        draft.rename(file)
    return file


class Routes(CountedKernels):
    """Kernels that note which experts the last row of each step chose."""

    def __init__(self, kernels: Kernels, layers: int) -> None:
        super().__init__(kernels)
        self.layers = layers
        self.found = Chosen()

    def route(
        self, logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = super().route(logits, routing, correction)
        if not self.found or len(self.found[-1]) == self.layers:
            self.found.append([])
        self.found[-1].append(set(ids[-1].tolist()))
        return ids, weights


@contextmanager
def recorded(llm: LLM, layers: int) -> Iterator[Chosen]:
    """The experts chosen by the last row of each step; steps run op by op meanwhile."""
    decoder, runner = llm.loaded.decoder, llm.engine.runner.runner  # type: ignore[attr-defined]  (of a traced LLM)
    plain, routes = runner.backend, Routes(decoder.kernels, layers)
    runner.backend = TorchBackend(decoder.using(routes), plain.store)
    try:
        yield routes.found
    finally:
        runner.backend = plain


def expert_bytes(llm: LLM) -> int:
    """Bytes of the weights of one expert."""
    [op, *_] = [op for op in llm.graph.blocks if isinstance(op, Experts)]
    weights: Weights = llm.loaded.decoder.native._weights  # type: ignore[attr-defined]
    return sum(weights[one.name].nbytes for one in (op.up, op.down)) // op.experts


def watched(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[Chosen, list[int]]:
    """One text's choices at each decode step, and the bytes of weights and cache that each step read."""
    layers = llm.graph.layers
    frames: list[StepFrame] = []
    with recorded(llm, layers) as chosen, llm.run(prompt, params) as run:
        while not run.ended:
            frames += run.step()
    return chosen[1:], [frame.weight_bytes + frame.kv_read for frame in frames[1:]]


def steps_of(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each decode step, from each stream's seconds from request to each token."""
    ends = [max(at) for at in zip(*seconds, strict=True)]
    return [after - before for before, after in pairwise(ends)]


def measured(llm: LLM, name: str, streams: int, tokens: int, rounds: int, peer: Llama | None) -> Row:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    rng = random.Random(7)
    prompts = [[rng.randrange(5, llm.config.vocab_size) for _ in range(PROMPT)] for _ in range(streams)]
    seen = [watched(llm, prompt, params) for prompt in prompts]
    each, layers = expert_bytes(llm), llm.graph.layers
    [op, *_] = [op for op in llm.graph.blocks if isinstance(op, Experts)]
    met, nbytes = [], []
    for step in range(tokens - 1):
        distinct = sum(len(set.union(*(chosen[step][layer] for chosen, _ in seen))) for layer in range(layers))
        alone = [read[step] - op.chosen * layers * each for _, read in seen]  # without the experts
        kv = sum(alone) - streams * min(alone)  # beside what all share; K and V differ by their length alone
        met.append(distinct / layers)
        nbytes.append(min(alone) + kv + distinct * each)
    bound = Bound(mean(nbytes), llm.weights.name)
    steps, readings, theirs = list[float](), list[float](), list[float]()
    for turn in range(rounds):
        done = llm.generate(prompts, params, salt=f"experts {turn}")
        steps += steps_of([one.usage.token_s for one in done])
        readings.append(bound(StepWork(mean(nbytes), 0, 0)).seconds)
        if peer is not None:
            theirs += steps_of(peer.run(prompts, tokens))
    figures = median(steps), median(readings), mean(nbytes), mean(met), op.chosen * streams
    return Row(name, streams, *figures, median(theirs) if theirs else None)


def shown(row: Row) -> tuple[str, ...]:
    return (
        row.weights,
        str(row.streams),
        f"{row.experts:.1f} of {row.chosen}",
        f"{row.nbytes / 1e6:,.1f}",
        f"{row.decode * 1e3:.2f}",
        f"{row.reading * 1e3:.2f}",
        f"{row.decode / row.reading:.2f}",
        "" if row.peer is None else f"{row.peer * 1e3:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=list(WEIGHTS), default=["int8", "bf16"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama", metavar="PYTHON", help="a Python that has llama-cpp-python, for q8_0")
    parser.add_argument("--root", type=Path, default=shapes.default_root())
    arguments = parser.parse_args()
    if ("q8_0" in arguments.weights) != (arguments.llama is not None):
        parser.error("--weights q8_0 and --llama go together")
    folder, before = ready(arguments.root, arguments.layers), os.getloadavg()[0]
    rows = []
    for name in arguments.weights:
        model = ready_file(folder, arguments.llama) if name == "q8_0" else folder
        peer = Llama(arguments.llama, model, max(arguments.streams), arguments.tokens) if name == "q8_0" else None
        with LLM(model, weights=WEIGHTS[name], device="cpu", trace=True) as llm:
            rows += [
                measured(llm, name, streams, arguments.tokens, arguments.rounds, peer) for streams in arguments.streams
            ]
            kernels = llm.kernels
        if peer is not None:
            peer.close()
    head = ("weights", "streams", "experts", "MB a step", "decode, ms", "reading, ms", "ratio", "llama.cpp, ms")
    print(f"{processor()}, {kernels} kernels, {arguments.layers} layers, load {before:.2f} before\n")
    print(table(head, list(map(shown, rows))), end="")


if __name__ == "__main__":
    main()

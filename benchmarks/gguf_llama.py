"""GGUF files in llama.cpp and here: the same ids of texts, and the same most probable tokens.

    python -m benchmarks.gguf_llama --python OTHER/bin/python [FILE.gguf ...]

OTHER is an environment with llama-cpp-python. Without files the model inside is written as BF16, Q8_0 and Q4_0. The
texts are written by the model itself, and some are chosen to be hard to tokenise. A position qualifies if our two most
probable tokens differ by more than MARGIN nats: llama.cpp rounds activations otherwise than we do. Prints a line for
each file, and exits with 1 if in one of them fewer than 90 % of the qualifying positions agree.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gguf_types import BEGINNING
from tokenwright import LLM
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.gguf_writer import check_writing, write_gguf
from tokenwright.formats import WeightFormat

MARGIN, LEAST = 0.1, 0.9
HARD = ("Hello, it's 1234!", "a\n\n12  34\t5", "  two spaces — “quoted” naïve 東京 🙂", "<|user|>Hi<|end|>")
HELPER = Path(__file__).parent / "adapters" / "llama_cpp_tokens.py"


def written(folder: Path) -> list[Path]:
    """The model inside in each type that we write."""
    found = []
    for form in ("bfloat16", "int8", "int4"):
        file = folder / f"stories-{form}.gguf"
        write_gguf(check_writing(Checkpoint.open("stories"), file, WeightFormat.parse(form)), file)
        found.append(file)
    return found


def theirs(python: str, file: Path, texts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """llama.cpp's ids of texts, and the most probable token after each."""
    asked = json.dumps({"model": str(file), "texts": texts})
    ended = subprocess.run([python, HELPER], input=asked, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"llama.cpp failed on {file}: {ended.stderr[-2000:]}")
    found = json.loads(ended.stdout)
    return found["ids"], found["next"]


def compared(python: str, file: Path, count: int, length: int) -> bool:
    """Whether a file is the same model here and there; prints how far."""
    with LLM(file) as llm:
        prompts = [BEGINNING] * count
        params = [llm.sampling(max_tokens=length, temperature=1.0, seed=seed) for seed in range(count)]
        texts = [BEGINNING + one.text for one in llm.generate(prompts, params)]
        ids, following = theirs(python, file, [*texts, *HARD])
        ours = [llm.tokenizer.encode(text) for text in (*texts, *HARD)]
        same_ids = sum(map(list.__eq__, ids, ours))
        differ = [text for text, one, other in zip((*texts, *HARD), ids, ours, strict=True) if one != other]
        agreed = qualifying = positions = 0
        for each, expected in zip(ids[:count], following, strict=False):
            [done] = llm.generate([each], max_tokens=1, temperature=0, prompt_logprobs=2)
            for at, (best, second) in enumerate(done.prompt_top_logprobs):
                positions += 1
                if best.logprob - second.logprob > MARGIN:
                    qualifying += 1
                    agreed += best.token == expected[at]
        share = agreed / max(1, qualifying)
        but = f" (not {differ[0][:30]!r})" if differ else ""
        print(
            f"{file.name}: ids of {same_ids} of {len(ours)} texts are equal{but}; "
            f"{agreed:,} of {qualifying:,} qualifying positions agree ({share:.2%}), of {positions:,} ({llm.weights}, "
            f"{llm.kernels})"
        )
        return share >= LEAST


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--python", required=True)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--length", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        files = asked.files or written(Path(home))
        good = [compared(asked.python, file, asked.texts, asked.length) for file in files]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

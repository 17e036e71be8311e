"""A prefix in a file: its K and V are computed once, and a later process goes on behind them."""

import tempfile
from pathlib import Path

from tokenwright import LLM, CacheFileError

PREFIX = "Once upon a time, there was a little girl named Lily. She had a cat. The cat was big and red. " * 3

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "prefix.kv"
    with LLM("stories") as llm:
        llm.generate(PREFIX, max_tokens=1, temperature=0)
        print(f"{llm.save_cache(file, PREFIX)} tokens saved, {file.stat().st_size / 1e6:.1f} MB")
    with LLM("stories") as llm:  # as another process would
        llm.load_cache(file)
        [done] = llm.generate(PREFIX + "One day,", max_tokens=10, temperature=0)
        print(f"{done.usage.reused_tokens} of {done.usage.prompt_tokens} prompt tokens reused:{done.text}")
    with LLM("stories", kv="int8") as other:
        try:
            other.load_cache(file)
        except CacheFileError as error:
            print(f"refused: {str(error).replace(folder, '')}")

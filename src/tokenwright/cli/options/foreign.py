"""Options and commands of other programs, answered with ours: llama.cpp's, vLLM's, ollama's, transformers'.

An entry is one of our options or commands, or a sentence, and then theirs. An unknown option gets the nearest.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from tokenwright.checks import names_of_others
from tokenwright.errors import TokenwrightError

ALIASES = {"new_tokens": "max_tokens", "adapter": "adapters"}  # a command's parameter -> the library's
_HINT = re.compile(r" \(([a-z_]+(?: or [a-z_]+)*)\)")
_SOME = ("pages", "kv_memory", "page_size", "token_budget", "lora", "adapters")  # on some commands only
_ELSEWHERE = {"adapters": "serve --adapter"}  # on another command only


def options_of(parameters: Sequence[Any], typed: Sequence[str] = ()) -> dict[str, str]:
    """Options by the library's names: as `typed`, else in their first long form."""
    found: dict[str, str] = {}
    given = {word.partition("=")[0] for word in typed}
    for parameter in parameters:
        flags = [flag for flag in parameter.opts if flag.startswith("-")]
        if flags:
            longest = [flag for flag in flags if flag.startswith("--")] or flags
            said = [flag for flag in flags if flag in given]
            found[ALIASES.get(parameter.name, parameter.name)] = (said or longest)[0]
    return found


def spoken(error: TokenwrightError, options: Mapping[str, str]) -> str:
    text = _HINT.sub(lambda hint: _hinted(hint, options), str(error))
    names = {*error.fields, *(name for name in options if "_" in name)}
    for name in sorted(names & options.keys(), key=len, reverse=True):
        text = re.sub(rf"(?<![\w'\"/.-]){name}(?![\w'\"/=-]|\.\w)", options[name], text)
    return text


def _hinted(hint: re.Match[str], options: Mapping[str, str]) -> str:
    names = hint[1].split(" or ")
    if not any(name in _SOME for name in names):
        return hint[0]
    known = [options[name] for name in names if name in options]
    known = known or [_ELSEWHERE[name] for name in names if name in _ELSEWHERE]
    return f" ({' or '.join(known)})" if known else ""


OPTIONS = names_of_others("""
    -n: --n-predict --predict --num-predict --max-new-tokens --max-gen-len --max-length --tokens
    --threads: -t --n-threads --num-threads --num-thread --threads-batch -tb --cpus
    --temperature: --temp --temp-initial
    --system: --system-prompt --sys -sys --system-message --system-file
    --json: --format --output-format --as-json --json-output
    --stop: --reverse-prompt -r --stop-sequence --stop-sequences --stop-string --stop-strings --eos-token
    --stop-id: --stop-token-ids --stop-token-id --eos-token-id
    --repetition-penalty: --repeat-penalty --rep-pen --penalty-repeat
    --repetition-window: --repeat-last-n --penalty-last-n --repetition-context-size
    --presence-penalty: --penalty-present
    --frequency-penalty: --penalty-freq
    --typical-p: --typical --locally-typical
    --top-n-sigma: --top-nsigma
    --mirostat-eta: --mirostat-lr
    --mirostat-tau: --mirostat-ent
    --dry-breaker: --dry-sequence-breaker
    --dry-window: --dry-penalty-last-n
    --lark: --grammar --grammar-file --gbnf --guided-grammar
    --json-schema: -j --json-schema-file --guided-json --schema --response-format
    --regex: --guided-regex
    --choice: --guided-choice
    --texts: --choices --num-return-sequences --n --n-choices --parallel-texts
    --beams: --num-beams --beam-width --beam-size
    --beam-groups: --num-beam-groups
    --min-tokens: --min-new-tokens --min-length
    --max-seconds: --max-time --t-max-predict-ms --timeout-seconds
    --bad-word: --bad-words
    --ban-id: --suppress-tokens
    --logprobs: --n-probs --top-logprobs
    --tools: --functions --tool-file --jinja-tools
    --thinking: --think --hidethinking --reasoning-budget --reasoning-format --enable-thinking --no-think --nothink
    --seed: -seed --random-seed --rng-seed
    --file: --prompt-file --binary-file -bf --input-file
    --model: --model-path --repo-id -hf -hfr --hf-repo --hf-file -hff --model-id --model-name -mu --model-url
        --checkpoint
    --dtype: --torch-dtype --precision
    --device: -ngl --gpu-layers --n-gpu-layers --num-gpu -dev --main-gpu -mg --device-map --gpu
    --weights: --quantization --quant --quantize --load-in-8bit --load-in-4bit --wbits
    --kv: --cache-type-k --cache-type-v -ctk -ctv --kv-cache-dtype --kv-type
    --kv-memory: --gpu-memory-utilization --mem-fraction-static --kv-cache-memory-bytes --max-kv-size
    --token-budget: -b --batch-size -ub --ubatch-size --max-num-batched-tokens --chunked-prefill-size
        --prefill-step-size
    --page-size: --block-size
    --sinks: --keep --attention-sinks
    --window: --sliding-window --swa
    --speculate: --draft-max --speculative-config --lookup
    --draft: -md --model-draft --draft-model --speculative-model --speculative-draft-model-path
    --lora: --lora-scaled --lora-base --adapter-path --peft
    --adapter: --lora-modules --enable-lora --adapters
    --cache-file: --prompt-cache --prompt-cache-all --slot-save-path --prompt-cache-file
    --no-cache: --no-use-cache --no-prompt-cache
    --echo: --display-prompt --show-prompt
    --quiet: --silent --log-disable --no-perf --simple-io
    --verbose: --verbose-prompt --verbosity --perf -lv --stats
    --plain: --no-markdown --raw --nowordwrap
    --shift: --context-shift
    --served-model-name: --alias -a --model-alias
    --cors-origin: --allowed-origins --cors --origins
    --allowed-host: --allowed-hosts --trusted-hosts
    --replicas: --data-parallel-size -dp --workers --pipeline-parallel-size
    --tensor-parallel: --tensor-parallel-size -tp --tp-size --tp
    --max-queue: --max-concurrency --max-waiting --queue-size
    --request-timeout: --timeout -to --request-timeout-s
    --access-log: --disable-log-requests --enable-log-requests --uvicorn-log-level --log-file --log-level
    --explorer: --webui --ui
    --api-key: --api-keys
    --port: --listen-port
    --host: --listen --bind --ip
    --memory: --max-ram --max-memory
    --yes: --assume-yes --no-confirm
    the prompt is an argument, as in generate "TEXT": -p --prompt --text --input
    the context is the model's own, --kv-memory limits the cache, and --window goes on without end: -c --ctx-size
        --num-ctx --n-ctx --max-model-len --context-length --ctx --max-seq-len --max-position-embeddings
    `tokenwright chat` is the conversation: -i --interactive -cnv --conversation --interactive-first -no-cnv -ins
    texts are streamed always: --stream --streaming --no-stream
    temperature 0 draws nothing, any other does: --do-sample --greedy --sampling-seq --samplers
    the checkpoint's template is used, or chat_template.jinja in its folder: --chat-template --chat-template-file
        --jinja
        --no-jinja
    tools and reasoning are read by the model's template: --enable-auto-tool-choice --tool-call-parser
        --reasoning-parser --enable-reasoning --tool-parser-plugin
    any model answers /v1/embeddings and /v1/rerank: --embedding --embeddings --rerank --reranking --pooling --task
        --runner
    /metrics is served always: --metrics --enable-metrics --disable-log-stats
    TLS is the task of a proxy before the server: --ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file
        --root-path
    set the variable HF_TOKEN: --hf-token -hft --token
    set the variable HF_HOME: --download-dir --cache-dir --hf-cache
    set the variable HF_HUB_OFFLINE=1: --offline --local-files-only
    /v1/models lists what is kept, and --memory limits it: --keepalive --keep-alive
    redirect it, as in > FILE: --output --output-file --log-dir --out -o
    there is nothing to choose, so leave it out: -fa --flash-attn --mlock --no-mmap --mmap --numa --trust-remote-code
        --enforce-eager --enable-prefix-caching --no-warmup --no-kv-offload -nkvo --split-mode -sm --tensor-split -ts
        --rope-scaling --rope-freq-base --rope-freq-scale --cont-batching -cb --color -co --escape -e --no-escape
        --special --prio --poll --cpu-mask --load-format --tokenizer --tokenizer-mode --insecure --in-prefix --in-suffix
        --ignore-patterns --enable-chunked-prefill --swap-space --attention-backend --mm-processor-kwargs
        --no-conversation
        --multiline-input -mli --nohistory --noverbose --no-context-shift --defrag-thold --check-tensors --low-vram
        --override-kv --control-vector --max-loras --max-lora-rank --max-num-seqs -np --parallel --port-range --slots
        --props --no-webui --swap-memory --logit-penalty --ignore-prompt
""")
COMMANDS = names_of_others("""
    chat: run converse talk conversation interactive cli
    generate: complete completion completions text predict write
    serve: server start up api api-server openai listen daemon
    explore: webui ui gui web show-attention visualize
    inspect: show info describe model-info details
    models: list ls tags available
    pull: download fetch get install add
    rm: remove delete del uninstall prune
    quantize: convert quantise export create import pack gguf
    bench: benchmark perf speed llama-bench latency throughput
    plan: estimate memory fit size
    race: compare diff
    verify: check test doctor selftest
    cache: clear clean
    `tokenwright --version` says it: version about
    the server's /api/ps lists what is loaded, and `tokenwright models` what is on the disk: ps status top
    POST /tokenize of the server does it, and LLM(...).tokenizer.encode in Python: tokenize tokenise detokenize encode
        count-tokens
    POST /v1/embeddings of the server does it, and LLM(...).embed in Python: embed embedding embeddings
    POST /v1/rerank of the server does it, and LLM(...).rerank in Python: rerank reranking
    LLM(...).score in Python gives the log-probabilities of a text: perplexity ppl score eval evaluate loglikelihood
    Ctrl-C ends the server: stop kill shutdown down
    there is no such thing here: push cp login logout signin signout finetune train imatrix collect-env run-batch
""")


def hint_of_option(name: str, flags: Sequence[str]) -> str:
    ours = OPTIONS.get(name)
    if ours is not None and not ours.startswith("-"):
        return f": {ours}"
    if ours is not None:
        return f"; did you mean {ours}?" if ours in flags else f"; {ours} is an option of other commands"
    near = [flag for flag in flags if len(name) > 3 and flag.startswith(name)]
    near = near or sorted(get_close_matches(name, flags, 3))
    return f"; did you mean {', '.join(near)}?" if near else ""


def hint_of_command(name: str, commands: Sequence[str]) -> str:
    ours = COMMANDS.get(name)
    if ours is not None and ours not in commands:
        return f": {ours}"
    near = [ours] if ours is not None else get_close_matches(name, commands, 1)
    return f"; did you mean {near[0]}?" if near else ""


def short_foreign(words: Sequence[str]) -> str | None:
    for before, word in zip(("", *words), words, strict=False):
        if word == "--":
            return None
        if word in _LETTERS and not before.startswith("--"):
            return word  # read as several options
    return None


_LETTERS: Mapping[str, str] = {name: ours for name, ours in OPTIONS.items() if name[1] != "-" and len(name) > 2}

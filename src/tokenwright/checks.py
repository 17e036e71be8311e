"""Checks of callers' values and names of options. Errors name the option and what it may be."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import ParamSpec, TypeGuard, TypeVar

from tokenwright.errors import RequestError

MAX_BYTES = 1 << 62
MAX_TOKENS = 1 << 31  # tokens, and counts of tokens: positions have 32 bits


def shown(value: object) -> str:
    """A value for a message. Python prints no integers of thousands of digits, and no very deep values."""
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):
        return "one of thousands of " + ("digits" if isinstance(value, int) else "digits or levels")


def told(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else shown(value)


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int = 0, most: int = MAX_TOKENS) -> None:
    """Raises RequestError for anything but a whole number from `least` to `most`."""
    if not is_whole(value) or not least <= value <= most:
        raise RequestError(f"{name} must be a whole number from {least:,} to {most:,}, not {shown(value)}", name)


def check_bool(name: str, value: object) -> None:
    """Raises RequestError for anything but True and False: a string such as "no" would count as True."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, not {shown(value)}", name)


def check_device(name: str) -> None:
    """Raises RequestError for anything but a device's name, whether or not this machine has it."""
    if not re.fullmatch(r"auto|cpu|mps|(gpu|cuda)(:\d{1,3})?", name):
        raise RequestError(f"device {name!r} is not known; use auto, cpu, gpu, gpu:N, cuda, cuda:N or mps", "device")


def folders(name: str, value: object) -> tuple[str | Path, ...]:
    """An option's one or several folders. Raises RequestError."""
    found = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(folder, str | Path) for folder in found):
        raise RequestError(f"{name} must be a folder, or a list of folders, not {shown(value)}", name)
    return tuple(found)


def check_folder(name: str, value: object) -> None:
    """Raises RequestError for a value that cannot be the name of a folder."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise RequestError(f"{name} must be a folder, not {shown(value)}", name)


def escaped_byte(character: str) -> bool:
    """Whether this surrogate stands for a byte that is not UTF-8."""
    return "\udc80" <= character <= "\udcff"


# Other libraries' names. An entry: our name, or a sentence that says what there is instead, and theirs.
def names_of_others(table: str) -> Mapping[str, str]:
    entries = re.findall(r"^ {4}(\S.*?): ((?:\S.*\n(?: {8})?)+)", table, re.MULTILINE)
    return {theirs: ours for ours, names in entries for theirs in names.split()}


OF_MODEL = names_of_others("""
    threads: n_threads n_threads_batch num_threads num_thread num_cpu_threads
    model: model_path model_id model_name repo_id pretrained_model_name_or_path
    dtype: torch_dtype precision
    device: device_map n_gpu_layers gpu_layers num_gpu main_gpu device_ids
    weights: quantization load_in_8bit load_in_4bit quantization_config quantize
    token_budget: n_batch n_ubatch num_batch max_num_batched_tokens chunked_prefill_size
    max_sequences: max_num_seqs n_parallel n_seq_max max_running_requests max_batch_size
    kv_memory: gpu_memory_utilization mem_fraction_static kv_cache_memory_bytes cache_size
    kv: kv_cache_dtype type_k type_v cache_type_k cache_type_v kv_quant
    swap_memory: swap_space cpu_offload_gb
    speculate: speculative_config num_speculative_tokens
    draft: speculative_model draft_model model_draft
    lora: lora_path lora_base peft_model
    adapters: enable_lora lora_modules max_loras max_lora_rank
    page_size: block_size kv_page_size
    pages: num_gpu_blocks_override num_pages
    window: sliding_window attention_window_size
    sinks: attention_sink_size n_keep
    the context is the model's own; kv_memory or pages limit the cache: n_ctx num_ctx max_model_len max_seq_len
        context_length max_seq_length ctx_size
    a model runs on one device; `tokenwright serve --replicas` runs several of it: tensor_parallel_size
        pipeline_parallel_size data_parallel_size tensor_split tp_size
    give logprobs or prompt_logprobs to generate: logits_all max_logprobs
    embed is a method, of any model: embedding task runner pooling_type
    cached prefixes are used; give cache=False to generate: enable_prefix_caching use_cache cache_prompt
    the checkpoint's template is used by chat: chat_format chat_template chat_handler
    set the variable HF_TOKEN: token use_auth_token hf_token
    set the variable HF_HOME: cache_dir download_dir
    set the variable HF_HUB_OFFLINE=1: local_files_only offline
    messages go to logging, logger tokenwright: verbose disable_log_stats log_level
    give it to generate, with each prompt: temperature top_p top_k seed max_tokens stop last_n_tokens_size
    there is nothing to choose; leave it out: trust_remote_code use_mmap use_mlock flash_attn attn_implementation
        enforce_eager numa low_cpu_mem_usage offload_kqv offload_folder use_flash_attention_2 load_format vocab_only
        distributed_executor_backend guided_decoding_backend use_safetensors tokenizer_mode f16_kv mul_mat_q
        max_memory use_fast enable_chunked_prefill disable_custom_all_reduce limit_mm_per_prompt compilation_config
    it is read from the checkpoint: tokenizer rope_scaling rope_theta rope_freq_base rope_freq_scale hf_overrides
        config yarn_ext_factor rope_scaling_type
""")
OF_TEXT = names_of_others("""
    max_tokens: max_new_tokens max_length n_predict num_predict max_completion_tokens max_output_tokens max_gen_len
        max_tokens_to_sample
    min_tokens: min_new_tokens min_length
    temperature: do_sample temp greedy
    repetition_penalty: repeat_penalty rep_pen repetition_penality
    repetition_window: repeat_last_n penalty_last_n repetition_context_size
    stop: stop_sequences stop_strings stop_words stopping_criteria until
    stop_ids: stop_token_ids eos_token_id eos_token_ids
    include_stop: include_stop_str_in_output no_stop_trim
    beams: num_beams beam_width beam_size
    n: num_return_sequences n_choices num_generations
    beam_groups: num_beam_groups
    typical_p: typical locally_typical
    mirostat: mirostat_mode
    dry_multiplier: no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words: bad_words_ids force_words_ids
    banned_ids: suppress_tokens begin_suppress_tokens
    allowed_ids: allowed_token_ids prefix_allowed_tokens_fn
    logit_bias: sequence_bias logits_processor logits_processors
    max_seconds: max_time timeout t_max_predict_ms
    logprobs: top_logprobs output_scores n_probs return_logprob output_logits
    prompt_logprobs: echo_logprobs
    seed: random_seed manual_seed generator rng
    grammar: guided_json guided_regex guided_choice guided_grammar guided_decoding structured_outputs json_schema
        regex json_mode ebnf
    give response_format to chat, or grammar: response_format format response_model
    the method stream, or chat_stream: stream streamer streaming
    progress: use_tqdm show_progress_bar progress_bar
    adapter: lora_request adapter_name
    cache: use_cache cache_prompt
    salt: cache_salt
    observe: output_hidden_states output_attentions return_hidden_states
    params: sampling_params generation_config gen_kwargs
    prompts: prompt prompt_token_ids input_ids inputs text_inputs prompt_tokens
    enable_thinking: think thinking
    chat_template_kwargs: reasoning_effort template_kwargs
    tools: functions tool_schemas
    tool_choice: function_call
    give its fields as keywords: extra_body options model_kwargs extra_args
    speculate is an option of LLM: assistant_model prompt_lookup_num_tokens
    cached prefixes are found by themselves: past_key_values n_keep
    the server fills gaps, at /v1/completions: suffix
    models here read text: images audio multi_modal_data
    there is nothing like it; leave it out: pad_token_id bos_token_id attention_mask skip_special_tokens
        return_dict_in_generate detokenize spaces_between_special_tokens early_stop keep_alive raw user
        return_full_text tfs_z penalize_nl samplers synced_gpus priority epsilon_cutoff eta_cutoff penalty_alpha
        add_generation_prompt clean_up_tokenization_spaces dynatemp_range guidance_scale truncate_prompt_tokens
        top_a dynatemp_exponent renormalize_logits remove_invalid_values exponential_decay_length_penalty
""")
OF_EMBEDDING = names_of_others("""
    normalize: normalize_embeddings normalise embd_normalize
    pooling: pooling_mode pooling_type pooling_strategy
    texts: sentences input inputs texts_or_ids
    documents: passages docs texts candidates
    instruction: task prompt_name
    all scores are returned, in the order of the documents: top_n top_k return_documents
    cut the rows of the array: dimensions truncate_dim
    the result is a NumPy array: convert_to_numpy convert_to_tensor output_value
    leave it out: batch_size show_progress_bar precision device use_tqdm
""")
OF_METHODS = names_of_others("""
    generate: create_completion completion complete generate_text predict __call__ batch_generate
    chat: create_chat_completion chat_completion apply_chat create_chat_completion_openai_v1 converse
    chat_stream: stream_chat
    embed: create_embedding encode embeddings get_embeddings embed_query embed_documents
    rerank: score_documents compute_score
    render: apply_chat_template
    tokenizer.encode: tokenize
    tokenizer.decode: detokenize batch_decode
    tokenizer: get_tokenizer
    model: eval forward
    save_cache: save_state save_session save save_prompt_cache
    load_cache: load_state load_session load load_prompt_cache
    context: n_ctx max_model_len n_ctx_train
    generate with beams=4: beam_search
    close: unload shutdown release del_model
    config: model_config metadata
    eos_ids: token_eos eos_token_id
    reset is not needed, as texts do not depend on earlier ones: reset reset_prefix_cache clear_cache kv_cache_clear
    the command `tokenwright bench` measures: start_profile stop_profile benchmark
    adapters are named when the model is opened: load_lora add_lora load_adapter set_adapter
""")
OF_COMPLETION = names_of_others("""
    choices: outputs sequences candidates generations
    text: generated_text response output output_text
    token_ids: output_ids output_token_ids ids
    usage.prompt_tokens: prompt_token_ids prompt_eval_count
    usage.completion_tokens: eval_count
    content: message_content
    finish_reason: stop_reason done_reason
    reasoning: reasoning_content thinking
    sum(logprobs): cumulative_logprob
    usage: metrics timings
    observed: hidden_states attentions
""")


def no_attribute(what: str, name: str, foreign: Mapping[str, str]) -> AttributeError:
    ours = foreign.get(name)
    hint = "" if ours is None else f": {ours}" if len(ours.split()) > 4 else f"; did you mean {ours}?"
    return AttributeError(f"{what} has no attribute {name!r}{hint}")


_FOREIGN = {"LLM": OF_MODEL, "embed": OF_EMBEDDING, "rerank": OF_EMBEDDING, "score": OF_EMBEDDING}


def unknown_name(what: str, name: str, known: Collection[str], foreign: Mapping[str, str]) -> RequestError:
    """The error of an unknown keyword, with the one that was probably meant.

    >>> str(unknown_name("option of LLM", "n_threads", ["threads"], OF_MODEL))
    'n_threads is no option of LLM; did you mean threads?'
    """
    ours = foreign.get(name)
    if ours is not None and " " in ours and not ours.startswith("the method"):
        return RequestError(f"{name} is no {what}: {ours}", name)
    near = [ours] if ours is not None else get_close_matches(name, known, 1)
    return RequestError(f"{name} is no {what}" + (f"; did you mean {near[0]}?" if near else ""), name)


P = ParamSpec("P")
R = TypeVar("R")


def hinting(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function answer another library's keyword by a RequestError with ours."""
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    parameters = inspect.signature(function).parameters
    known = [one for one in parameters if one != "self"]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    foreign = _FOREIGN.get(name, OF_TEXT)
    what = "sampling parameter" if foreign is OF_TEXT else f"option of {name}"

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for given in kwargs:
            if given not in parameters and (not takes_any or given in foreign):
                raise unknown_name(what, given, known, foreign)
        return function(*args, **kwargs)

    return checked


def hinting_fields(cls: type[R]) -> type[R]:
    """A dataclass whose construction is `hinting`."""
    cls.__init__ = hinting(cls.__init__)  # type: ignore[method-assign]
    return cls

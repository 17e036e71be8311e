// Small frames and cards for the tests of this folder.

import type { ModelCard, RunCard, StepFrame, TokenCard } from "./schema";

export const model: ModelCard = {
  name: "small",
  version: "0",
  device: "cpu",
  dtype: "float32",
  layers: 2,
  width: 8,
  heads: 2,
  kv_heads: 1,
  head_size: 4,
  latent: 0,
  vocab_size: 10,
  context: 32,
  windows: [null, null],
  block_weights: 100,
  head_weights: 80,
  weight_bytes: 720,
  kv_bytes_per_token: 64,
  state_bytes: 0,
  kv_format: "float32",
  page_size: 4,
  pages: 8,
  eos_ids: [9],
  temperature: 1,
  top_k: 0,
  top_p: 1,
};

export const tokens = (...texts: string[]): TokenCard[] => texts.map((text, id) => ({ id, text, special: false }));

export function runCard(prompt: TokenCard[], text: string): RunCard {
  return {
    kind: "run",
    run: "r",
    model: "small",
    prompt: text,
    tokens: prompt,
    written: [],
    written_text: "",
    temperature: 1,
    top_k: 0,
    top_p: 1,
    seed: 1,
    max_tokens: 8,
    stop: [],
    ignore_eos: false,
    first_step: 0,
    watched: [0, 0],
    min_p: 0,
    repetition_penalty: 1,
    parent: null,
  };
}

export function frame(given: Partial<StepFrame>): StepFrame {
  return {
    step: 0,
    start: 0,
    length: 2,
    recomputed: 0,
    seq_len: 3,
    layer_tokens: 4n,
    flops: 10n,
    flops_derived: 9n,
    weight_bytes: 720n,
    kv_read: 1n,
    kv_written: 1n,
    kv_resident: 1n,
    kv_allocated: 4n,
    began_us: 0n,
    step_us: 10,
    attention_us: 3,
    mlp_us: 4,
    head_us: 1,
    sampling_us: 1,
    recording_us: 0,
    token: 0,
    rank: 0,
    logprob: -1,
    sampled: 1,
    entropy: 1,
    uniform: 0.5,
    cache: true,
    layers: [],
    candidates: [],
    attention: null,
    text: "",
    ...given,
  };
}

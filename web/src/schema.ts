// Generated from src/tokenwright/trace/schema.py. Do not edit.

export const VERSION = 1;

export type Source = "measured" | "counted" | "derived" | "read" | "given";

export interface Candidate {
  token: number;
  logprob: number;
  sampled: number;
}

export interface LayerTime {
  attention_us: number;
  mlp_us: number;
}

export interface Loading {
  phase: "loading" | "ready" | "failed";
  done: number;
  total: number;
  message: string;
}

export interface ModelCard {
  name: string;
  version: string;
  device: string;
  dtype: string;
  layers: number;
  width: number;
  heads: number;
  kv_heads: number;
  head_size: number;
  latent: number;
  vocab_size: number;
  context: number;
  windows: (number | null)[];
  block_weights: number;
  head_weights: number;
  weight_bytes: number;
  kv_bytes_per_token: number;
  state_bytes: number;
  kv_format: string;
  page_size: number;
  pages: number;
  eos_ids: number[];
  temperature: number;
  top_k: number;
  top_p: number;
  replicas: number;
}

export interface TokenCard {
  id: number;
  text: string;
  special: boolean;
}

export interface PictureCard {
  rows: number;
  columns: number;
  starts: number[];
  url: string;
}

export interface RunCard {
  run: string;
  model: string;
  prompt: string;
  tokens: TokenCard[];
  written: TokenCard[];
  written_text: string;
  temperature: number;
  top_k: number;
  top_p: number;
  seed: number | null;
  max_tokens: number;
  stop: string[];
  ignore_eos: boolean;
  first_step: number;
  watched: [number, number];
  min_p: number;
  repetition_penalty: number;
  parent: string | null;
  pictures: PictureCard[];
  held: string;
  kind: "run";
}

export interface Summary {
  written: number;
  layer_tokens: number;
  cached: number;
  naive: number;
  times: number;
  reused: number;
  prefix: number;
  ttft_us: number;
  engine_us: number;
  tokens_per_s: number | null;
}

export interface RunState {
  state: "paused" | "running" | "done" | "failed" | "expired";
  steps: number;
  cache: boolean;
  pace: number | null;
  lease_s: number | null;
  throttled: boolean;
  reason: string | null;
  message: string;
  watched: [number, number];
  summary: Summary | null;
  kind: "state";
}

export interface HeadMasses {
  step: number;
  sink: number[];
  local: number[];
  entropy: number[];
  kind: "heads";
}

export interface Labels {
  tokens: TokenCard[];
  kind: "labels";
}

export interface AttentionRow {
  layer: number;
  head: number;
  argmax: number;
  codes: Uint8Array; // round(255 sqrt(weight))
}

export interface StepFrame {
  step: number; // index; number of this step in the run
  start: number; // index; the first of the tokens that were computed
  length: number; // tokens; tokens sent through the layers
  recomputed: number; // tokens; of these, such as had been computed before
  seq_len: number; // tokens; tokens of the text after this step, prompt included
  layer_tokens: bigint; // tokens times layers that they went through
  flops: bigint; // FLOP; of the matrix products that ran, the hidden half of a chunk included
  flops_derived: bigint; // FLOP; 2 (P_b n + P_lm) + sum of A(t): what the step must compute
  weight_bytes: bigint; // B; weights read by matrix products, for the whole batch
  kv_read: bigint; // B; K and V read by attention
  kv_written: bigint; // B; K and V stored
  kv_resident: bigint; // B; for the next step; without the cache only between the parts of a text
  kv_allocated: bigint; // B; pages in use, times their size
  began_us: bigint; // us; from the acceptance of the run to the begin of this step
  step_us: number; // us; the whole step, scheduling included
  attention_us: number; // us; the attention halves of all layers
  mlp_us: number; // us; the MLP halves of all layers
  head_us: number; // us; final norm and language-model head
  sampling_us: number; // us; choosing the token
  recording_us: number; // us; the attention row and the candidates; not part of the step
  token: number | null; // the id that was chosen; none while a prompt is read in parts
  rank: number | null; // index; of the chosen id by the model; 1 is the most probable
  logprob: number | null; // nat; of the token, by the model, at temperature 1
  sampled: number | null; // probability of the token after the sampler
  entropy: number | null; // bit; of the model at temperature 1: 0 certain, 1 a coin
  uniform: number | null; // the random number that was drawn; none when greedy
  cache: boolean; // whether this step used and kept the KV cache
  layers: LayerTime[];
  candidates: Candidate[];
  attention: AttentionRow | null;
  text: string;
}

export interface Half {
  cache: boolean;
  summary: Summary | null;
  steps: StepFrame[];
}

export interface Trace {
  format: "tokenwright-trace";
  version: number;
  model: ModelCard;
  run: RunCard;
  state: RunState;
  labels: TokenCard[];
  steps: StepFrame[];
  halves: Half[];
}

/** What a number is: where it comes from, its unit, a short name, and what it means. */
export interface About {
  source: Source;
  unit: string;
  label: string;
  meaning: string;
}

export const NUMBERS: Record<string, About> = {
  step: { source: "counted", unit: "index", label: "step", meaning: "number of this step in the run" },
  start: { source: "counted", unit: "index", label: "first token computed", meaning: "the first of the tokens that were computed" },
  length: { source: "counted", unit: "tokens", label: "tokens computed", meaning: "tokens sent through the layers" },
  recomputed: { source: "counted", unit: "tokens", label: "computed again", meaning: "of these, such as had been computed before" },
  seq_len: { source: "counted", unit: "tokens", label: "length of the text", meaning: "tokens of the text after this step, prompt included" },
  layer_tokens: { source: "counted", unit: "", label: "layer-tokens", meaning: "tokens times layers that they went through" },
  flops: { source: "counted", unit: "FLOP", label: "FLOPs", meaning: "of the matrix products that ran, the hidden half of a chunk included" },
  flops_derived: { source: "derived", unit: "FLOP", label: "FLOPs by formula", meaning: "2 (P_b n + P_lm) + sum of A(t): what the step must compute" },
  weight_bytes: { source: "counted", unit: "B", label: "weights read", meaning: "weights read by matrix products, for the whole batch" },
  kv_read: { source: "counted", unit: "B", label: "K and V read", meaning: "K and V read by attention" },
  kv_written: { source: "counted", unit: "B", label: "K and V written", meaning: "K and V stored" },
  kv_resident: { source: "counted", unit: "B", label: "K and V kept", meaning: "for the next step; without the cache only between the parts of a text" },
  kv_allocated: { source: "counted", unit: "B", label: "pages in use", meaning: "pages in use, times their size" },
  began_us: { source: "measured", unit: "us", label: "began after", meaning: "from the acceptance of the run to the begin of this step" },
  step_us: { source: "measured", unit: "us", label: "time of the step", meaning: "the whole step, scheduling included" },
  attention_us: { source: "measured", unit: "us", label: "time in attention", meaning: "the attention halves of all layers" },
  mlp_us: { source: "measured", unit: "us", label: "time in the MLPs", meaning: "the MLP halves of all layers" },
  head_us: { source: "measured", unit: "us", label: "time in the LM head", meaning: "final norm and language-model head" },
  sampling_us: { source: "measured", unit: "us", label: "time for choosing the token", meaning: "choosing the token" },
  recording_us: { source: "measured", unit: "us", label: "time for recording", meaning: "the attention row and the candidates; not part of the step" },
  token: { source: "given", unit: "", label: "id of the token", meaning: "the id that was chosen; none while a prompt is read in parts" },
  rank: { source: "counted", unit: "index", label: "rank", meaning: "of the chosen id by the model; 1 is the most probable" },
  logprob: { source: "read", unit: "nat", label: "log p", meaning: "of the token, by the model, at temperature 1" },
  sampled: { source: "read", unit: "", label: "p after the sampler", meaning: "probability of the token after the sampler" },
  entropy: { source: "read", unit: "bit", label: "entropy", meaning: "of the model at temperature 1: 0 certain, 1 a coin" },
  uniform: { source: "read", unit: "", label: "random number", meaning: "the random number that was drawn; none when greedy" },
  cache: { source: "given", unit: "", label: "KV cache", meaning: "whether this step used and kept the KV cache" },
};

export const SUMMARY: Record<string, About> = {
  written: { source: "counted", unit: "tokens", label: "written", meaning: "tokens that the model wrote" },
  layer_tokens: { source: "counted", unit: "", label: "this run", meaning: "layer-tokens of this run" },
  cached: { source: "derived", unit: "", label: "with the cache", meaning: "layers x (N + T - 1): each token is computed once" },
  naive: { source: "derived", unit: "", label: "without", meaning: "layers x sum of t for t = N .. N + T - 1: the whole text at every step" },
  times: { source: "derived", unit: "times", label: "times", meaning: "layer-tokens without the cache, divided by those with it" },
  reused: { source: "derived", unit: "", label: "reused", meaning: "layer-tokens without the cache, minus those of this run: their K and V were kept" },
  prefix: { source: "counted", unit: "tokens", label: "prefix", meaning: "tokens of the prompt found in the cache at the start" },
  ttft_us: { source: "measured", unit: "us", label: "first token after", meaning: "engine time up to the first token; waiting for a viewer excluded" },
  engine_us: { source: "measured", unit: "us", label: "this run", meaning: "engine time of all steps, while the page drew them; waiting between them excluded" },
  tokens_per_s: { source: "measured", unit: "tok/s", label: "speed", meaning: "tokens after the first, divided by the time of their steps" },
};

const some = (value: number): number | null => (value === 4294967295 || Number.isNaN(value) ? null : value);

/** A frame from the wire. Throws for another version. */
export function decodeFrame(data: ArrayBuffer): StepFrame {
  const view = new DataView(data);
  if (view.getUint8(0) !== VERSION) throw new Error(`The frame has version ${view.getUint8(0)}, not ${VERSION}.`);
  const frame: StepFrame = {
    step: view.getUint32(1, true),
    start: view.getUint32(5, true),
    length: view.getUint32(9, true),
    recomputed: view.getUint32(13, true),
    seq_len: view.getUint32(17, true),
    layer_tokens: view.getBigUint64(21, true),
    flops: view.getBigUint64(29, true),
    flops_derived: view.getBigUint64(37, true),
    weight_bytes: view.getBigUint64(45, true),
    kv_read: view.getBigUint64(53, true),
    kv_written: view.getBigUint64(61, true),
    kv_resident: view.getBigUint64(69, true),
    kv_allocated: view.getBigUint64(77, true),
    began_us: view.getBigUint64(85, true),
    step_us: view.getUint32(93, true),
    attention_us: view.getUint32(97, true),
    mlp_us: view.getUint32(101, true),
    head_us: view.getUint32(105, true),
    sampling_us: view.getUint32(109, true),
    recording_us: view.getUint32(113, true),
    token: some(view.getUint32(117, true)),
    rank: some(view.getUint32(121, true)),
    logprob: some(view.getFloat32(125, true)),
    sampled: some(view.getFloat32(129, true)),
    entropy: some(view.getFloat32(133, true)),
    uniform: some(view.getFloat64(137, true)),
    cache: view.getUint8(145) === 1,
    layers: [],
    candidates: [],
    attention: null,
    text: "",
  };
  for (let at = 146; at < data.byteLength; ) {
    const kind = view.getUint8(at);
    const length = view.getUint32(at + 1, true);
    at += 5;
    const end = at + length;
    if (kind === 1) {
      for (let i = at; i < end; i += 8)
        frame.layers.push({ attention_us: view.getUint32(i, true), mlp_us: view.getUint32(i + 4, true) });
    } else if (kind === 2) {
      for (let i = at; i < end; i += 12)
        frame.candidates.push({
          token: view.getUint32(i, true),
          logprob: view.getFloat32(i + 4, true),
          sampled: view.getFloat32(i + 8, true),
        });
    } else if (kind === 3) {
      frame.attention = {
        layer: view.getUint16(at, true),
        head: view.getUint16(at + 2, true),
        argmax: view.getUint32(at + 4, true),
        codes: new Uint8Array(data.slice(at + 8, end)),
      };
    } else if (kind === 4) {
      frame.text = new TextDecoder().decode(new Uint8Array(data, at, length));
    }
    at = end;
  }
  return frame;
}

const BIG = ["layer_tokens", "flops", "flops_derived", "weight_bytes", "kv_read", "kv_written", "kv_resident", "kv_allocated", "began_us"] as const;

/** A frame from JSON (a step of a trace file, or GET /runs/ID/steps/N). */
export function frameFromJson(values: Record<string, unknown>): StepFrame {
  const frame = { ...values } as unknown as StepFrame;
  for (const name of BIG) frame[name] = BigInt(values[name] as number | string);
  const row = values.attention as { codes: string } | null;
  if (row) {
    const codes = Uint8Array.from(atob(row.codes), (letter) => letter.charCodeAt(0));
    frame.attention = { ...(row as unknown as AttentionRow), codes };
  }
  return frame;
}

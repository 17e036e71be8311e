// Generated from src/tokenwright/explorer/panels/calculator.py. Do not edit.

import type { About } from "../schema";

export interface CalculatorCard {
  model: string;
  models: string[];
  layers: number;
  model_context: number;
  context: number;
  batch: number;
  kv: string;
  weights: string;
  kv_per_token: number;
  kv_per_sequence: number;
  kv_total: number;
  kv_allocated: number | null;
  kv_planned: number | null;
  refused: string;
  weight_bytes: number;
  loaded_bytes: number | null;
  total_bytes: number;
  base_flops: number;
  slope_flops: number;
  decode_flops: number;
  decode_bytes: number;
  bandwidth: number | null;
  tokens_per_s: number | null;
  exceeds_at: number | null;
}

export const CALCULATOR_CARD: Record<string, About> = {
  kv_per_token: { source: "derived", unit: "B", label: "a token", meaning: "sum over layers of 2 G D e" },
  kv_per_sequence: { source: "derived", unit: "B", label: "a sequence", meaning: "sum over layers of c min(t, s + W): at this context" },
  kv_total: { source: "derived", unit: "B", label: "the batch", meaning: "batch times that of a sequence" },
  kv_allocated: { source: "counted", unit: "B", label: "allocated", meaning: "bytes of a KV memory that was allocated just now, and freed" },
  kv_planned: { source: "derived", unit: "B", label: "in whole pages", meaning: "pages x page size x bytes, and a scratch page in each group" },
  weight_bytes: { source: "derived", unit: "B", label: "weights", meaning: "of all tensors, in this format" },
  loaded_bytes: { source: "counted", unit: "B", label: "weights in memory", meaning: "of the loaded model as it lies in memory" },
  total_bytes: { source: "derived", unit: "B", label: "together", meaning: "weights and the K and V of the batch" },
  base_flops: { source: "derived", unit: "FLOP", label: "without attention", meaning: "2 (P_b + P_lm)" },
  slope_flops: { source: "derived", unit: "FLOP", label: "for each token read", meaning: "4 H D over all layers: A(t) grows by it until windows are full" },
  decode_flops: { source: "derived", unit: "FLOP", label: "a decode step", meaning: "2 (P_b + P_lm) + A(t), for the batch" },
  decode_bytes: { source: "derived", unit: "B", label: "read by a decode step", meaning: "the weights once, and K and V of every sequence" },
  bandwidth: { source: "measured", unit: "B/s", label: "memory bandwidth", meaning: "of this machine: reading a buffer beyond its caches" },
  tokens_per_s: { source: "derived", unit: "tok/s", label: "at most", meaning: "batch x bandwidth / bytes read: a model inside the caches can be faster" },
  exceeds_at: { source: "derived", unit: "tokens", label: "exceeds the weights at", meaning: "the context from which K and V of this batch take more than the weights" },
};

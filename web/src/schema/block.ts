// Generated from src/tokenwright/explorer/panels/block.py. Do not edit.

import type { About } from "../schema";

export interface BlockStage {
  name: string;
  shape: number[];
  norm: number;
  heads: number[];
  numbers: number[];
  flops: number;
  share: number;
}

export interface HeadRead {
  head: number;
  position: number;
  weight: number;
}

export interface ContextShare {
  context: number;
  share: number;
}

export interface BlockView {
  position: number;
  layer: number;
  context: number;
  kv_bytes: number;
  flops: number;
  model_flops: number;
  stages: BlockStage[];
  reads: HeadRead[];
  by_context: ContextShare[];
}

export interface ReadPosition {
  position: number;
  score: number;
  weight: number;
}

export interface WayView {
  reader: number;
  position: number;
  layer: number;
  head: number;
  group: number;
  query: number[];
  key: number[];
  plain: number[];
  plain_query: number[];
  angles: number[];
  products: number[];
  value: number[];
  mixed: number[];
  dot: number;
  scale: number;
  score: number;
  weight: number;
  reads: ReadPosition[];
}

export const BLOCK_STAGE: Record<string, About> = {
  norm: { source: "read", unit: "", label: "norm", meaning: "the length of the vector, of all its numbers together: in a replay" },
  flops: { source: "derived", unit: "FLOP", label: "FLOPs", meaning: "2 x inputs x outputs, or 4 H D for each token read" },
  share: { source: "derived", unit: "share", label: "share", meaning: "of the FLOPs of this token in this layer" },
};

export const BLOCK_VIEW: Record<string, About> = {
  context: { source: "counted", unit: "tokens", label: "read", meaning: "tokens that this one attends to, itself included" },
  kv_bytes: { source: "derived", unit: "B", label: "K and V kept", meaning: "of this token in this layer" },
  flops: { source: "derived", unit: "FLOP", label: "FLOPs of the layer", meaning: "for this token, in this layer" },
  model_flops: { source: "derived", unit: "FLOP", label: "FLOPs of the model", meaning: "2 (P_b + P_lm) + A(t): all layers and the head" },
};

export const WAY_VIEW: Record<string, About> = {
  dot: { source: "read", unit: "", label: "q \u00b7 k", meaning: "the sum of the products of query and key, number by number" },
  scale: { source: "derived", unit: "", label: "scale", meaning: "1 / sqrt(D), or what the model has in its place" },
  score: { source: "read", unit: "", label: "score", meaning: "scale x q \u00b7 k, and the soft cap of models that have one" },
  weight: { source: "read", unit: "share", label: "weight", meaning: "e^score / the sum of e^score over all positions read" },
};

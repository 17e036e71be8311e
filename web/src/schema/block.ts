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

export const BLOCK_STAGE: Record<string, About> = {
  norm: { source: "read", unit: "", label: "norm", meaning: "the length of the vector, of all its numbers together: computed in a replay" },
  flops: { source: "derived", unit: "FLOP", label: "FLOPs", meaning: "2 x inputs x outputs, or 4 H D for each token read" },
  share: { source: "derived", unit: "share", label: "share", meaning: "of the FLOPs of this token in this layer" },
};

export const BLOCK_VIEW: Record<string, About> = {
  context: { source: "counted", unit: "tokens", label: "read", meaning: "tokens that this one attends to, itself included" },
  kv_bytes: { source: "derived", unit: "B", label: "K and V kept", meaning: "of this token in this layer" },
  flops: { source: "derived", unit: "FLOP", label: "FLOPs of the layer", meaning: "for this token, in this layer" },
  model_flops: { source: "derived", unit: "FLOP", label: "FLOPs of the model", meaning: "2 (P_b + P_lm) + A(t): for this token, in all layers and the head" },
};

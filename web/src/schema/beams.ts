// Generated from src/tokenwright/explorer/panels/beams.py. Do not edit.

import type { About, TokenCard } from "../schema";

export interface BeamNode {
  parent: number;
  token: TokenCard;
  logprob: number;
  score: number;
  reason: string | null;
  rank: number | null;
  greedy: boolean;
}

export interface BeamText {
  node: number;
  text: string;
  tokens: number;
  sum: number;
  score: number;
  reason: string;
}

export interface BeamCard {
  prompt: string;
  beams: number;
  nodes: BeamNode[];
  best: BeamText[];
  greedy_text: string;
  greedy_tokens: number;
  greedy_sum: number;
  best_sum: number;
  gain: number;
  parted: number | null;
}

export const BEAM_CARD: Record<string, About> = {
  greedy_sum: { source: "read", unit: "nat", label: "greedy", meaning: "sum of the log-probabilities of its tokens" },
  best_sum: { source: "read", unit: "nat", label: "best beam", meaning: "sum of the log-probabilities of its tokens" },
  gain: { source: "derived", unit: "nat", label: "gain", meaning: "of the best beam over greedy decoding, at the length of each" },
};

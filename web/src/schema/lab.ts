// Generated from src/tokenwright/explorer/panels/lab.py. Do not edit.

import type { About, TokenCard } from "../schema";

export interface Changed {
  position: number;
  full: TokenCard;
  lab: TokenCard;
}

export interface LabCard {
  kv: string;
  window: number | null;
  sinks: number;
  page_size: number;
  tokens: number;
  full_bytes: number;
  kept_bytes: number;
  pages: number;
  page_bytes: number;
  mean_kl: number;
  max_kl: number;
  mean_delta: number;
  same: number;
  positions: number;
  first: number;
  kl: number[];
  delta: number[];
  changed: Changed[];
}

export const LAB_CARD: Record<string, About> = {
  tokens: { source: "counted", unit: "tokens", label: "tokens computed", meaning: "of the text, with each of the two caches" },
  full_bytes: { source: "derived", unit: "B", label: "full cache", meaning: "K and V of these tokens, native, without a window" },
  kept_bytes: { source: "derived", unit: "B", label: "this cache", meaning: "K and V that are kept for the next token" },
  pages: { source: "counted", unit: "", label: "pages", meaning: "pages in its tables after the text, in the second engine" },
  page_bytes: { source: "counted", unit: "B", label: "in pages", meaning: "these pages, times their size" },
  mean_kl: { source: "read", unit: "nat", label: "mean KL", meaning: "KL(full || this), over the whole vocabulary, mean over the text" },
  max_kl: { source: "read", unit: "nat", label: "largest KL", meaning: "at one position" },
  mean_delta: { source: "read", unit: "nat", label: "mean change of log p", meaning: "of the text's tokens: this cache minus the full one" },
  same: { source: "counted", unit: "", label: "same first guess", meaning: "positions with the same most probable token" },
};

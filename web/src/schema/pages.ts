// Generated from src/tokenwright/explorer/panels/pages.py. Do not edit.

import type { About } from "../schema";

export interface PoolPage {
  page: number;
  refcount: number;
  filled: number;
  owners: number[];
  place: number | null;
}

export interface PoolGroup {
  layers: number[];
  window: number | null;
  sinks: number;
  pages: number;
  used: number;
  shared: number;
  cached: number;
  free: number;
  page_bytes: number;
  saved_bytes: number;
  listed: PoolPage[];
  left_out: number;
}

export interface PoolSequence {
  whose: "run" | "batch" | "other";
  place: number;
  state: "waiting" | "running" | "paused" | "finished";
  prompt: string;
  text: string;
  tokens: number;
  computed: number;
  forwarded: number;
  reused: number;
  pages: number;
  preemptions: number;
}

export interface PoolCard {
  page_size: number;
  groups: PoolGroup[];
  sequences: PoolSequence[];
}

export interface BatchCard {
  batch: string;
  prompts: number;
  lease_s: number;
}

export const POOL_GROUP: Record<string, About> = {
  pages: { source: "counted", unit: "", label: "pages", meaning: "pages of the pool, in this group of layers" },
  used: { source: "counted", unit: "", label: "in use", meaning: "pages that stand in the page table of a sequence" },
  shared: { source: "counted", unit: "", label: "shared", meaning: "pages that stand in two page tables or more" },
  cached: { source: "counted", unit: "", label: "cached", meaning: "pages of ended texts, found by their prefix; evicted when pages run out" },
  free: { source: "counted", unit: "", label: "free", meaning: "pages with nothing to be found in them" },
  page_bytes: { source: "derived", unit: "B", label: "a page", meaning: "page size x bytes of a token in these layers" },
  saved_bytes: { source: "counted", unit: "B", label: "saved by sharing", meaning: "further entries in page tables, times a page's bytes" },
};

export const POOL_SEQUENCE: Record<string, About> = {
  tokens: { source: "counted", unit: "tokens", label: "tokens", meaning: "prompt and written tokens" },
  computed: { source: "counted", unit: "tokens", label: "in the cache", meaning: "tokens whose K and V are in its pages" },
  forwarded: { source: "counted", unit: "tokens", label: "computed", meaning: "tokens sent through the layers for it" },
  reused: { source: "counted", unit: "tokens", label: "prefix hit", meaning: "tokens not computed, because their pages were found" },
  pages: { source: "counted", unit: "", label: "pages", meaning: "pages in its tables" },
  preemptions: { source: "counted", unit: "", label: "preemptions", meaning: "how often its pages were taken for others" },
};

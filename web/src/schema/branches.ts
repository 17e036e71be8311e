// Generated from src/tokenwright/explorer/panels/branches.py. Do not edit.

import type { About, TokenCard } from "../schema";

export interface Branch {
  run: string;
  parent: string | null;
  step: number | null;
  token: TokenCard | null;
  text: string;
  state: "paused" | "running" | "done" | "failed" | "expired";
  steps: number;
  pages: number;
  kv_bytes: number;
  shared: number;
  saved_bytes: number;
  reused: number;
}

export interface Branches {
  branches: Branch[];
  kind: "branches";
}

export const BRANCH: Record<string, About> = {
  pages: { source: "counted", unit: "pages", label: "pages", meaning: "pages in its page tables" },
  kv_bytes: { source: "counted", unit: "B", label: "K and V", meaning: "bytes of these pages" },
  shared: { source: "counted", unit: "pages", label: "shared", meaning: "of these, pages that other branches use too" },
  saved_bytes: { source: "counted", unit: "B", label: "saved", meaning: "bytes of the shared pages: not stored again" },
  reused: { source: "counted", unit: "tokens", label: "reused", meaning: "tokens whose K and V it found and did not compute" },
};

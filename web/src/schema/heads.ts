// Generated from src/tokenwright/explorer/panels/heads.py. Do not edit.

import type { TokenCard } from "../schema";

export interface HeadCard {
  layer: number;
  head: number;
  kind: "previous" | "induction" | "sink" | "local" | "mixed";
  sink: number;
  previous: number;
  local: number;
  few: number;
  induction: number | null;
  codes: string;
}

export interface AtlasCard {
  step: number;
  rows: number;
  repeats: number;
  needed: number;
  kinds: ("previous" | "induction" | "sink" | "local" | "mixed")[];
  thresholds: number[];
  heads: HeadCard[];
}

export interface MatrixCard {
  step: number;
  layer: number;
  head: number;
  first: number;
  tokens: number;
  cell: number;
  size: number;
  codes: string;
}

export interface LensRow {
  layer: number;
  token: TokenCard;
  probability: number;
  rank: number;
  chosen: number;
}

export interface LensCard {
  step: number;
  chosen: TokenCard;
  rows: LensRow[];
}

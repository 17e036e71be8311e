// Generated from src/tokenwright/explorer/panels/way.py. Do not edit.

import type { About } from "../schema";

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

export const WAY_VIEW: Record<string, About> = {
  dot: { source: "read", unit: "", label: "q \u00b7 k", meaning: "the sum of the products of query and key, number by number" },
  scale: { source: "derived", unit: "", label: "scale", meaning: "1 / sqrt(D), or what the model has in its place" },
  score: { source: "read", unit: "", label: "score", meaning: "scale x q \u00b7 k, and the soft cap of models that have one" },
  weight: { source: "read", unit: "share", label: "weight", meaning: "e^score / the sum of e^score over all positions read" },
};

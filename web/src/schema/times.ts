// Generated from src/tokenwright/explorer/panels/times.py. Do not edit.

import type { About } from "../schema";

export interface RunTimes {
  cached_us: number;
  naive_us: number | null;
  slower: number | null;
  measured: number;
}

export const RUN_TIMES: Record<string, About> = {
  cached_us: { source: "derived", unit: "us", label: "with the cache", meaning: "a measured pass over the prompt + (T - 1) x a measured decode step" },
  naive_us: { source: "derived", unit: "us", label: "without", meaning: "T / 6 x (the shortest + 4 x the middle + the longest measured pass)" },
  slower: { source: "derived", unit: "times", label: "slower", meaning: "time without the cache, divided by the time with it" },
};

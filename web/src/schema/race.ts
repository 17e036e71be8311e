// Generated from src/tokenwright/explorer/panels/race.py. Do not edit.

import type { About, TokenCard } from "../schema";

export interface RaceSums {
  steps: number;
  compared: number;
  cached_us: number;
  uncached_us: number;
  cached_flops: number;
  uncached_flops: number;
  cached_tokens: number;
  uncached_tokens: number;
  times: number | null;
  equal: number;
  max_delta: number | null;
  kl: number | null;
  divergent: number | null;
}

export interface RaceStep {
  step: number;
  context: number;
  token: TokenCard;
  text: string;
  cached_us: number;
  cached_flops: number;
  cached_tokens: number;
  uncached_us: number | null;
  uncached_flops: number | null;
  uncached_tokens: number | null;
  recomputed: number | null;
  max_delta: number | null;
  kl: number | null;
  equal: boolean | null;
  sums: RaceSums;
  kind: "step";
}

export interface RaceCard {
  prompt: string;
  prompt_tokens: number;
  max_tokens: number;
  every: number;
  budget_s: number;
  dtype: string;
  weights: string;
  kernels: string;
  device: string;
  layers: number;
  kind: "race";
}

export interface RaceEnd {
  reason: string;
  context: number;
  message: string;
  kind: "end";
}

export const RACE_SUMS: Record<string, About> = {
  steps: { source: "counted", unit: "", label: "steps", meaning: "steps of the cached lane" },
  compared: { source: "counted", unit: "", label: "compared", meaning: "of these, steps that the uncached lane computed too" },
  cached_us: { source: "measured", unit: "us", label: "time, cached", meaning: "of the compared steps, with the cache" },
  uncached_us: { source: "measured", unit: "us", label: "time, uncached", meaning: "of the same steps, without it" },
  cached_flops: { source: "counted", unit: "FLOP", label: "FLOPs, cached", meaning: "of the compared steps, with the cache" },
  uncached_flops: { source: "counted", unit: "FLOP", label: "FLOPs, uncached", meaning: "of the same steps, without it" },
  cached_tokens: { source: "counted", unit: "tokens", label: "tokens, cached", meaning: "sent through the layers, cached" },
  uncached_tokens: { source: "counted", unit: "tokens", label: "tokens, uncached", meaning: "sent through the layers, uncached" },
  times: { source: "measured", unit: "times", label: "slower", meaning: "time without the cache, divided by that with it" },
  equal: { source: "counted", unit: "", label: "argmax equal", meaning: "compared steps at which both lanes have the same argmax" },
  max_delta: { source: "read", unit: "", label: "largest difference", meaning: "max |difference| of any logit at any compared step" },
  kl: { source: "read", unit: "nat", label: "KL", meaning: "mean of KL(cached || uncached) over the compared steps" },
  divergent: { source: "counted", unit: "", label: "first divergent step", meaning: "the first step whose argmax differs; none: no step" },
};

export const RACE_STEP: Record<string, About> = {
  context: { source: "counted", unit: "tokens", label: "t", meaning: "tokens of the text that the step's token was chosen after" },
  cached_us: { source: "measured", unit: "us", label: "time, cached", meaning: "of the step, with the cache" },
  cached_flops: { source: "counted", unit: "FLOP", label: "FLOPs, cached", meaning: "of the step, with the cache" },
  cached_tokens: { source: "counted", unit: "tokens", label: "tokens, cached", meaning: "sent through the layers, cached" },
  uncached_us: { source: "measured", unit: "us", label: "time, uncached", meaning: "of the step, without the cache" },
  uncached_flops: { source: "counted", unit: "FLOP", label: "FLOPs, uncached", meaning: "of the step, without the cache" },
  uncached_tokens: { source: "counted", unit: "tokens", label: "tokens, uncached", meaning: "sent through the layers, uncached" },
  recomputed: { source: "derived", unit: "share", label: "computed again", meaning: "(t - 1) / t of the uncached step's tokens" },
  max_delta: { source: "read", unit: "", label: "largest difference", meaning: "max |difference| of any logit" },
  kl: { source: "read", unit: "nat", label: "KL", meaning: "KL(cached || uncached), natural logarithm" },
};

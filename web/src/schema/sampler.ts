// Generated from src/tokenwright/explorer/panels/sampler.py. Do not edit.

import type { About, TokenCard } from "../schema";

export interface Ranked {
  token: TokenCard;
  p: number;
  sampled: number;
  low: number;
}

export interface SamplerView {
  step: number;
  vocab: number;
  after_top_k: number;
  after_top_p: number;
  kept: number;
  kept_mass: number;
  entropy: number;
  sampled_entropy: number;
  uniform: number | null;
  token: number;
  drawn: number | null;
  drawn_card: TokenCard | null;
  top: Ranked[];
  ranks: number[];
  p: number[];
  sampled: number[];
  temperature: number;
  top_k: number;
  top_p: number;
  min_p: number;
  repetition_penalty: number;
  kind: "sampler";
}

export const SAMPLER_VIEW: Record<string, About> = {
  vocab: { source: "counted", unit: "", label: "vocabulary", meaning: "ids that have a logit" },
  after_top_k: { source: "counted", unit: "", label: "after top-k", meaning: "ids left by top-k" },
  after_top_p: { source: "counted", unit: "", label: "after top-p", meaning: "ids left by top-k and top-p" },
  kept: { source: "counted", unit: "", label: "kept", meaning: "ids that can be drawn, after all cuts" },
  kept_mass: { source: "read", unit: "", label: "their share", meaning: "the model's probability of the ids kept" },
  entropy: { source: "read", unit: "bit", label: "entropy before", meaning: "of the model's distribution" },
  sampled_entropy: { source: "read", unit: "bit", label: "entropy after", meaning: "of the sampler's distribution" },
  uniform: { source: "read", unit: "", label: "draw u", meaning: "the random number of this seed and position; none when greedy" },
  drawn: { source: "counted", unit: "", label: "drawn", meaning: "the id that these settings take with the same u" },
  temperature: { source: "given", unit: "", label: "temperature", meaning: "as asked for" },
};

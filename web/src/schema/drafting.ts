// Generated from src/tokenwright/explorer/panels/drafting.py. Do not edit.

import type { About, TokenCard } from "../schema";

export interface DraftStep {
  position: number;
  drafts: TokenCard[];
  kept: number;
  written: TokenCard[];
  open: boolean;
}

export interface DraftsCard {
  free: boolean;
  steps: number;
  tokens: number;
  drafting: number;
  drafted: number;
  kept: number;
  per_step: number;
  cost: number;
  plain_cost: number;
  second_row: number;
  each: DraftStep[];
}

export const DRAFTS_CARD: Record<string, About> = {
  steps: { source: "counted", unit: "", label: "steps with drafts on", meaning: "of the scheduler, that write this text" },
  tokens: { source: "counted", unit: "", label: "steps without", meaning: "one for each token of this text" },
  drafting: { source: "counted", unit: "", label: "of these with a draft", meaning: "steps with more rows than one" },
  drafted: { source: "counted", unit: "tokens", label: "drafted", meaning: "draft tokens that the steps compute" },
  kept: { source: "counted", unit: "tokens", label: "kept", meaning: "drafts that the sampler's own draw was equal to" },
  per_step: { source: "derived", unit: "", label: "tokens a step", meaning: "tokens of this text, divided by the steps" },
  cost: { source: "derived", unit: "", label: "cost with drafts", meaning: "of the steps behind the prompt's, by the table of costs" },
  plain_cost: { source: "derived", unit: "", label: "cost without", meaning: "of the same tokens one by one, by the table of costs" },
  second_row: { source: "given", unit: "", label: "a step of two rows", meaning: "by the table, in steps of one; a draft must pay it" },
};

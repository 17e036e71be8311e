// The request of the next run: the prompt box and the dials beside it. The prompt's tokens are asked for while it is
// typed, so that what the model will read is seen before it runs.

import { computed, effect, signal } from "@preact/signals";
import * as api from "../visit/api";
import { card, loading, model, problem } from "../visit/store";
import type { RunRequest } from "../visit/api";
import type { SamplerLink } from "../visit/hash";
import type { TokenCard } from "../schema";

export const PROMPTS = [
  { name: "Story", text: "Once upon a time, there was a little fox who" },
  { name: "Fact", text: "The capital of France is" },
  { name: "Code", text: "def fibonacci(n):\n    if n < 2:\n        return n\n    return" },
  {
    name: "Repeat",
    text: " moon river stone apple cloud seven garden horse winter music paper bridge".repeat(3).trim(),
  },
] as const;
/** Twelve words, three times over: what an induction head is found by. */
export const REPEATED: string = PROMPTS[3].text;

const PAUSE = 200; // ms without a key before the tokens are asked for

export const prompt = signal<string>(PROMPTS[0].text);
export const MAX_TOKENS = 120;
export const maxTokens = signal(MAX_TOKENS);
export const temperature = signal<number | null>(null); // null: what the checkpoint suggests
export const sampler = signal<SamplerLink>({}); // from a link; the others are the checkpoint's
export const stop = signal(""); // a text at which the run ends; empty: none
export const seed = signal<number | null>(null); // null: a fresh one for each run

/** A prompt that came with its ids and its sampling: an answer of the chat page. It holds while the text is as it came. */
export interface Given {
  from: string; // conversation and turn
  text: string;
  ids: number[];
  pictures: string; // the name of its pictures on the server
  top_k: number;
  top_p: number;
  stop: string[];
  reused: number; // tokens of the prompt that the chat's answer found in the cache
}
export const given = signal<Given | null>(null);

/** What was given with the prompt that stands in the form; null: it was typed. */
export const givenNow = (): Given | null => (given.value?.text === prompt.value ? given.value : null);

/** The tokens of the prompt as the engine reads it; `text` says of which prompt. */
export const tokens = signal<{ text: string; cards: TokenCard[] } | null>(null);

export const usedTemperature = computed(() => temperature.value ?? card.value?.temperature ?? 1);

export function request(cache: boolean, layer: number, head: number): RunRequest {
  const came = givenNow();
  return {
    prompt: prompt.value,
    ...(came && { ids: came.ids, pictures: came.pictures }),
    max_tokens: maxTokens.value,
    temperature: usedTemperature.value,
    top_k: model.value?.top_k ?? 0,
    top_p: model.value?.top_p ?? 1,
    ...(came ? { top_k: came.top_k, top_p: came.top_p } : sampler.value),
    seed: seed.value,
    stop: came?.stop ?? (stop.value === "" ? [] : [stop.value]),
    ignore_eos: false,
    cache,
    layer,
    head,
  };
}

effect(() => {
  const text = prompt.value;
  if (loading.value?.phase !== "ready" || model.value === null) return;
  if (text === "") {
    tokens.value = { text, cards: [] };
    return;
  }
  if (tokens.peek()?.text === text) return;
  const timer = setTimeout(
    async () => {
      const cards = await api.tokenize(text).catch(() => null);
      if (cards !== null && prompt.value === text) tokens.value = { text, cards };
    },
    tokens.peek() === null ? 0 : PAUSE,
  );
  return () => clearTimeout(timer);
});

// An edit is an answer to a problem with the last attempt.
prompt.subscribe(() => (problem.value = null));
maxTokens.subscribe(() => (problem.value = null));

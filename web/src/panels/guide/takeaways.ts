// The articles' last sentences, answered from the run that the guide has just made; and sentences that are often wrong,
// with the right ones and their formulas.

import { bytes, count, figures, joined, micros, percent, plural } from "../../ui/format";
import { otherWay } from "../../run/play/Scrubber";
import type { Run } from "../../run/run";
import type { Fact } from "../../schema/learn";

export interface Takeaway {
  said: string;
  right: boolean; // whether the sentence holds as it stands
  is: string; // what is right
  formula?: string;
  here: string; // measured, counted or derived here
}

const [LONG, SHORT] = [665, 3]; // tokens of an essay and of a yes

/** `facts`: the lesson's, for models that are not here. */
export function takeaways(run: Run, facts: readonly Fact[]): readonly Takeaway[] {
  const { frames, model, state } = run;
  const sum = state.value.summary;
  const [first, last] = [frames[1], frames.at(-1)];
  if (sum === null || first === undefined || last === undefined) return [];
  const size = (name: string): string => {
    const value = facts.find((fact) => fact.name === name)?.value;
    return typeof value === "number" ? joined(bytes(value)) : "–";
  };
  const decode = (sum.engine_us - sum.ttft_us) / Math.max(1, frames.length - 1);
  const answer = (tokens: number): number => sum.ttft_us + (tokens - 1) * decode;
  const growth = Number(last.flops_derived) / Number(first.flops_derived) - 1;
  return [
    {
      said: "The model writes one token at a time; each depends on all before it.",
      right: true,
      is: "A finished text is a loop that ran once for each token.",
      here: `${plural(sum.written, "token")} here: ${plural(frames.length, "step")}`,
    },
    {
      said: "Long texts cost much because steps add up, not because a step is expensive.",
      right: false,
      is: "Each step reads all weights and the whole cache, to write a single token. Both make it expensive.",
      here: `the last step read ${joined(bytes(last.weight_bytes))} of weights and ${joined(bytes(last.kv_read))} of K and V`,
    },
    {
      said: "The cache is a notebook of what usually comes next.",
      right: false,
      is: "What usually comes next is in the weights. The cache has the keys and values of this text only.",
      here: `weights: ${joined(bytes(model.weight_bytes))}; this text: ${joined(bytes(last.kv_resident))}`,
    },
    {
      said: "The KV cache makes the cost of a step linear, not quadratic.",
      right: false,
      is: "A step with the cache is a large constant and a small slope, nearly flat. Without it a step is linear and quadratic. The cache takes one factor of the length away. A cell counts a token’s way through a layer, the part with P, and not what it reads.",
      formula:
        "2·P·t + 2·L·d·t² → 2·P + 4·L·d·t;  in all N²·P + N³·L·d → N·P + N²·L·d;  P: weights, L: layers, d: numbers of a token in a layer, t: tokens so far, N: in all",
      here: `from token ${count(first.seq_len)} to ${count(last.seq_len)} the same ${count(last.layer_tokens)} cells took ${percent(growth)} more computing, all of it for reading; without the cache the last step is ${count(otherWay(last))} cells`,
    },
    {
      said: "Llama 3 8B needs 4 GB of cache for 8,192 tokens; 128K tokens of a large model need 128 GB.",
      right: false,
      is: "Count the heads that have keys of their own (KV heads), not those that ask: Llama 3 8B, of 8 billion weights, has 8 for its 32.",
      formula: "c = 2·L·G·D·e for each token; L: layers, G: KV heads, D: head size, e: bytes of a number",
      here: `Llama 3 8B, 8,192 tokens: ${size("Meta-Llama-3-8B 8192 1")}; Llama 3.1 70B, 131,072 tokens: ${size("Llama-3.1-70B 131072 1")}; this model: ${joined(bytes(model.kv_bytes_per_token))} a token`,
    },
    {
      said: "Reading the prompt takes most of the time.",
      right: false,
      is: "It depends on how much is read and how much is written.",
      formula:
        "TTFT / (TTFT + (n − 1)·TPOT);  TTFT: time to the first token, TPOT: of each later one, n: tokens written",
      here: `${joined(micros(sum.ttft_us))} of ${joined(micros(sum.engine_us))}: ${percent(sum.ttft_us / sum.engine_us)}`,
    },
    {
      said: "A limit of 10 tokens in place of 4,096 made the answer 18 times faster, at no loss.",
      right: false,
      is: "A limit cuts. The gain comes from a shorter answer, and follows from two times.",
      formula: "(TTFT + (n₁ − 1)·TPOT) / (TTFT + (n₂ − 1)·TPOT)",
      here: `${LONG} tokens against ${SHORT}, by the two times of this run: ${figures(answer(LONG) / answer(SHORT))} times`,
    },
  ];
}

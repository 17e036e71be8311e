// The listings of the panel Code: the idea with the cache and without, in the engine's terms, the four lines of the engine's
// own loop, and the same four of the engine in one file. Each line says when in a step it runs, and what it works on.

import type { Moment } from "../../visit/clock";
import { count, flop, joined, plural } from "../../ui/format";
import type { ModelCard, StepFrame } from "../../schema";
import type { Stop } from "../../stage/flight/flight";

/** What the shown step works on. */
export interface Today {
  model: ModelCard;
  step: StepFrame;
  written: string; // the token that it wrote, quoted
}

export interface Line {
  text: string;
  runs?: readonly Moment[]; // when it is lit
  stops?: readonly Stop[]; // of a flight, at which it is lit
  beside?: (today: Today) => string;
}

export interface Listing {
  id: "with" | "without" | "step" | "file";
  name: string;
  about: string;
  lines: readonly Line[];
}

const passed = ({ model, step }: Today): string =>
  `${plural(step.length, "token")} × ${plural(model.layers, "layer")} = ${count(step.layer_tokens)} cells`;

/** [batch, KV heads, positions, head size], or what a model has in its place. */
function shapeOf({ model, step }: Today): string {
  const positions = step.start + step.length;
  if (model.latent > 0) return `one row of ${model.latent} for K and V: [1, ${positions}, ${model.latent}]`;
  return `K and V: [1, ${model.kv_heads}, ${positions}, ${model.head_size}] in each layer`;
}

const WORK = ["work", "pass"] as const;
const READ = { runs: ["look"], stops: ["score", "mask", "softmax", "value"] } as const;
const PASS: readonly Stop[] = [
  "embedding",
  "norm",
  "qkv",
  "position",
  ...READ.stops,
  "mlp",
  "residual",
  "next",
  "logits",
];

export const LISTINGS: readonly Listing[] = [
  {
    id: "with",
    name: "with the cache",
    about: "After the prompt only the newest token goes through the layers: x is made of [next_token].",
    lines: [
      { text: "tokens = tokenize(prompt)", stops: ["word"] },
      { text: "cache = KVCache(layers)", beside: () => "[batch, KV heads, positions, head size]" },
      { text: "new = tokens" },
      { text: "while not ended(tokens):" },
      { text: "    x = embed(new)", stops: ["embedding"], beside: ({ step }) => plural(step.length, "token") },
      { text: "    for layer in layers:", stops: ["next"], beside: passed },
      { text: "        q, k, v = layer.qkv(norm(x))", runs: WORK, stops: ["norm", "qkv"] },
      { text: "        q, k = rotate(q, k)", stops: ["position"] },
      { text: "        K, V = cache[layer].append(k, v)", beside: shapeOf },
      { text: "        x = x + layer.attend(q, K, V)", ...READ },
      { text: "        x = x + layer.mlp(norm(x))", stops: ["mlp", "residual"] },
      {
        text: "    next_token = sample(head(x[-1]))",
        runs: ["write"],
        stops: ["logits", "draw"],
        beside: ({ written }) => written,
      },
      { text: "    tokens.append(next_token)" },
      { text: "    new = [next_token]", runs: ["rest"] },
    ],
  },
  {
    id: "without",
    name: "without",
    about:
      "All tokens go through the layers at every step: x is made of tokens. What it computes of them is thrown away.",
    lines: [
      { text: "tokens = tokenize(prompt)", stops: ["word"] },
      { text: "while not ended(tokens):" },
      {
        text: "    x = embed(tokens)",
        stops: ["embedding"],
        beside: ({ step }) => plural(step.start + step.length, "token"),
      },
      { text: "    for layer in layers:", stops: ["next"], beside: passed },
      {
        text: "        q, k, v = layer.qkv(norm(x))",
        runs: WORK,
        stops: ["norm", "qkv"],
        beside: ({ step }) => `${count(step.recomputed)} of them again`,
      },
      { text: "        q, k = rotate(q, k)", stops: ["position"] },
      { text: "        x = x + layer.attend(q, k, v)", ...READ },
      { text: "        x = x + layer.mlp(norm(x))", stops: ["mlp", "residual"] },
      {
        text: "    next_token = sample(head(x[-1]))",
        runs: ["write"],
        stops: ["logits", "draw"],
        beside: ({ written }) => written,
      },
      { text: "    tokens.append(next_token)", runs: ["rest"] },
    ],
  },
  {
    id: "step",
    name: "Engine.step",
    about: "The loop of the engine that runs here, src/tokenwright/engine/core.py, for all texts at once.",
    lines: [
      {
        text: "began, step = self.clock(), self.scheduler.schedule()",
        beside: ({ step }) => `of this text ${plural(step.length, "token")}`,
      },
      {
        text: "output = self.runner.forward(step)",
        runs: [...WORK, "look"],
        stops: PASS,
        beside: (today) => `${passed(today)}, ${joined(flop(today.step.flops))}`,
      },
      {
        text: "picks = self.sampler.pick(output, step)",
        runs: ["write"],
        stops: ["draw"],
        beside: ({ written }) => written,
      },
      { text: "return self.scheduler.commit(step, picks)", runs: ["rest"], beside: () => "appends it to its text" },
    ],
  },
  {
    id: "file",
    name: "one file",
    about: "The same engine in one file to read, examples/one_file_engine.py: its Engine.step.",
    lines: [
      {
        text: "chunks = self.scheduler.schedule()",
        beside: ({ step }) => `of this text ${plural(step.length, "token")}`,
      },
      {
        text: "logits = self.model(Batch(chunks, self.pool.page_size), self.cache)",
        runs: [...WORK, "look"],
        stops: PASS,
        beside: passed,
      },
      { text: "tokens = pick(chunks, logits)", runs: ["write"], stops: ["draw"], beside: ({ written }) => written },
      { text: "return self.scheduler.commit(chunks, tokens)", runs: ["rest"] },
    ],
  },
];

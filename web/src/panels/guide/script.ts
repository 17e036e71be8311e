// The guide, ten minutes: what happens on the stage, scene by scene, what is said of it, and what is guessed. Its prompts
// are the articles' own. No answer is written here: a guess is compared with what the engine then does.

import * as api from "../../visit/api";
import * as flight from "../../stage/flight/flight";
import * as learn from "../learn/server";
import { bytes, count, figures, joined, micros, numbered, percent, plural } from "../../ui/format";
import type { Camera } from "../../stage/renderers/renderer";
import { look, row } from "../../run/answers/attention-row";
import type { Run } from "../../run/run";
import { ending } from "../../visit/messages";
import { frame, head, layer, length, resultClosed, run } from "../../visit/store";
import type { AtlasCard } from "../../schema/heads";
import type { StepFrame } from "../../schema";
import { finish, show, type Text, until } from "./stagehand";

const WITHOUT = 6; // the step that is made without the cache
const DAY: Text = { prompt: "The next day is bright", tokens: 24, without: [WITHOUT] };
const WHOLE: Text = { prompt: "Once upon a time", tokens: 60 };
const FACT: Text = { prompt: "The capital of France is", tokens: 6, ends: true };
const FACT_WITHOUT: Text = { ...FACT, without: "all" };
const CODE: Text = { prompt: "def fibonacci(n):\n    if n < 2:\n        return n\n    return", tokens: 44, ends: true };
const OPEN: Text = { prompt: "Is Python an interpreted language?", tokens: 10, ends: true };
const FORM: Text = { ...OPEN, prompt: `Question: ${OPEN.prompt}\nAnswer:` };

/** What the stage shows at a scene. */
export interface Seen {
  run: Run;
  step: StepFrame;
  tokens: number; // of the text
  layers: number;
}

/** What the engine did: the answer to the scene's question, and a sentence with its figures. */
export interface Found {
  right: number | string;
  because: string;
}

export interface Scene {
  id: string;
  title: string;
  words: string;
  camera?: Camera;
  place(gone: AbortSignal): Promise<unknown>;
  ask?(seen: Seen): string;
  options?: readonly string[]; // of a guess that is no number
  near?: number; // the share by which a guess may be off
  veil?: true; // of the step's numbers, which have the answer
  find?(seen: Seen, gone: AbortSignal): Promise<Found>;
}

export function seen(): Seen | null {
  const [current, step] = [run.value, frame.value];
  if (current === null || step === null) return null;
  return { run: current, step, tokens: length.value, layers: current.model.layers };
}

const at = (text: Text, step: number) => (gone: AbortSignal) => show(text, step, gone);

/** The next step, as the engine makes it. */
async function next(text: Text, { step }: Seen, gone: AbortSignal): Promise<StepFrame> {
  const made = await show(text, step.step + 1, gone);
  return made.frames[step.step + 1] as StepFrame;
}

/** How much of the attention in a text is on the three earlier tokens that a row reads most: the mean of all heads, the
 * least and the most of a head, and the head with the most. */
async function tightness(text: Text, gone: AbortSignal) {
  const { id, frames } = await finish(text, gone, null);
  resultClosed.value = true;
  const { heads, rows } = await api.call<AtlasCard>(`runs/${id.value}/atlas?step=${frames.length - 1}`);
  const few = heads.map((one) => one.few);
  const most = heads.reduce((a, b) => (b.few > a.few ? b : a));
  const mean = few.reduce((sum, one) => sum + one, 0) / few.length;
  return {
    mean,
    rows,
    most,
    of: `${percent(mean)} (in single heads ${percent(Math.min(...few))} to ${percent(most.few)})`,
  };
}

const [SAME, OTHER] = ["the same text", "another text"] as const;
const LIKE = 3; // percentage points
const [STORY, PROGRAM, ALIKE] = ["the story", "the program", "about the same"] as const;
const [CUT, ENDED] = ["cut at the limit", "by the end token"] as const;

export const SCENES: readonly Scene[] = [
  {
    id: "loop",
    title: "One token at a time",
    words:
      "A language model writes one token at a time, a word or a part of one. The text so far, at first the prompt, goes in and through layer after layer. A probability for every possible token comes out; one is drawn and appended. Then the longer text goes in. Each tile on the stage is a token. The engine, which runs the model, checks your guess.",
    camera: "side",
    place: at(DAY, 0),
    ask: ({
      tokens,
      run: {
        tokens: [first],
      },
    }) => {
      const start = first?.special ? ", with “start”, which marks its beginning" : "";
      return `The text has ${tokens} tokens${start}. How many will it have after three more steps?`;
    },
    find: async ({ step }, gone) => {
      const { frames } = await show(DAY, step.step + 3, gone);
      const text = frames.slice(step.step + 1, step.step + 4).map((one) => one.text);
      return {
        right: frames[step.step + 3]?.seq_len ?? 0,
        because: `Three steps wrote three tokens: “${text.join("").trim()}”. The loop runs once for each token.`,
      };
    },
  },
  {
    id: "read",
    title: "Each token reads all before it",
    words:
      "To find the next token, the last one of the text asks a question of itself and all before it. Each gets a share of its attention: the arcs. A layer asks in several ways at once, by its heads; the arcs are of one head (H) in one layer (L). Any earlier word may decide how the text goes on, so all are read at every step. No token reads a later one.",
    camera: "top",
    place: at(DAY, 3),
    ask: ({ run: current, step }) =>
      `${current.called(step.start)} was the last token, number ${count(step.start + 1)}, when ${current.called(step.start + 1)} was found. How many tokens did it read, itself included?`,
    find: async (_, gone) => {
      await until(() => row.value !== null, gone);
      const { codes, argmax } = row.value as NonNullable<typeof row.value>;
      const weight = percent(((codes[argmax] ?? 0) / 255) ** 2);
      return {
        right: codes.length,
        because: `Head ${head.value} of layer ${layer.value} gives each a share; the largest is ${weight}, and all sum to 100 %.`,
      };
    },
  },
  {
    id: "kv",
    title: "A key and a value in every layer",
    words:
      "In each layer a token makes three lists of numbers. Its query is its own question, used once. Its key is what later tokens find it by, and its value is what they take from it. A key and a value are one cell of the wall under the text; the stage shows the numbers of one head in one cell. They never change: no later token reaches back.",
    camera: "side",
    async place(gone) {
      await show(DAY, 3, gone);
      const word = (run.value?.promptTokens ?? 1) - 1; // the last one of the prompt
      flight.enter(word, layer.value);
    },
    veil: true,
    ask: ({ step, layers, run: current }) =>
      `The stage is in a cell of ${current.called(current.promptTokens - 1)}. The cache keeps ${plural(step.start + step.length, "token")} in ${plural(layers, "layer")}. How many cells is that?`,
    async find({ step, layers, run: { model } }) {
      flight.go(null);
      const kept = Number(step.kv_resident) / model.kv_bytes_per_token;
      return {
        right: model.state_bytes > 0 ? layers * (step.start + step.length) : Math.round(kept * layers),
        because: `Now the whole wall is on the stage. It takes ${joined(bytes(step.kv_resident))}, by the engine’s count. That is the KV cache.`,
      };
    },
  },
  {
    id: "prefill",
    title: "Reading goes all at once",
    words:
      "This is the first step again. The prompt is known, so all its tokens go through the layers together and fill the cache. This is called prefill. The time until the first token is the time of this step.",
    camera: "side",
    place: at(DAY, 0),
    veil: true,
    ask: ({ step, layers }) =>
      `The prompt has ${plural(step.length, "token")}, and the model ${plural(layers, "layer")}. How many cells did this step compute?`,
    find: async ({ step }) => ({
      right: Number(step.layer_tokens),
      because: `One step computed all of them, in ${joined(micros(step.step_us))}.`,
    }),
  },
  {
    id: "decode",
    title: "Writing goes one token at a time",
    words:
      "Every later step has one new token. Only that one goes through the layers. Its keys and values are added to the cache, and the cache has those of all others. This is called decode.",
    camera: "side",
    place: at(DAY, WITHOUT - 2),
    veil: true,
    ask: ({ tokens, step }) =>
      `The stage is at step ${numbered(step.step)} now, and the text has ${tokens} tokens. How many cells will the next step compute?`,
    async find(before, gone) {
      const { layer_tokens, start } = await next(DAY, before, gone);
      return {
        right: Number(layer_tokens),
        because: `One for each layer. The ${plural(start, "token")} before were not computed again.`,
      };
    },
  },
  {
    id: "without",
    title: "The same, without the cache",
    words:
      "From the next step on, nothing is kept. The model has no other memory of the text: to write one token, all tokens so far go through all layers again.",
    camera: "side",
    place: at(DAY, WITHOUT - 1),
    ask: ({ tokens, layers }) =>
      `The text has ${tokens} tokens, and the model ${layers} layers. Without the cache, how many cells will the next step compute?`,
    async find(before, gone) {
      const { layer_tokens, recomputed } = await next(DAY, before, gone);
      return {
        right: Number(layer_tokens),
        because: `All tokens in all layers, ${count(recomputed)} of them again, to write one token. What it made is thrown away.`,
      };
    },
  },
  {
    id: "newest",
    title: "The last token’s own work is the same",
    words:
      "With the cache or without, the last token that is read goes once through every layer, and its query meets the same keys. Without the cache these keys were only made again. So the result is the same, and what the cache saves is the repeated work.",
    camera: "side",
    place: at(DAY, WITHOUT),
    veil: true,
    ask: ({ step, run: current }) =>
      `This step without the cache computed ${count(step.layer_tokens)} cells, to find ${current.called(step.start + step.length)}. How many are those of ${current.called(step.start + step.length - 1)}, the last token read?`,
    async find({ step, layers, run: { frames } }) {
      const cached = frames.find((one) => one.cache && one.length === 1);
      return {
        right: Number(step.layer_tokens) - step.recomputed * layers,
        because: `The others repeat ${plural(step.recomputed, "token")}. A step with the cache computed ${count(cached?.layer_tokens ?? 0)}.`,
      };
    },
  },
  {
    id: "whole",
    title: "What it saves on a whole text",
    words:
      "The model now writes a longer text with the cache. Each step computes the same cells. Without the cache, each step would compute more than the one before: a ramp, whose area grows with the square of the length. Cells leave out the reading of earlier tokens, which grows a little either way.",
    camera: "side",
    place: at(WHOLE, 0),
    near: 0.2,
    ask: ({ run: { promptTokens, card } }) =>
      `The prompt has ${promptTokens} tokens, and ${card.max_tokens} are written. How many times less work is it with the cache? Within a fifth is right.`,
    async find(_, gone) {
      const { state, promptTokens: n, frames, model } = await finish(WHOLE, gone);
      const [most, layers] = [n + frames.length - 1, plural(model.layers, "layer")];
      const sum = state.value.summary;
      return {
        right: sum?.times ?? 0,
        because: `With the cache ${most} tokens, all but the last one written, go once through ${layers}: ${count(sum?.cached ?? 0)} cells. Without it the steps compute ${n}, ${n + 1} and so on to ${most} tokens: ${count(sum?.naive ?? 0)} cells, the last step alone as many as the whole text with the cache.`,
      };
    },
  },
  {
    id: "price",
    title: "The price is memory",
    words:
      "The cache trades memory for work, and grows by the same bytes with each token: 2 (key and value) × layers × heads with keys of their own × numbers in a key × bytes of a number. For long texts it is memory that runs out. It gets smaller where layers read near tokens only, where texts with the same beginning share it, and where a number has fewer bits.",
    camera: "side",
    async place(gone) {
      await finish(WHOLE, gone, null);
      resultClosed.value = true;
    },
    near: 0.03,
    ask: ({ run: { model }, step }) =>
      `A token takes ${count(model.kv_bytes_per_token)} bytes here. How many KiB (1,024 bytes) do ${plural(step.start + step.length, "token")} take?`,
    async find({ step }) {
      const facts = (await learn.lesson()).facts.flatMap((one) => one.facts);
      const llama = facts.find(({ name }) => name === "Meta-Llama-3-8B 8192 1")?.value;
      const there =
        typeof llama === "number"
          ? ` Llama 3 8B, a model of 8 billion weights, takes ${joined(bytes(llama))} for 8,192 tokens.`
          : "";
      return { right: Number(step.kv_resident) / 1024, because: `By the engine’s count.${there}` };
    },
  },
  {
    id: "training",
    title: "Training needs no cache",
    words:
      "In training the whole text is there. One pass predicts every next token at once, each from its past, and makes each query, key and value exactly once. Nothing is repeated, so there is nothing to keep. Only writing needs the loop.",
    camera: "side",
    async place(gone) {
      await finish(WHOLE, gone, null);
      resultClosed.value = true;
    },
    ask: ({ tokens, run: { frames } }) =>
      `The loop took ${frames.length} passes for this text of ${tokens} tokens. How many does training take, to predict each of them from those before it?`,
    async find({ run: { tokens, frames } }) {
      const { losses, facts } = await learn.score(tokens.map(({ id }) => id));
      const rows = Number(facts.find(({ name }) => name === "rows")?.value);
      const time = facts.find(({ name }) => name === "pass_us")?.value;
      return {
        right: losses.length / rows,
        because: `The engine just made all ${count(losses.length - 1)} predictions in one pass, in ${joined(micros(Number(time)))}: one for each of the ${count(losses.length)} tokens but the first, which has nothing before it. The loop is given the prompt, so it predicts only the ${frames.length} that it writes.`,
      };
    },
  },
  {
    id: "tight",
    title: "Is attention tighter in code?",
    words:
      "A token with tight attention gives most of it to few others: few strong arcs. It is often said that attention is loose in a story and tight in code. Here it is measured, on this story and on a program of like length: the share of the attention on the three earlier tokens that are read most, the first one and the newest two left out.",
    camera: "top",
    async place(gone) {
      await finish(WHOLE, gone, null);
      resultClosed.value = true;
    },
    ask: () => `In which text is more of the attention on three tokens? Less than ${LIKE} points apart is “${ALIKE}”.`,
    options: [STORY, PROGRAM, ALIKE],
    async find(_, gone) {
      const story = await tightness(WHOLE, gone);
      const code = await tightness(CODE, gone);
      const apart = 100 * (code.mean - story.mean);
      look(code.most.layer, code.most.head);
      return {
        right: Math.abs(apart) < LIKE ? ALIKE : apart > 0 ? PROGRAM : STORY,
        because: `The story has ${story.of}; the program, now on the stage, ${code.of}: averages over the last ${story.rows} and ${code.rows} tokens. Heads differ more than texts do: the arcs are now those of the tightest one, layer ${code.most.layer}, head ${code.most.head}, at the last token.`,
      };
    },
  },
  {
    id: "know",
    title: "What it knows is not in the cache",
    words:
      "What usually follows a phrase was learned in training: it is in the model’s weights, millions of fixed numbers. The cache has only this text, and is gone with it. On the stage the model went on from “The capital of France is”, with the cache.",
    camera: "side",
    place: at(FACT, FACT.tokens - 1),
    ask: () => "The same prompt once more, without the cache. What will the model write?",
    options: [SAME, OTHER, "nothing"],
    async find({ run: first }, gone) {
      const again = await show(FACT_WITHOUT, FACT.tokens - 1, gone);
      const [one, other] = [first, again].map(({ tokens }) => tokens.map(({ id }) => id).join());
      const wrote = (of: Run) => of.pieces.slice(of.promptTokens).join("").trim();
      const ids = (await api.tokenize(`${FACT.prompt} Paris`)).map(({ id }) => id);
      const { losses } = await learn.score(ids);
      const loss = losses.slice(first.promptTokens).reduce<number>((sum, one) => sum + (one ?? 0), 0);
      await until(() => again.state.value.summary !== null, gone);
      const ratio = (of: "layer_tokens" | "engine_us"): number =>
        (again.state.value.summary?.[of] ?? 1) / (first.state.value.summary?.[of] ?? 1);
      const [work, time] = [ratio("layer_tokens"), ratio("engine_us")];
      const parts = plural(ids.length - first.promptTokens, "token");
      const told =
        1 < time && time < work
          ? ` Without was ${figures(work)} times the work, but ${figures(time)} times the time: each step also reads all weights, however many tokens it computes.`
          : "";
      return {
        right: one === other ? SAME : OTHER,
        because: `With: “${wrote(first)}”. Without: “${wrote(again)}”. The model gives “Paris”, ${parts} one after another, a probability of ${percent(Math.exp(-loss))}.${told}`,
      };
    },
  },
  {
    id: "stop",
    title: "When it stops",
    words:
      "The loop ends when the model draws its end token, which has no text, when a stop text appears, or at the limit of tokens. A limit does not make an answer shorter. To get “Yes.” and no essay, ask for a form that is short; then set the limit as a guard.",
    camera: "side",
    place: at(OPEN, 0),
    ask: () => `“${OPEN.prompt}” The limit is ${OPEN.tokens} tokens. How will the answer of this model end?`,
    options: [ENDED, CUT],
    async find(_, gone) {
      const wrote = (of: Run) => `“${of.pieces.slice(of.promptTokens).join("").trim()}”`;
      const told = (of: Run) =>
        `${wrote(of)} in ${plural(of.frames.length, "step")}, ${ending(of.state.value)?.text ?? "no end"}`;
      const form = await finish(FORM, gone, null);
      const open = await finish(OPEN, gone, 8); // on the stage at the end: the question is about it
      return {
        right: ending(open.state.value)?.cut ? CUT : ENDED,
        because: `It wrote ${told(open)}. Given the same question in the form “Question: … Answer:”, it wrote ${told(form)}.`,
      };
    },
  },
  {
    id: "end",
    title: "What to take with you",
    words:
      "Articles end with sentences like these. Each was measured on this text; where one is wrong, what is right stands below it.",
    camera: "side",
    place: (gone) => finish(WHOLE, gone, null),
  },
];

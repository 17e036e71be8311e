// The story of a run in plain words: at any time one sentence about the step that is shown, under one of five titles.
// In slow steps the sentence goes with what the stage does: first the layers work, then the head reads, then it writes.

import { computed } from "@preact/signals";
import { type Moment, moment } from "./clock";
import { count, plural } from "../ui/format";
import { selected } from "../run/answers/attention-row";
import { frame, length, live, pageState, run, summary } from "./store";
import { quoted } from "../ui/text";
import type { Run } from "../run/run";
import { ending } from "./messages";
import type { StepFrame, Summary } from "../schema";

export const CHAPTERS = [
  ["reading", "Reading the prompt", "read"],
  ["notes", "Filling the cache", "save"],
  ["stroke", "One token at a time", "write"],
  ["without", "No cache", "without"],
  ["result", "The result", "result"],
] as const;

export type Chapter = (typeof CHAPTERS)[number][0];

export interface Sentence {
  chapter: Chapter;
  text: string;
}

/** The sentence about a step, at a moment of its animation. */
export function tell(current: Run, step: StepFrame, at: Moment, watched: { layer: number; head: number }): Sentence {
  const layers = plural(current.model.layers, "layer");
  const all = step.start + step.length;
  const written = step.token === null ? null : quoted(current.named(step.token).text);
  if (step.token === null)
    return {
      chapter: "reading",
      text: `The prompt is long and is read in parts: ${count(all)} of ${count(current.promptTokens)} tokens so far.`,
    };
  if (!step.cache) return { chapter: "without", text: without(step, at, written ?? "", layers) };
  if (step.recomputed > 0)
    return {
      chapter: "notes",
      text: `The cache is back: all ${count(all)} tokens go through the layers once more, and this time they fill it.`,
    };
  const first = step.step === current.card.first_step && current.card.parent === null;
  if (step.length > 1 || first) return reading(current, step, at, written ?? "", layers);
  const input = current.called(all - 1);
  const texts: Record<Moment, string> = {
    pass: `${input} goes through the ${layers} and reads the cache of ${plural(step.start, "earlier token")}.`,
    work: `To find the next token, only the newest one, ${input}, goes through the ${layers}. The ${count(step.start)} before it are not computed again.`,
    look: `To find the next token, ${input} reads the cache in each layer: the keys and values of all earlier tokens. The beams end at what head ${watched.head} of layer ${watched.layer} reads, as wide as its share.`,
    write: `The result is a probability for every possible token. One is drawn: ${written}.`,
    rest: `To write ${written}, only ${input} went through the ${layers}. The work on the ${count(step.start)} before it was saved: that is the KV cache.`,
  };
  return { chapter: "stroke", text: texts[at] };
}

function reading(current: Run, step: StepFrame, at: Moment, written: string, layers: string): Sentence {
  const known = step.start > 0 ? ` The first ${count(step.start)} were read before, and are in the cache.` : "";
  const reused = current.reusedInChat;
  const chat =
    reused > 0
      ? ` In the chat ${count(reused)} of them were found in the cache; here all are computed again, to be seen.`
      : "";
  if (at === "work" || at === "pass")
    return {
      chapter: "reading",
      text: `The model reads the prompt: ${plural(step.length, "token")} go through the ${layers} together.${known}${chat}`,
    };
  if (at === "look" || at === "write")
    return {
      chapter: "notes",
      text: "For each token each layer saves a key, by which later tokens find it, and a value, which they take from it. All of them together are the cache: the wall under the text.",
    };
  return {
    chapter: "notes",
    text: `The prompt is read, and ${written} is written. For each of the prompt’s ${plural(step.start + step.length, "token")} the cache now has in each layer a key, by which later tokens find it, and a value, which they take from it.${chat}`,
  };
}

function without(step: StepFrame, at: Moment, written: string, layers: string): string {
  const all = count(step.start + step.length);
  if (at === "work" || at === "pass") return `Without the cache, all ${all} tokens go through the ${layers} again.`;
  if (step.recomputed === 0)
    return `Without the cache: ${all} tokens went through the ${layers}, nothing was kept, and ${written} was written.`;
  return `Without the cache, all ${all} tokens went through the ${layers}, ${count(step.recomputed)} of them again, to write one token: ${written}.`;
}

/** What the whole text took, both ways, in a sentence. */
function climax(current: Run, { written, cached, naive, layer_tokens: done }: Summary): string {
  const tokens = current.card.parent === null ? plural(written, "token") : `${plural(written, "token")} since the fork`;
  if (cached === naive)
    return `One step, one token: a cache saves nothing yet. It would save the work of every later step.`;
  if (done >= naive)
    return `Without the cache, each step computed all earlier tokens again: ${count(naive)} cells for ${tokens}. With it, the same text takes ${count(cached)}.`;
  const { layers } = current.model;
  const own =
    done === cached && current.card.parent === null
      ? `each of ${plural(cached / layers, "token")} went once through the ${plural(layers, "layer")}: ${count(cached)} cells`
      : `${tokens} take ${count(cached)} cells`;
  return `With the cache, ${own}. Without it, each step computes all earlier tokens again: ${count(naive)} cells for the same text.`;
}

/** The sentence under the stage's title, at all times. */
export const sentence = computed<Sentence | null>(() => {
  const current = run.value;
  if (current === null) return null;
  const step = frame.value;
  if (step === null) {
    const tokens = plural(length.value, "token");
    if (current.card.parent !== null)
      return {
        chapter: "stroke",
        text: `A branch: its first ${tokens} are those of the run that it forked from. It continues after them.`,
      };
    const end = ending(current.state.value);
    if (current.ended && current.count.value === 0 && end !== null)
      return { chapter: "result", text: `The prompt is cut into ${tokens}, and nothing was written: ${end.text}.` };
    const waits = live.value && pageState.value === "paused";
    return {
      chapter: "reading",
      text: waits
        ? `The prompt is cut into ${tokens}. Press play, and the model reads them.`
        : `The prompt is cut into ${tokens}. The model is about to read them.`,
    };
  }
  if (summary.value !== null) return { chapter: "result", text: climax(current, summary.value) };
  return tell(current, step, moment.value, selected.value);
});

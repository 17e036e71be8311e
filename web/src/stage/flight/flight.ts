// A flight through the model: from a token of the wall to its row of the embedding, its Q, K and V in one layer, their
// rotation by the position, the query that reads, the softmax, the MLP, the next layer, the logits and the draw. Its
// place, and the figures of the engine there.

import { computed, effect, signal } from "@preact/signals";
import { Answers } from "../../run/answers/answers";
import * as api from "../../visit/api";
import * as player from "../../run/play/player";
import { keepsState, obtainable, row, select, selected } from "../../run/answers/attention-row";
import type { BlockView } from "../../schema/block";
import type { SamplerView } from "../../schema/sampler";
import type { WayView } from "../../schema/block";
import { card, frame, length, run } from "../../visit/store";

export const STOPS = [
  "word",
  "embedding",
  "norm",
  "qkv",
  "position",
  "score",
  "mask",
  "softmax",
  "value",
  "mlp",
  "residual",
  "next",
  "logits",
  "draw",
] as const;
export type Stop = (typeof STOPS)[number];
const KNOWN: readonly Stop[] = ["word", "next", "logits"]; // those that a recording has, too
const OF_A_CELL: readonly Stop[] = ["norm", "qkv", "position", "score", "softmax", "value"]; // where another cell may be looked at

/** The place of the flight; null: none is on. */
export const stop = signal<Stop | null>(null);
export const cell = signal({ position: 0, layer: 0 });
/** Which of the vectors' numbers is shown: the one that was chosen, or that of the largest product. */
const chosen = signal<number | null>(null);
export const number = computed(() => {
  const products = view.value?.products.map(Math.abs) ?? [];
  return Math.min(chosen.value ?? products.indexOf(Math.max(...products)), products.length - 1);
});
export const choose = (at: number): void => void (chosen.value = at);

/** The stops of this page. */
export const stops = computed<readonly Stop[]>(() => (obtainable.value ? STOPS : KNOWN));

/** The last computed position of the shown step: its query meets the keys. */
export const reader = computed(() => (frame.value ? frame.value.start + frame.value.length - 1 : 0));

/** The token that the stop is about: the one whose cell it is, and from the MLP on the one that reads it. */
export const subject = computed(() => {
  const at = stop.value;
  if (at === null || !["mask", "mlp", "residual", "next", "logits"].includes(at)) return cell.value.position;
  return reader.value;
});

const ways = new Answers<WayView>();
const blocks = new Answers<BlockView>();
const draws = new Answers<SamplerView>();

const wayKey = computed(() => {
  const { position, layer } = cell.value;
  return `${frame.value?.step}/${layer}/${selected.value.head}/${position}`;
});
/** The layer whose vectors the stop shows: the table's row is what comes into the first. */
const blockKey = computed(() => {
  const layer = stop.value === "word" || stop.value === "embedding" ? 0 : cell.value.layer;
  const position = stop.value === "softmax" ? reader.value : subject.value;
  return `${frame.value?.step}/${layer}/${position}`;
});
const drawKey = computed(() => String(frame.value?.step));

export const view = computed(() => run.value && ways.get(run.value, wayKey.value));
export const block = computed(() => run.value && blocks.get(run.value, blockKey.value));
export const draw = computed(() => run.value && draws.get(run.value, drawKey.value));

/** Whether the MLP multiplies its inside by a gate: then twice as many products lead to it. */
export const gated = computed(() => {
  const hidden = block.value?.stages.find(({ name }) => name === "hidden");
  return hidden?.flops === 4 * (card.value?.width ?? 0) * (hidden?.shape[0] ?? 0);
});

const OF_BLOCK: readonly Stop[] = ["word", "embedding", "norm", "mask", "softmax", "mlp", "residual"];
const OF_WAY: readonly Stop[] = ["position", "qkv", "score", "mask", "softmax", "value"];

/** Why the engine says nothing of this stop; empty: it does, or was not asked yet. */
export const refusal = computed(() => {
  const [current, at] = [run.value, stop.value];
  if (current === null || at === null) return "";
  if (OF_WAY.includes(at)) return ways.refusal(current, wayKey.value);
  return OF_BLOCK.includes(at) ? blocks.refusal(current, blockKey.value) : "";
});

effect(() => {
  const [current, step, at] = [run.value, frame.value, stop.value];
  if (current === null || step === null || at === null || !obtainable.value) return;
  const ask = <T>(answers: Answers<T>, key: string, path: string): void => {
    if (!answers.known(current, key)) void answers.ask(current, key, (id) => api.call(`runs/${id}/${path}`));
  };
  if (OF_WAY.includes(at)) {
    const { position, layer } = cell.value;
    const query = `step=${step.step}&layer=${layer}&head=${selected.value.head}&position=${position}`;
    ask(ways, wayKey.value, `way?${query}`);
  }
  if (OF_BLOCK.includes(at)) {
    const [, layer, position] = blockKey.value.split("/");
    ask(blocks, blockKey.value, `block?step=${step.step}&layer=${layer}&position=${position}`);
  }
  if (at === "draw" && step.token !== null) ask(draws, drawKey.value, `sampler?step=${step.step}`);
});

effect(() => {
  void run.value;
  stop.value = null;
});

/** Flies to a cell; without a layer to its word. From a stop that another cell has too the flight goes on with that one. */
export function enter(position: number, layer: number | null): void {
  if (position >= length.value) return;
  player.pause(); // what is looked at stays
  const at = stop.value;
  if (layer !== null && layer !== selected.value.layer && !keepsState(layer)) select(layer, selected.value.head);
  cell.value = { position, layer: layer ?? selected.value.layer };
  chosen.value = null;
  if (layer === null || !obtainable.value) stop.value = "word";
  else stop.value = at !== null && OF_A_CELL.includes(at) ? at : "qkv";
}

/** Begins at the word that the beams read most; a comma says less, so it needs a letter, unless none is read at all. */
export function begin(): void {
  const { codes, argmax } = row.value ?? { codes: [], argmax: reader.value };
  let best = -1;
  codes.forEach((code, at) => {
    const token = run.value?.tokens[at];
    if (token && !token.special && /\p{L}/u.test(token.text) && code > (codes[best] ?? 0)) best = at;
  });
  enter(Math.min(best < 0 ? argmax : best, reader.value), null);
}

/** On to the next stop, or back; before the first and after the last is the wall. */
export function move(by: number): void {
  const at = stop.value === null ? -1 : stops.value.indexOf(stop.value);
  stop.value = stops.value[at + by] ?? null;
}

export const go = (to: Stop | null): void => void (stop.value = to);

/** What happened to a cell up to the shown step: the step that wrote it, and how many later ones read it. */
export function history(position: number, layer: number): { written: number | null; reads: number } {
  const frames = run.value?.frames.filter(({ step }) => step <= (frame.value?.step ?? -1)) ?? [];
  const last = frames.findLastIndex((one) => one.cache && one.start <= position && position < one.start + one.length);
  if (last < 0 || frames.slice(last).some((one) => !one.cache)) return { written: null, reads: 0 };
  const window = run.value?.model.windows[layer] ?? Infinity;
  const reads = frames.slice(last + 1).filter((one) => one.start + one.length - 1 - position < window).length;
  return { written: frames[last]?.step ?? null, reads };
}

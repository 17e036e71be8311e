// The drill-down into a cell of the wall: from the column to one layer, one head, the row of its key and its query,
// one product, the softmax, the value, the MLP, and the logits. Its place, and the figures of the engine there.

import { computed, effect, signal } from "@preact/signals";
import { Answers } from "../run/answers/answers";
import { call } from "../visit/api";
import * as player from "../run/play/player";
import { obtainable, row, selected } from "../run/answers/attention-row";
import type { BlockView } from "../schema/block";
import type { WayView } from "../schema/way";
import { frame, length, run } from "../visit/store";

export const STOPS = ["column", "cell", "head", "product", "softmax", "value", "mlp", "logits"] as const;
export type Stop = (typeof STOPS)[number];
const KNOWN = 2; // stops that a recording has too: what it says of a cell

/** A place on the stage, in CSS pixels of it: what the next picture grows out of. */
export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** The place of the drill-down; null: on the wall. */
export const stop = signal<Stop | null>(null);
export const cell = signal({ position: 0, layer: 0 });
/** Which of the vectors' numbers is shown: the one that was chosen, or that of the largest product. */
const chosen = signal<number | null>(null);
export const number = computed(() => {
  const products = view.value?.products.map(Math.abs) ?? [];
  return Math.min(chosen.value ?? products.indexOf(Math.max(...products)), products.length - 1);
});
export const choose = (at: number): void => void (chosen.value = at);
export const from = signal<Box | null>(null);

/** The stops of this page. */
export const stops = computed<readonly Stop[]>(() => (obtainable.value ? STOPS : STOPS.slice(0, KNOWN)));

const ways = new Answers<WayView>();
const blocks = new Answers<BlockView>();

/** The last computed position of the shown step: its query meets the keys. */
export const reader = computed(() => (frame.value ? frame.value.start + frame.value.length - 1 : 0));

const key = computed(() => {
  const { position, layer } = cell.value;
  return `${frame.value?.step}/${layer}/${selected.value.head}/${position}`;
});
export const view = computed(() => (run.value === null ? null : ways.get(run.value, key.value)));
export const block = computed(() => (run.value === null ? null : blocks.get(run.value, key.value)));
/** Why the engine says nothing of this cell; empty: it does, or was not asked yet. */
export const refusal = computed(() => (run.value === null ? "" : ways.refusal(run.value, key.value)));

effect(() => {
  const [current, step, at] = [run.value, frame.value, stop.value];
  if (current === null || step === null || at === null || !obtainable.value) return;
  const { position, layer } = cell.value;
  const { head } = selected.value;
  const [last, name] = [reader.value, key.value];
  if (!ways.known(current, name))
    void ways.ask(current, name, (id) =>
      call(`runs/${id}/way?step=${step.step}&layer=${layer}&head=${head}&position=${position}`),
    );
  if (at === "mlp" && !blocks.known(current, name))
    void blocks.ask(current, name, (id) => call(`runs/${id}/block?step=${step.step}&layer=${layer}&position=${last}`));
});

effect(() => {
  void run.value;
  stop.value = null;
});

/** Goes into a cell; without a layer into its column alone. */
export function enter(position: number, layer: number | null, box: Box): void {
  if (position >= length.value) return;
  player.pause(); // what is looked at stays
  cell.value = { position, layer: layer ?? selected.value.layer };
  chosen.value = null;
  from.value = box;
  stop.value = layer === null ? "column" : "cell";
}

/** Goes into the cell that the beams read most. */
export function enterRead(box: Box): void {
  enter(Math.min(row.value?.argmax ?? reader.value, reader.value), selected.value.layer, box);
}

/** Further in, or out again; over the first stop is the wall. */
export function move(by: number, box: Box | null = null): void {
  const at = stop.value === null ? -1 : stops.value.indexOf(stop.value);
  from.value = box;
  stop.value = stops.value[at + by] ?? null;
}

export function go(to: Stop | null, box: Box | null = null): void {
  from.value = box;
  stop.value = to;
}

/** What happened to a cell up to the shown step: the step that wrote it, and how often a later one read it. */
export function history(position: number, layer: number): { written: number | null; reads: number } {
  const frames = run.value?.frames.filter(({ step }) => step <= (frame.value?.step ?? -1)) ?? [];
  const last = frames.findLastIndex((one) => one.cache && one.start <= position && position < one.start + one.length);
  if (last < 0 || frames.slice(last).some((one) => !one.cache)) return { written: null, reads: 0 };
  const window = run.value?.model.windows[layer] ?? Infinity;
  const reads = frames.slice(last + 1).filter((one) => one.start + one.length - 1 - position < window).length;
  return { written: frames[last]?.step ?? null, reads };
}

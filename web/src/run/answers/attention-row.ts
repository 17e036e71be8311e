// The attention row of the shown step for the selected layer and head. Most frames bring it; for another head of an old
// step, or one that was left out for a slow reader, it is asked for once and kept. In a replay only what was recorded
// is there.

import { computed, effect, signal } from "@preact/signals";
import { Answers } from "./answers";
import * as api from "../../visit/api";
import * as live from "../../visit/live";
import { card, frame, head, layer, link, picked, playing, run } from "../../visit/store";
import type { AttentionRow } from "../../schema";

const PATIENCE = 120; // ms that a step must stay shown before its row is asked for

/** Whether the first token's weight is left out of what is drawn: of many heads it is the largest, and says least. */
export const hideFirst = signal(false);

const fetched = new Answers<AttentionRow>();

const key = (step: number, layer: number, head: number): string => `${step}/${layer}/${head}`;

export const row = computed<AttentionRow | null>(() => {
  const current = run.value;
  const step = frame.value;
  if (current === null || step === null) return null;
  const own = step.attention;
  if (own !== null && keepsState(own.layer)) return null;
  if (current.origin !== "live") return own;
  if (own !== null && own.layer === layer.value && own.head === head.value) return own;
  return fetched.get(current, key(step.step, layer.value, head.value));
});

/** Why the server refuses the row of the shown step; empty: it does not. */
export const refusal = computed(() => {
  const [current, step] = [run.value, frame.value];
  return current && step ? fetched.refusal(current, key(step.step, layer.value, head.value)) : "";
});

/** The layer and head that are looked at: one's own choice, or what a replay has. */
export const selected = computed(() => {
  const own = run.value?.origin === "live" ? null : (frame.value?.attention ?? null);
  return { layer: own?.layer ?? layer.value, head: own?.head ?? head.value };
});

/** Whether the shown step is older than the run that the server has: one that was built again begins later. */
export const older = computed(() => {
  const [current, step] = [run.value, frame.value];
  return current?.origin === "live" && step !== null && step.step < current.since.value;
});

/** Whether a layer keeps a state of the text: it attends to nothing. */
export const keepsState = (layer: number): boolean => card.value?.windows[layer] === 0;

/** Whether a step of the shown run can be computed again: not where layers have rewritten a state since. */
const replayable = computed(() => !(run.value?.model.windows.includes(0) ?? false));

/** Why the engine cannot be asked about the shown step, whatever the question; empty: it can, if there is one. */
export const unasked = computed(() => (older.value ? OLDER : replayable.value ? "" : REWRITTEN));

const REWRITTEN =
  "Layers of this model rewrite a state at each token, so the engine cannot replay a step. Attention is shown as it was recorded.";
const OLDER = "The engine built this run again after this step, so it cannot be asked about it.";

/** Whether the engine can be asked about the shown step. */
export const obtainable = computed(() => run.value?.origin === "live" && link.value === "open" && unasked.value === "");

export function select(newLayer: number, newHead: number): void {
  look(newLayer, newHead);
  picked.value = true;
}

/** As `select`, where nobody has chosen it. */
export function look(newLayer: number, newHead: number): void {
  const model = card.value;
  if (model === null) return;
  layer.value = Math.max(0, Math.min(model.layers - 1, newLayer));
  head.value = Math.max(0, Math.min(model.heads - 1, newHead));
  if (run.value?.origin === "live") live.send({ op: "watch", layer: layer.value, head: head.value });
}

/** Whether the row of the shown step is asked for, or will be. */
export const coming = computed(() => {
  const [current, step] = [run.value, frame.value];
  if (current === null || step === null || row.value !== null || !obtainable.value || keepsState(layer.value))
    return false;
  return !fetched.known(current, key(step.step, layer.value, head.value));
});

effect(() => {
  const current = run.value;
  const step = frame.value;
  if (!coming.value || current === null || step === null) return;
  const [l, h] = [layer.value, head.value];
  if (fetched.known(current, key(step.step, l, h))) return; // read here, so that it is asked for again
  const get = () => fetched.ask(current, key(step.step, l, h), (id) => api.attention(id, step.step, l, h));
  const timer = setTimeout(get, playing.value ? 2 * PATIENCE : PATIENCE);
  return () => clearTimeout(timer);
});

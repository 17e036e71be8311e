// The work of every head at the shown step: the share on the first token, on the last eight, and how even its row is. The
// engine computes it on request, from the cache; it is asked once a step has stayed shown for a moment.

import { computed, effect, signal } from "@preact/signals";
import { Answers } from "./answers";
import * as api from "../../visit/api";
import { obtainable } from "./attention-row";
import { card, embedded, frame, panel, run } from "../../visit/store";
import type { HeadMasses } from "../../schema";

export const MEASURES = ["sink", "local", "entropy"] as const;
export type Measure = (typeof MEASURES)[number];
export const measure = signal<Measure>("sink");

const PATIENCE = 350; // ms that a step must stay shown

const GRID = 600; // cells of the grid of layers and heads; a larger model has only the steppers

const fetched = new Answers<HeadMasses>();

/** Whether the page has the grid of heads. */
export const gridded = computed(() => {
  const model = card.value;
  if (run.value?.origin !== "live" || embedded.value || model === null) return false;
  return model.layers * model.heads <= GRID && !model.windows.includes(0); // states are rewritten, so nothing is replayed
});

/** Of the shown step; while it is not here, null. */
export const masses = computed<HeadMasses | null>(() => {
  const current = run.value;
  const step = frame.value;
  return current && step ? fetched.get(current, String(step.step)) : null;
});

/** Why the server refuses the heads' masses of the shown step; empty: it does not. */
export const refusal = computed(() => {
  const [current, step] = [run.value, frame.value];
  return current && step ? fetched.refusal(current, String(step.step)) : "";
});

effect(() => {
  const current = run.value;
  const step = frame.value;
  if (current === null || step === null || step.token === null || !obtainable.value) return;
  if (!gridded.value && panel.value !== "learn") return; // nothing shows them
  if (fetched.known(current, String(step.step))) return;
  const get = () => fetched.ask(current, String(step.step), (id) => api.heads(id, step.step));
  const timer = setTimeout(get, PATIENCE);
  return () => clearTimeout(timer);
});

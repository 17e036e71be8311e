// What every head did at the shown step: the share on the first token, on the last eight, and how even its row is. The
// engine computes it on request, from the cache; it is asked once a step has stayed shown for a moment.

import { computed, effect, signal } from "@preact/signals";
import * as api from "./api";
import { obtainable } from "./rows";
import { frame, run } from "./store";
import type { HeadMasses } from "./schema";
import type { Run } from "./run";

export const MEASURES = ["sink", "local", "entropy"] as const;
export type Measure = (typeof MEASURES)[number];
export const measure = signal<Measure>("sink");

const PATIENCE = 350; // ms that a step must stay shown

const fetched = new WeakMap<Run, Map<number, HeadMasses | "failed">>();
const arrivals = signal(0);

/** Of the shown step; while it is not here, null. */
export const masses = computed<HeadMasses | null>(() => {
  const current = run.value;
  const step = frame.value;
  void arrivals.value;
  const found = current && step ? fetched.get(current)?.get(step.step) : undefined;
  return found === undefined || found === "failed" ? null : found;
});

effect(() => {
  const current = run.value;
  const step = frame.value;
  if (current === null || step === null || step.token === null || !obtainable.value) return;
  if (fetched.get(current)?.has(step.step)) return;
  const timer = setTimeout(() => void get(current, step.step), PATIENCE);
  return () => clearTimeout(timer);
});

async function get(current: Run, step: number): Promise<void> {
  const found = await api.heads(current.id.value, step).catch((): "failed" => "failed");
  const known = fetched.get(current) ?? new Map<number, HeadMasses | "failed">();
  fetched.set(current, known.set(step, found));
  arrivals.value++;
}

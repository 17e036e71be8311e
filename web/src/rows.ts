// The attention row of the shown step for the selected layer and head. Most frames bring it; for another head of an old
// step, or one that was left out for a slow reader, it is asked for once and kept. In a replay only what was recorded
// is there.

import { computed, effect, signal } from "@preact/signals";
import * as api from "./api";
import * as live from "./live";
import { card, frame, head, layer, link, picked, playing, run } from "./store";
import type { AttentionRow } from "./schema";
import type { Run } from "./run";

const PATIENCE = 120; // ms that a step must stay shown before its row is asked for

/** Whether the first token's weight is left out of what is drawn: of many heads it is the largest, and says least. */
export const hideFirst = signal(false);

const fetched = new WeakMap<Run, Map<string, AttentionRow | "failed">>();
const arrivals = signal(0);

const key = (step: number, layer: number, head: number): string => `${step}/${layer}/${head}`;

export const row = computed<AttentionRow | null>(() => {
  const current = run.value;
  const step = frame.value;
  void arrivals.value;
  if (current === null || step === null) return null;
  const own = step.attention;
  if (current.origin !== "live") return own;
  if (own !== null && own.layer === layer.value && own.head === head.value) return own;
  const found = fetched.get(current)?.get(key(step.step, layer.value, head.value));
  return found === undefined || found === "failed" ? null : found;
});

/** The layer and head that are looked at: one's own choice, or what a replay has. */
export const selected = computed(() => {
  const own = run.value?.origin === "live" ? null : (frame.value?.attention ?? null);
  return { layer: own?.layer ?? layer.value, head: own?.head ?? head.value };
});

/** Whether a missing row can be had. */
export const obtainable = computed(() => run.value?.origin === "live" && link.value === "open");

export function select(newLayer: number, newHead: number): void {
  const model = card.value;
  if (model === null) return;
  layer.value = Math.max(0, Math.min(model.layers - 1, newLayer));
  head.value = Math.max(0, Math.min(model.heads - 1, newHead));
  picked.value = true;
  if (run.value?.origin === "live") live.send({ op: "watch", layer: layer.value, head: head.value });
}

effect(() => {
  const current = run.value;
  const step = frame.value;
  if (current === null || step === null || row.value !== null || !obtainable.value) return;
  const [l, h] = [layer.value, head.value];
  if (fetched.get(current)?.has(key(step.step, l, h))) return;
  const timer = setTimeout(() => void get(current, step.step, l, h), playing.value ? 2 * PATIENCE : PATIENCE);
  return () => clearTimeout(timer);
});

async function get(current: Run, step: number, l: number, h: number): Promise<void> {
  const found = await api.attention(current.id.value, step, l, h).catch((): "failed" => "failed");
  const rows = fetched.get(current) ?? new Map<string, AttentionRow | "failed">();
  fetched.set(current, rows.set(key(step, l, h), found));
  arrivals.value++;
}

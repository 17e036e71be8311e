// The wall shows how much of the text the cache keeps: a cell that has left a window falls off it, and narrow numbers
// make narrow columns. Windows are the model's, the server's, or those that the lab tries on the shown text.

import { computed, signal } from "@preact/signals";
import type { ModelCard } from "../schema";
import type { LabCard } from "../schema/lab";
import { card, panel, run } from "../visit/store";

/** The cache that the lab has compared on the text of a run. */
export const tried = signal<{ run: string; lab: LabCard } | null>(null);

const trial = computed(() => {
  const found = tried.value;
  return found !== null && panel.value === "lab" && found.run === run.value?.id.value ? found.lab : null;
});

/** Positions at which this cache makes another token the most probable. */
export const changed = computed<ReadonlySet<number>>(() => new Set(trial.value?.changed.map((one) => one.position)));

export interface Kept {
  windows: readonly (number | null)[]; // of each layer, in tokens
  sinks: number;
  thin: number; // width of a column: the bytes of its numbers, as a share of what the model's own type takes
  tried: boolean; // by the lab: all that it leaves out falls now
}

const BYTES: Record<string, number> = { float32: 4, bfloat16: 2, float16: 2 };

/** Of the bytes of K and V in the type of the model. */
function thinnessOf({ windows, latent, kv_heads, head_size, kv_bytes_per_token, dtype }: ModelCard): number {
  const layers = windows.filter((window) => window !== 0).length;
  const own = 2 * layers * kv_heads * head_size * (BYTES[dtype] ?? 0);
  return latent > 0 || own === 0 ? 1 : Math.min(1, kv_bytes_per_token / own);
}

const narrower = (own: number | null, other: number | null): number | null =>
  own === null || other === null ? (own ?? other) : Math.min(own, other);

export const kept = computed<Kept>(() => {
  const model = card.value;
  if (model === null) return { windows: [], sinks: 0, thin: 1, tried: false };
  const lab = trial.value;
  const said = (pattern: RegExp): number | null => {
    const found = pattern.exec(model.kv_format)?.[1];
    return found === undefined ? null : Number(found);
  };
  const windows = model.windows.map((own) => narrower(own, said(/window (\d+)/)));
  const sinks = said(/(\d+) sinks/) ?? 0;
  if (lab === null) return { windows, sinks, thin: thinnessOf(model), tried: false };
  const read = Math.min(lab.tokens, (lab.window ?? Infinity) + lab.sinks);
  const thin = Math.min(1, (lab.kept_bytes * lab.tokens) / Math.max(1, lab.full_bytes * read));
  return { windows: windows.map((own) => narrower(own, lab.window)), sinks: lab.sinks, thin, tried: true };
});

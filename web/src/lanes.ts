// The stage during a race: the text that both lanes write, with two walls below it, the cached lane's above the other's.
// The picture stands for the newest step that both lanes computed: the cached lane goes through its layers, then the
// uncached one through its own, for the share of the time that each took.

import { effect, signal, untracked } from "@preact/signals";
import * as clock from "./clock";
import { count, plural } from "./format";
import { Cell, type Scene, type SceneToken } from "./renderers/renderer";
import type { TokenCard } from "./schema";
import type { RaceCard, RaceEnd, RaceStep } from "./schema/race";
import { run, shown } from "./store";
import { align, look, quoted } from "./text";

const PULSE = 420; // ms of a step's animation: steps that come faster are shown at its end

/** The race that is under way. */
export const racing = signal<AbortController | null>(null);

/** What is on the stage in place of the shown run; null: nothing. */
export const lanes = signal<{ scene: Scene; told: string } | null>(null);

// Another run has the engine and the stage to itself. A step of the shown run that was still on its way ends no race.
effect(() => {
  void run.value;
  untracked(hide);
});
effect(() => {
  void shown.value;
  lanes.value = null;
});

/** The tokens of a race's prompt as the stage shows them. */
export function looksOf(prompt: string, cards: readonly TokenCard[]): SceneToken[] {
  const pieces = align(prompt, cards);
  return cards.map((card, i) => look(card, "prompt", pieces[i] ?? ""));
}

/** Shows a race as far as it has come. `prompt`: its tokens; `end`: how it ended, if it has. */
export function show(card: RaceCard, prompt: readonly SceneToken[], steps: readonly RaceStep[], end: RaceEnd | null): void {
  const step = steps.findLast((one) => one.uncached_us !== null);
  if (step === undefined) return;
  const written = steps.slice(0, step.step + 1).map(({ token, text }) => look(token, "generated", text));
  lanes.value = { scene: sceneOf(card, [...prompt, ...written], step), told: tell(card, step, end) };
  if (end === null) clock.pulse(PULSE);
}

/** Gives the stage back to the shown run. That ends a race, which has no other place. */
export function hide(): void {
  stop();
  lanes.value = null;
}

/** Ends the race: the server ends it when its stream is closed. */
export function stop(): void {
  racing.value?.abort();
  racing.value = null;
}

function sceneOf({ layers }: RaceCard, tokens: SceneToken[], step: RaceStep): Scene {
  const text = Math.min(step.context, tokens.length - 1); // columns that the step had to have, in either lane
  const first = text - step.cached_tokens; // columns that the cached lane had kept
  const cells = new Uint8Array(tokens.length * 2 * layers).fill(Cell.empty);
  for (let position = 0; position < text; position++) {
    const at = position * 2 * layers;
    cells.fill(position < first ? Cell.kept : Cell.fresh, at, at + layers);
    cells.fill(step.step > 0 && position < text - 1 ? Cell.recomputed : Cell.fresh, at + layers, at + 2 * layers);
  }
  return {
    tokens,
    head: tokens.length - 1,
    layers: 2 * layers,
    lanes: 2,
    cells,
    layerShare: sharesOf(layers, step),
    row: null,
    layer: -1,
    cache: true,
    progress: 1,
    hovered: null,
  };
}

/** The lanes take turns: first all layers of the one, then all of the other. */
function sharesOf(layers: number, { cached_us, uncached_us }: RaceStep): Float32Array {
  const own = cached_us / Math.max(1, cached_us + (uncached_us ?? 0));
  return Float32Array.from({ length: 2 * layers }, (_, i) =>
    i < layers ? (own * (i + 1)) / layers : own + ((1 - own) * (i + 1 - layers)) / layers,
  );
}

function tell({ layers }: RaceCard, step: RaceStep, end: RaceEnd | null): string {
  if (end !== null) {
    const { compared, cached_tokens, uncached_tokens } = step.sums;
    return `Over ${plural(compared, "step")}, ${plural(cached_tokens, "token")} went through the layers with the cache, and ${count(uncached_tokens)} without it, for the same text.`;
  }
  const cached = `With the cache, ${plural(step.cached_tokens, "token")} ${step.cached_tokens === 1 ? "goes" : "go"} through the ${plural(layers, "layer")}`;
  const uncached = `without it, all ${count(step.uncached_tokens ?? 0)}`;
  return `${cached}; ${uncached}. The text goes on with ${quoted(step.token.text)}.`;
}

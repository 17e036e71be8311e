// The scene of one step: what the renderers draw. It is derived only from the run's frames, in time proportional to
// tokens times layers, and only when another step, row or layer is shown. The arrays are kept and grown, so that a run
// of a thousand steps allocates a few times, not a thousand.

import { Cell, type Scene, type SceneRow, type SceneToken } from "./renderers/renderer";
import type { AttentionRow, StepFrame } from "../schema";
import type { Run } from "../run/run";
import type { Kept } from "./kept";

/** The weight that a code stands for: codes are round(255 sqrt(weight)). */
export const WEIGHTS: Float32Array = Float32Array.from({ length: 256 }, (_, code) => (code / 255) ** 2);

/** The position with the largest weight, as the engine says; without the first token the one that its codes say. */
export function strongest({ argmax, codes }: AttentionRow, hideFirst: boolean): number {
  if (!hideFirst || argmax > 0) return argmax;
  let found = Math.min(1, codes.length - 1);
  for (let position = 2; position < codes.length; position++)
    if ((codes[position] ?? 0) > (codes[found] ?? 0)) found = position;
  return found;
}

/** The layers that attend to nothing: they keep a state of the text. */
export const statesOf = (windows: readonly (number | null)[]): number[] =>
  windows.flatMap((window, layer) => (window === 0 ? [layer] : []));

/** The cells of a wall whose layers of these numbers keep nothing of a token once the next one has been computed. */
export function rewritten(cells: Uint8Array, layers: number, states: readonly number[]): Uint8Array {
  for (const layer of states)
    for (let at = layer; at < cells.length; at += layers)
      if (cells[at] === Cell.kept || cells[at] === Cell.shared) cells[at] = Cell.empty;
  return cells;
}

const WHOLE: Kept = { windows: [], sinks: 0, thin: 1, tried: false };

export class SceneBuilder {
  private cells = new Uint8Array(0);
  private weights = new Float32Array(0);
  private share = new Float32Array(0);
  private readonly tokens: SceneToken[] = [];

  /** The scene after the frame at `index`; -1 is before the first. `progress` and `hovered` are the caller's to set. */
  build(
    run: Run,
    index: number,
    row: AttentionRow | null,
    layer: number,
    hideFirst: boolean,
    kept: Kept = WHOLE,
  ): Scene {
    const frame = run.frames[index];
    const layers = run.model.layers;
    const count = Math.min(run.length(index), run.tokens.length);
    this.tokens.length = count;
    for (let i = 0; i < count; i++) this.tokens[i] = run.looks[i] ?? { label: "", kind: "generated" };
    return {
      tokens: this.tokens,
      head: Math.max(0, count - 1),
      layers,
      states: statesOf(run.model.windows),
      lanes: 1,
      cells: this.cellsLeft(frame, count, run, kept),
      layerShare: this.shareOf(frame, layers),
      row: row && this.rowOf(row, hideFirst),
      layer,
      thin: kept.thin,
      cache: frame?.cache ?? true,
      progress: 1,
      hovered: null,
      recorded: run.origin === "recorded",
    };
  }

  private cellsOf(frame: StepFrame | undefined, count: number, layers: number, shared: number): Uint8Array {
    const size = count * layers;
    if (this.cells.length < size) this.cells = new Uint8Array(Math.ceil(size * 1.5));
    const cells = this.cells.subarray(0, size);
    if (frame === undefined) return cells.fill(Cell.empty);
    // The computed part is always a beginning of the text, so the recomputed positions are the first ones.
    const again = frame.start + frame.recomputed;
    const end = frame.start + frame.length;
    cells.fill(Cell.kept, 0, frame.start * layers);
    cells.fill(Cell.shared, 0, Math.min(shared, frame.start) * layers);
    cells.fill(Cell.recomputed, frame.start * layers, again * layers);
    cells.fill(Cell.fresh, again * layers, end * layers);
    return cells.fill(Cell.empty, end * layers);
  }

  /** The cells, without those that windows have left behind. Those that this step left are still falling. */
  private cellsLeft(
    frame: StepFrame | undefined,
    count: number,
    run: Run,
    { windows, sinks, tried }: Kept,
  ): Uint8Array {
    const layers = run.model.layers;
    const cells = rewritten(this.cellsOf(frame, count, layers, run.shared.peek()), layers, statesOf(run.model.windows));
    if (frame === undefined || !frame.cache) return cells;
    const end = frame.start + frame.length;
    windows.forEach((window, layer) => {
      if (window === null || window === 0) return;
      const before = tried ? 0 : frame.start - window; // what the step before had left
      for (let position = sinks; position < end - window; position++)
        cells[position * layers + layer] = position < before ? Cell.empty : Cell.left;
    });
    return cells;
  }

  private shareOf(frame: StepFrame | undefined, layers: number): Float32Array {
    if (this.share.length !== layers) this.share = new Float32Array(layers);
    const times = frame?.layers ?? [];
    const whole = times.reduce((sum, time) => sum + time.attention_us + time.mlp_us, 0);
    let passed = 0;
    for (let i = 0; i < layers; i++) {
      const time = times[i];
      passed += time ? time.attention_us + time.mlp_us : 0;
      this.share[i] = whole > 0 ? passed / whole : (i + 1) / layers;
    }
    return this.share;
  }

  private rowOf(row: AttentionRow, hideFirst: boolean): SceneRow {
    const size = row.codes.length;
    if (this.weights.length < size) this.weights = new Float32Array(Math.ceil(size * 1.5));
    const weights = this.weights.subarray(0, size);
    for (let i = 0; i < size; i++) weights[i] = WEIGHTS[row.codes[i] ?? 0] ?? 0;
    if (hideFirst) weights[0] = 0;
    return { layer: row.layer, head: row.head, weights, argmax: strongest(row, hideFirst) };
  }
}

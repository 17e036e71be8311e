// The interface of a renderer (2-D canvas, 3-D scene) and the Scene that it draws. A renderer holds no state of the run.
// Nothing is computed here that the engine knows; nothing is drawn that did not happen.

import type { Placed } from "./layout";
import type { Entry } from "./roles";

/** What a cell of the cache (one token in one layer) was in the shown step; `shared`: kept, in a page of several runs;
 * `left`: it has left the window of its layer, and falls. */
export const Cell = { empty: 0, kept: 1, fresh: 2, recomputed: 3, shared: 4, left: 5 } as const;

export type Camera = "iso" | "top" | "side" | "head" | "follow";
export const CAMERAS: readonly Camera[] = ["iso", "top", "side", "head", "follow"];
/** Where a visit begins: the wall from the front. */
export const HOME_CAMERA: Camera = "side";
/** The cameras that make a difference: a flat picture has no place beside the head. */
export const camerasOf = (renderer: "2d" | "3d" | null): readonly Camera[] =>
  renderer === "2d" ? CAMERAS.filter((name) => name !== "head") : CAMERAS;

export interface SceneToken {
  label: string; // readable: a space shows as "␣" where it stands by itself, a line break as "⏎"
  kind: "prompt" | "generated" | "special";
}

/** What one head of one layer read to choose the newest token. */
export interface SceneRow {
  layer: number;
  head: number;
  weights: Float32Array; // one for each position before the newest token; sums to about 1
  argmax: number;
}

export interface Scene {
  tokens: SceneToken[]; // all up to the shown step; the newest is the last one
  head: number; // position of the write head: that of the newest token
  layers: number; // slices of a column, over all its walls
  states: readonly number[]; // layers that keep a state, which each token rewrites, in place of a key and a value of each
  lanes: number; // walls under the tokens, one above the other: 2 in a race, else 1
  cells: Uint8Array; // cells[position * layers + layer]: a value of Cell. The newest token's are empty until the next step
  layerShare: Float32Array; // for each layer the share of the step's layer time that had passed when it was done, up to 1
  row: SceneRow | null;
  layer: number; // the selected one; -1: none
  thin: number; // width of a kept column, of a whole one: narrow numbers take less room
  cache: boolean; // whether the shown step used the cache
  progress: number; // of the step's animation, 0..1; 1 is at rest
  hovered: number | null; // position of a token
  recorded: boolean; // whether the page says so over the picture
}

/** Where a flight looks: a cell of the wall, or a token where `layer` is null, and where on the canvas that stands. */
export interface Focus {
  position: number;
  layer: number | null;
  units: number; // distances between two tokens that the height of the canvas has
  words: boolean; // whether the height grows until the cell's word is in view too
  yaw: number; // degrees; a flat picture is not turned
  pitch: number;
  x: number; // shares of the canvas
  y: number;
  free: { top: number; right: number; bottom: number }; // what the flight's pictures leave: pixels, and shares
}

export interface RendererStats {
  kind: "2d" | "3d";
  gpu: string; // the name that WebGL gives its hardware or software, or "canvas"
  calls: number; // draw calls of the last frame
  triangles: number;
  frames: number; // drawn since the renderer was made
}

export interface Renderer {
  resize(width: number, height: number, ratio: number): void; // CSS pixels and device pixels per CSS pixel
  /** Draw now. `now` in ms; returns whether it wants another frame (a camera on its way), so that nothing runs at rest. */
  draw(scene: Scene, now: number): boolean;
  camera(camera: Camera, scene: Scene): void;
  /** Fly to a cell or a token; null: back to the camera's place. */
  fly(focus: Focus | null): void;
  readonly orthographic: boolean;
  orbit(dx: number, dy: number): void; // radians
  pan(dx: number, dy: number): void; // CSS pixels
  zoom(factor: number, x: number, y: number): void; // around a point in CSS pixels
  /** Where the tile of the token at `position` is, in CSS pixels of the canvas. */
  project(position: number): { x: number; y: number };
  /** The position of the token whose column is under a point, or null. */
  pick(x: number, y: number): number | null;
  /** The layer of the cell under a point in that column; null outside the wall. */
  layerAt(x: number, y: number): number | null;
  /** The rectangle of the wall on the canvas, as far as tokens go; null where it is not drawn. */
  wall(): { left: number; top: number; right: number; bottom: number } | null;
  /** The words of the last picture, with the corners of their rectangles. */
  words(): readonly Placed[];
  /** What a legend of the last picture has. */
  legend(): readonly Entry[];
  /** The positions that the last picture shows. */
  window(): { first: number; last: number };
  /** Move the view along the text, so that a position is in its middle. */
  show(position: number): void;
  /** Wait until what was drawn is on the canvas. */
  finish(): void;
  stats(): RendererStats;
  theme(): void; // the page's colours have changed: read the CSS variables again
  dispose(): void;
}

// One picture of the 2-D renderer: what is to be painted, where its parts stand, and the brush. The painters are given
// this.

import type { Beams } from "../beams";
import type { Layout } from "../layout";
import type { Scene } from "../renderer";
import type { Fold } from "../span";
import { UPRIGHT_FROM } from "../labels";
import { type Phases, clamp } from "../motion";
import type { Palette } from "../theme";
import type { Hatch } from "./cells";

export interface View extends Fold {
  left: number; // the slot, with a fraction, at the left end of the area
  pitch: number; // CSS pixels of a slot
  share: number; // of the height, for the cache
}

/** Where the parts stand, in CSS pixels. */
export interface Frame {
  x0: number; // left end of the columns; the names of the layers stand before it
  arcTop: number;
  tileTop: number;
  tile: number; // height of a tile
  labelTop: number;
  labelRoom: number;
  cellsTop: number;
  cell: number; // height of a cell, its gap included
  cellsEnd: number;
}

export interface Picture {
  c: CanvasRenderingContext2D;
  scene: Scene;
  palette: Palette;
  hatch: Hatch;
  phases: Phases;
  beams: Beams;
  view: View;
  frame: Frame;
  width: number; // CSS pixels
  height: number;
  ratio: number;
  first: number; // positions in view
  last: number;
  wide(position: number): number; // of a column
  hub: { x: number; y: number }; // of the write head
  centre(position: number): number; // of a column
  snap(value: number): number; // to a device pixel
  measure(text: string): number; // in the brush's font
  layout: Layout; // of the words
}

const TOP = 10;
const ticksOf = (height: number): number => (height < 200 ? 20 : 36); // names of positions, and of the wall

export const gutterOf = (width: number): number => (width < 480 ? 30 : 40);

export function columnWidth(pitch: number): number {
  return pitch > 12 ? pitch - Math.max(2, pitch * 0.14) : pitch > 4 ? pitch - 1 : pitch;
}

export function frameOf(view: View, layers: number, width: number, height: number, ratio: number): Frame {
  const tile = clamp(view.pitch * 0.62, 8, 24);
  const labelRoom = view.pitch >= UPRIGHT_FROM ? 26 : height < 460 ? 52 : 62;
  const free = Math.max(0, height - TOP - ticksOf(height) - tile - labelRoom);
  const room = (free * view.share) / layers;
  const cell = view.share < 0.02 ? 0 : clamp(Math.floor(room * ratio) / ratio, 1, 56);
  const cellsEnd = height - ticksOf(height);
  const cellsTop = cellsEnd - cell * layers;
  const tileTop = Math.round((cellsTop - labelRoom - tile) * ratio) / ratio;
  const labelTop = tileTop + tile;
  return { x0: gutterOf(width), arcTop: TOP, tileTop, tile, labelTop, labelRoom, cellsTop, cell, cellsEnd };
}

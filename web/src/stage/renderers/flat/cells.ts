// The cache as a grid of positions by layers: solid where it is kept, hatched and hollow where it was computed for this
// step only, an outline where there is nothing yet.

import { groupOf } from "../labels";
import { Cell } from "../renderer";
import { clamp } from "../motion";
import { type Palette, type Rgb, css, mix } from "../theme";
import type { Picture } from "./picture";

const HALVES_FROM = 9; // CSS pixels of a column whose cells show both halves, the key and the value

/** The ground of the cache, and the band of the hovered column. */
export function paintPanel(p: Picture): void {
  const { c, palette, scene, frame, width, ratio, snap } = p;
  c.fillStyle = css(palette.ground);
  if (frame.cell > 0)
    c.fillRect(frame.x0 - 2, frame.cellsTop - 3, width - frame.x0 + 2, frame.cellsEnd - frame.cellsTop + 6);
  c.fillStyle = css(palette.line);
  c.fillRect(0, snap(frame.labelTop + 1.5), width, 1 / ratio);
  if (scene.hovered !== null && scene.hovered < scene.tokens.length) {
    const x = p.centre(scene.hovered);
    c.fillStyle = css(palette.ink, palette.dark ? 0.1 : 0.08);
    const half = Math.max(p.wide(scene.hovered), 2) / 2 + 1;
    c.fillRect(x - half, frame.tileTop - 6, 2 * half, frame.cellsEnd + 3 - frame.tileTop + 6);
  }
}

export function paintCells(p: Picture): void {
  const { c, palette, scene, frame, first, last, width, snap } = p;
  const { layers, cells } = scene;
  if (last < first || frame.cell === 0) return;
  const missing: [position: number, layer: number][] = [];
  for (let position = first; position <= last; position++) {
    // Cells of a column that are alike are painted as one; the gaps come over them, below.
    for (let from = 0; from < layers;) {
      const cell = cells[position * layers + from] ?? Cell.empty;
      let to = from + 1;
      while (to < layers && (cells[position * layers + to] ?? Cell.empty) === cell) to++;
      const done = paintAlike(p, position, cell, from, to);
      for (let layer = Math.ceil(done); layer < to; layer++) missing.push([position, layer]);
      from = to;
    }
  }
  const x0 = Math.max(frame.x0, p.centre(first) - p.wide(first) / 2 - 1);
  const x1 = Math.min(width, p.centre(last) + p.wide(last) / 2 + 1);
  if (frame.cell >= 3) {
    c.fillStyle = css(palette.ground);
    const gap = frame.cell >= 7 ? Math.max(1, snap(frame.cell * 0.14)) : 1 / p.ratio;
    const group = groupOf(frame.cell);
    for (let layer = 1; layer < layers; layer++) {
      const wide = group > 1 && (layer % (layers / scene.lanes)) % group === 0 ? 2 : gap;
      c.fillRect(x0, snap(frame.cellsTop + layer * frame.cell) - wide / 2, x1 - x0, wide);
    }
  }
  paintMissing(p, missing);
  if (scene.hovered !== null && scene.hovered >= first && scene.hovered <= last) {
    c.fillStyle = css(palette.ink, 0.16);
    const wide = p.wide(scene.hovered);
    c.fillRect(p.centre(scene.hovered) - wide / 2, frame.cellsTop, wide, frame.cellsEnd - frame.cellsTop);
  }
  // The selected layer: its cells are what the beams read.
  if (scene.layer >= 0 && scene.layer < layers) {
    const y = frame.cellsTop + scene.layer * frame.cell;
    c.fillStyle = css(palette.dark ? palette.ink : palette.bg, 0.2);
    c.fillRect(x0, y, x1 - x0, frame.cell);
    c.strokeStyle = css(palette.ink, 0.9);
    c.lineWidth = 1.25;
    c.strokeRect(x0 - 1, y - 0.6, x1 - x0 + 2, frame.cell + 1.2);
  }
}

/** The layers from..to of one column, all in one state. What is being computed is there down to the layer that is done,
 * which is returned. */
function paintAlike(p: Picture, position: number, cell: number, from: number, to: number): number {
  const { c, palette, scene, frame, phases, hatch, snap, ratio } = p;
  const solid = cell !== Cell.empty && cell !== Cell.recomputed && (cell !== Cell.fresh || scene.cache);
  const half = (p.wide(position) / 2) * (solid ? scene.thin : 1);
  const x = snap(p.centre(position) - half);
  const w = Math.max(1 / ratio, snap(p.centre(position) + half) - x);
  const fine = w > 3; // wide enough for outlines and hatching
  const line = frame.cell > 3 && w > 4 ? 1 : 1 / ratio;
  const grows = cell === Cell.fresh || cell === Cell.recomputed;
  const falls = (cell === Cell.recomputed || cell === Cell.left) && phases.fallen < 1; // thrown away, to be computed again
  const end =
    cell === Cell.empty || (cell === Cell.left && !falls)
      ? from
      : falls
        ? to
        : grows
          ? clamp(phases.filled, from, to)
          : to;
  const drop = falls ? (frame.cellsEnd - frame.cellsTop) * phases.fallen ** 2 : 0;
  const y0 = frame.cellsTop + from * frame.cell + drop;
  const y1 = Math.max(y0, Math.min(frame.cellsEnd, frame.cellsTop + end * frame.cell + drop));
  const role = cell === Cell.recomputed ? palette.recomputed : cell === Cell.fresh ? palette.fresh : palette.kept;
  if (y1 > y0) {
    // Scratch was computed, read and thrown away: hollow and hatched, so that it cannot be taken for memory.
    const scratch = cell === Cell.recomputed || (cell === Cell.fresh && !scene.cache);
    c.fillStyle = css(scratch && fine ? mix(palette.ground, role, 0.18) : role);
    c.fillRect(x, y0, w, y1 - y0);
    if (scratch && fine) {
      c.fillStyle = cell === Cell.fresh ? hatch.fresh : hatch.recomputed;
      c.fillRect(x, y0, w, y1 - y0);
      c.fillStyle = css(role, (1 - clamp(scene.progress, 0, 1)) * 0.75); // the flash of the work
      c.fillRect(x, y0, w, y1 - y0);
      c.strokeStyle = css(role);
      c.lineWidth = line * 1.25;
      c.strokeRect(x + line / 2, y0 + line / 2, w - line, y1 - y0 - line);
    }
    if (w >= HALVES_FROM) {
      c.fillStyle = css(palette.ground, 0.24); // the right half is the value
      c.fillRect(x + w / 2, y0, w / 2, y1 - y0);
      c.fillStyle = css(palette.ground, 0.8);
      c.fillRect(snap(x + w / 2) - 0.5, y0, 1, y1 - y0);
    }
    if (cell === Cell.shared && fine) {
      c.fillStyle = hatch.shared;
      c.fillRect(x, y0, w, y1 - y0);
    }
  }
  if (end > from && end < to) {
    c.fillStyle = css(palette.ink); // where the work stands
    c.fillRect(x, y1 - 1, w, 2);
  }
  return end;
}

/** Cells that hold nothing yet: outlines, where there is room for lines. */
function paintMissing(p: Picture, cells: readonly (readonly [number, number])[]): void {
  const { c, palette, frame, snap } = p;
  const gap = frame.cell >= 7 ? 1 : 0;
  c.strokeStyle = css(palette.outline, 0.75);
  c.lineWidth = 1;
  c.beginPath();
  for (const [position, layer] of cells) {
    const x = snap(p.centre(position) - p.wide(position) / 2);
    const w = snap(p.centre(position) + p.wide(position) / 2) - x;
    const y = snap(frame.cellsTop + layer * frame.cell);
    if (w > 3 && frame.cell >= 3) c.rect(x + 0.5, y + gap + 0.5, w - 1, frame.cell - 1 - gap);
  }
  c.stroke();
}

export interface Hatch {
  recomputed: CanvasPattern | string;
  fresh: CanvasPattern | string;
  shared: CanvasPattern | string;
}

/** The diagonal hatching of what was computed for nothing but this step, and the dots of what is shared. */
export function hatchOf(palette: Palette, ratio: number): Hatch {
  const pattern = (colour: Rgb, draw: (c: CanvasRenderingContext2D, side: number) => void): CanvasPattern | string => {
    const side = Math.round(7 * ratio);
    const tile = Object.assign(document.createElement("canvas"), { width: side, height: side });
    const c = tile.getContext("2d");
    if (!c) return css(colour);
    c.strokeStyle = c.fillStyle = css(colour);
    draw(c, side);
    const filled = c.createPattern(tile, "repeat");
    filled?.setTransform(new DOMMatrix().scale(1 / ratio));
    return filled ?? css(colour);
  };
  return {
    recomputed: pattern(palette.recomputed, stripes),
    fresh: pattern(palette.fresh, stripes),
    shared: pattern(palette.dark ? palette.ink : palette.bg, dots),
  };
}

function stripes(c: CanvasRenderingContext2D, side: number): void {
  c.lineWidth = side * 0.3;
  c.beginPath();
  for (const shift of [-side, 0, side]) {
    c.moveTo(shift - 1, side + 1);
    c.lineTo(shift + side + 1, -1);
  }
  c.stroke();
}

function dots(c: CanvasRenderingContext2D, side: number): void {
  c.beginPath();
  c.arc(side / 2, side / 2, side * 0.2, 0, 2 * Math.PI);
  c.fill();
}

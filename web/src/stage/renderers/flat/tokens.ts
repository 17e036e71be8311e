// The row of tokens with their labels, and the names of layers and positions at the edges.

import {
  allNamed,
  NEXT,
  NEXT_FROM,
  SANS,
  UPRIGHT_FROM,
  fontSize,
  freshColumn,
  labelOf,
  layerNames,
  lineGap,
  nextAt,
  nextIsEmpty,
  numberedTokens,
  partsOf,
  roomFor,
  shorten,
  sliceTicks,
  tiltOfPart,
  wallNames,
} from "../labels";
import { numbered } from "../../../ui/format";
import { easeOut } from "../motion";
import { type Rgb, css, mix } from "../theme";
import { positionIn } from "../span";
import type { Picture } from "./picture";

export function paintTiles(p: Picture): void {
  const { c, palette, scene, view, frame, first, last, phases, beams, width, ratio, snap } = p;
  for (let position = first; position <= last; position++) {
    const generated = scene.tokens[position]?.kind === "generated";
    const role: Rgb = generated ? palette.generated : palette.prompt;
    const wide = p.wide(position);
    const x = snap(p.centre(position) - wide / 2);
    const w = Math.max(1 / ratio, snap(p.centre(position) + wide / 2) - x);
    let y = frame.tileTop;
    if (position === scene.head && phases.strike < 1) {
      c.strokeStyle = css(palette.outline);
      c.lineWidth = 1;
      c.strokeRect(x + 0.5, y + 0.5, w - 1, frame.tile - 1);
      if (phases.strike === 0) continue;
      y -= (1 - easeOut(phases.strike)) * 14;
    }
    c.fillStyle = css(role);
    const side = Math.min(w, frame.tile);
    const inset = generated || side < 11 ? 0 : side < 15 ? 2 : 3;
    c.fillRect(x + inset, y + inset, w - 2 * inset, frame.tile - 2 * inset);
    if (inset > 0 || (!generated && side >= 7)) {
      c.strokeStyle = css(inset > 0 ? role : mix(role, palette.ink, 0.6));
      c.lineWidth = 1;
      c.strokeRect(x + 0.5, y + 0.5, w - 1, frame.tile - 1);
    }
    if (position === beams.argmax && phases.beams >= 1 && scene.cache) {
      c.strokeStyle = css(palette.beam);
      c.lineWidth = 2;
      c.strokeRect(x - 1.5, y - 1.5, w + 3, frame.tile + 3);
    }
  }
  // Slots that are still free, as paper to come.
  const slots = Math.ceil(positionIn(view, view.left + (width - frame.x0) / view.pitch));
  c.fillStyle = css(palette.line);
  for (let position = scene.tokens.length; position < slots; position++)
    c.fillRect(snap(p.centre(position)) - 1, frame.tileTop + frame.tile / 2 - 1, 2, 2);
}

/** Labels under the tiles. `important`: those of the head and of what was read most; then all others. */
export function placeLabels(p: Picture, important: boolean): void {
  const parts = partsOf(p.first, p.last, p.view.from);
  for (const [first, last] of parts) placeLabelsOf(p, important, first, last, parts.length);
}

/** Of the positions first..last, which are equally far apart. */
function placeLabelsOf(p: Picture, important: boolean, first: number, last: number, parts: number): void {
  const { c, palette, scene, view, frame, phases, beams, measure, layout } = p;
  const pitch = last < view.from ? view.pitch * view.scale : view.pitch;
  const size = fontSize(pitch);
  const upright = pitch >= UPRIGHT_FROM;
  const tilt = tiltOfPart(pitch, parts);
  const rise = upright ? 1 : Math.abs(Math.sin(tilt));
  const across = (a: number, b: number) => Math.abs(p.centre(a) - p.centre(b)) * rise;
  const wanted = [scene.head, scene.hovered, beams.argmax];
  const positions = roomFor(first, last, wanted, upright ? 1 : lineGap(size) - 0.01, across);
  const room = upright ? pitch - 6 : (frame.labelRoom - 12) / rise;
  for (const position of positions) {
    const matters = position === scene.head || position === beams.argmax;
    if (matters !== important || position === scene.hovered) continue;
    if (!matters && !allNamed(pitch, parts, last < view.from)) continue;
    const token = scene.tokens[position];
    const isHead = position === scene.head;
    const x = p.centre(position);
    if (x < 12) continue;
    c.font = fontOf(size, isHead);
    layout.add({
      text: shorten(isHead && phases.strike <= 0 ? "?" : labelOf(token), room, measure),
      x: upright ? x : x + size * 0.25,
      y: frame.labelTop + (upright ? 14 : 8),
      size,
      bold: isHead,
      angle: tilt,
      alignX: upright ? 0.5 : 1,
      colour: isHead ? palette.accent : token?.kind === "generated" ? palette.ink : palette.dim,
    });
  }
}

/** The names of the layers, left of the wall. */
export function placeLayers({ palette, scene, frame, layout }: Picture): void {
  if (frame.cell === 0) return;
  for (const layer of sliceTicks(scene, frame.cell)) {
    const selected = layer === scene.layer;
    const look = { size: 10.5, bold: selected, alignX: 1, colour: selected ? palette.ink : palette.dim };
    const y = frame.cellsTop + (layer + 0.5) * frame.cell;
    layerNames(scene, layer).some((text) => layout.add({ text, x: frame.x0 - 8, y, ...look }));
  }
}

/** What the wall is, under it, and which of its columns is new. */
export function placeWall(p: Picture): void {
  const { palette, scene, view, frame, phases, first, layout } = p;
  if (frame.cell === 0) return;
  const y = frame.cellsEnd + 26;
  const write = (names: readonly string[], x: number, colour: Rgb) =>
    names.some((text) => layout.add({ text, x: Math.max(frame.x0, x - 6), y, size: 13, alignX: 0, colour }));
  const fresh = phases.filled > 0 ? freshColumn(scene) : null;
  if (fresh) write(fresh.names, p.centre(fresh.position), palette.fresh);
  write(wallNames(scene), p.centre(first), scene.cache ? palette.kept : palette.recomputed);
  if (!nextIsEmpty(scene)) return;
  const upright = view.pitch < NEXT_FROM;
  layout.add({
    text: NEXT(),
    x: p.centre(scene.head),
    y: frame.cellsTop + nextAt(scene) * (frame.cellsEnd - frame.cellsTop),
    size: 11,
    angle: upright ? -Math.PI / 2 : 0,
    colour: palette.dim,
  });
}

/** The tokens' numbers, under the wall. */
export function placePositions(p: Picture): void {
  const { palette, view, frame, first, last, width, layout } = p;
  for (const position of numberedTokens(first, last, view.pitch)) {
    if (position + 0.5 < view.from && position > 0) continue; // between the first and the newest there is no room
    const x = p.centre(position);
    if (x >= frame.x0 && x < width - 8)
      layout.add({ text: numbered(position), x, y: frame.cellsEnd + 11, size: 10.5, colour: palette.dim });
  }
}

/** Paints the words that found room. */
export function paintWords({ c, palette, measure, layout }: Picture): void {
  c.textBaseline = "middle";
  for (const word of layout.words) {
    c.font = fontOf(word.size, word.bold ?? false);
    const align = word.alignX ?? 0.5;
    c.textAlign = align === 0 ? "left" : align === 1 ? "right" : "center";
    c.save();
    c.globalAlpha = word.alpha ?? 1;
    c.translate(word.x, word.y);
    c.rotate(word.angle ?? 0);
    if (word.plate) {
      const w = measure(word.text) + 8;
      c.fillStyle = css(palette.panel, word.plate);
      c.strokeStyle = css(palette.line);
      c.lineWidth = 1;
      c.beginPath();
      c.roundRect(-align * (w - 8) - 4, -word.size * 0.7, w, word.size * 1.4, 3);
      c.fill();
      c.stroke();
    }
    c.fillStyle = css(word.colour);
    c.fillText(word.text, 0, 0.5);
    c.restore();
  }
}

export const fontOf = (size: number, bold: boolean): string => `${bold ? 600 : 400} ${size}px ${SANS}`;

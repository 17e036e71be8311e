// The row of tokens with their labels, and the names of layers and positions at the edges.

import {
  LABELS_FROM,
  SANS,
  UPRIGHT_FROM,
  fontSize,
  labelOf,
  layerTicks,
  positionStep,
  roomFor,
  shorten,
  tiltOf,
} from "../labels";
import { easeOut } from "../motion";
import { type Rgb, css, mix } from "../theme";
import type { Picture } from "./picture";

export function paintTiles(p: Picture): void {
  const { c, palette, scene, view, frame, first, last, phases, beams, width, ratio, snap } = p;
  const wide = Math.max(1 / ratio, p.wide);
  for (let position = first; position <= last; position++) {
    const generated = scene.tokens[position]?.kind === "generated";
    const role: Rgb = generated ? palette.generated : palette.prompt;
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
    if (position === beams.argmax && phases.beams >= 1) {
      c.strokeStyle = css(palette.beam);
      c.lineWidth = 2;
      c.strokeRect(x - 1.5, y - 1.5, w + 3, frame.tile + 3);
    }
  }
  // Slots that are still free, as paper to come.
  const slots = Math.ceil(view.left + (width - frame.x0) / view.pitch);
  c.fillStyle = css(palette.line);
  for (let position = scene.tokens.length; position < slots; position++)
    c.fillRect(snap(p.centre(position)) - 1, frame.tileTop + frame.tile / 2 - 1, 2, 2);
}

export function paintLabels(p: Picture): void {
  const { c, palette, scene, view, frame, first, last, phases, beams, measure } = p;
  const size = fontSize(view.pitch);
  const upright = view.pitch >= UPRIGHT_FROM;
  const tilt = tiltOf(view.pitch);
  const rise = upright ? 1 : Math.abs(Math.sin(tilt));
  const across = (a: number, b: number) => Math.abs(a - b) * view.pitch * rise;
  const positions = roomFor(first, last, [scene.head, scene.hovered, beams.argmax], upright ? 1 : size * 1.02, across);
  const room = upright ? view.pitch - 6 : (frame.labelRoom - 12) / rise;
  c.textBaseline = "middle";
  for (const position of positions) {
    if (position === scene.hovered || (view.pitch < LABELS_FROM && position !== scene.head)) continue;
    const token = scene.tokens[position];
    const isHead = position === scene.head;
    const x = p.centre(position);
    if (x < 12) continue;
    c.font = `${isHead ? 600 : 400} ${size}px ${SANS}`;
    c.fillStyle = css(isHead ? palette.accent : token?.kind === "generated" ? palette.ink : palette.dim);
    c.globalAlpha = isHead ? phases.strike : 1;
    const text = shorten(labelOf(token), room, measure);
    if (upright) {
      c.textAlign = "center";
      c.fillText(text, x, frame.labelTop + 14);
    } else {
      c.save();
      c.translate(x + size * 0.25, frame.labelTop + 8);
      c.rotate(tilt);
      c.textAlign = "right";
      c.fillText(text, 0, 0);
      c.restore();
    }
    c.globalAlpha = 1;
  }
}

export function paintAxes(p: Picture): void {
  const { c, palette, scene, view, frame, first, last, width } = p;
  c.textBaseline = "middle";
  c.textAlign = "right";
  for (const layer of layerTicks(scene.layers, frame.cell, scene.layer)) {
    const selected = layer === scene.layer;
    c.font = `${selected ? 600 : 400} 10.5px ${SANS}`;
    c.fillStyle = css(selected ? palette.ink : palette.dim);
    c.fillText(`L${layer}`, frame.x0 - 8, frame.cellsTop + (layer + 0.5) * frame.cell);
  }
  c.font = `10.5px ${SANS}`;
  c.fillStyle = css(palette.dim);
  c.textAlign = "center";
  const step = positionStep(view.pitch);
  for (let position = Math.ceil(first / step) * step; position <= last; position += step) {
    const x = p.centre(position);
    if (x >= frame.x0 && x < width - 8) c.fillText(String(position), x, frame.cellsEnd + 11);
  }
}

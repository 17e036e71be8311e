// What is written in the scene, and where on the screen: the tokens' labels, the names of layers and positions, the
// strongest weight where its beam lands, and the hovered token in full. Places are projected here, so that words are as
// sharp as the screen is and never run into each other, from whatever camera.

import { Vector3 } from "three";
import { type Beams, percent } from "../beams";
import type { Scene } from "../renderer";
import { LABELS_FROM, fontSize, labelOf, layerTicks, positionStep, roomFor, shorten, tiltOf } from "../labels";
import { type Phases, clamp } from "../motion";
import { type Palette, mix } from "../theme";
import { arcPoint } from "./arcs";
import { EDGE, HUB, type Pose, TILE, onBoard } from "./pose";
import type { Text, Word } from "./text";

export interface Spot {
  x: number;
  y: number;
  before: boolean; // whether it is before the camera
}

export interface Sight {
  pose: Pose;
  width: number;
  height: number;
  first: number; // positions in view
  last: number;
  spot(place: Vector3): Spot;
}

export function wordsOf(
  scene: Scene,
  sight: Sight,
  beams: Beams,
  phases: Phases,
  palette: Palette,
  text: Text,
): Word[] {
  const { pose, width, height, first, last } = sight;
  const tokens = scene.tokens.length;
  if (tokens === 0) return [];
  const words: Word[] = [];
  const place = new Vector3();
  const on = (position: number, s: number, n = 0) => sight.spot(onBoard(place, position, s, n, pose.slope));
  const inside = (spot: Spot, margin = 12) =>
    spot.before && spot.x > margin && spot.x < width - margin && spot.y > 4 && spot.y < height - 4;

  /** Where the beam to a position leaves the canvas. */
  const leaving = (position: number): Spot => {
    let out = sight.spot(arcPoint(place, scene.head, position, 0, pose));
    for (let t = 0.02; t <= 1; t += 0.02) {
      const next = sight.spot(arcPoint(place, scene.head, position, t, pose));
      if (!next.before || next.x < 0 || next.x > width || next.y < 0) break;
      out = next;
    }
    return out;
  };

  // Labels of the tokens: tilted, the end at its tile; upright where the columns are wide.
  const anchors = new Map<number, Spot>();
  const anchor = (position: number): Spot => {
    let spot = anchors.get(position);
    if (!spot) anchors.set(position, (spot = on(position, EDGE + 0.1)));
    return spot;
  };
  const middle = clamp(scene.head, first, last);
  const [older, newer] = [anchor(Math.max(middle - 1, 0)), anchor(Math.max(middle - 1, 0) + 1)];
  const pitch = distance(older, newer);
  const size = fontSize(pitch);
  const far = pitch < LABELS_FROM;
  // A row that runs into the depth is read like a list: level labels that end at their tiles.
  const list = Math.abs(newer.y - older.y) > 0.4 * Math.abs(newer.x - older.x);
  const tilt = list ? 0 : tiltOf(pitch);
  const upright = tilt === 0 && !list;
  const across = (a: number, b: number): number => {
    const [p, q] = [anchor(a), anchor(b)];
    if (upright) return Math.abs(p.x - q.x);
    return Math.abs((p.x - q.x) * Math.sin(tilt) - (p.y - q.y) * Math.cos(tilt));
  };
  const room = (position: number): number => {
    if (list) return 150;
    if (upright) return pitch - 6;
    const strip = distance(anchor(position), on(position, EDGE + pose.strip, 0.25));
    return Math.max(24, (strip - size * 0.6) / Math.abs(Math.sin(tilt)));
  };
  const gap = upright ? 30 : size * (list ? 1.15 : 1.02);
  for (const position of roomFor(first, last, [scene.head, scene.hovered, beams.argmax], gap, across)) {
    if (position === scene.hovered || (far && position !== scene.head)) continue;
    const spot = anchor(position);
    if (!inside(spot, 0)) continue;
    const token = scene.tokens[position];
    const isHead = position === scene.head;
    const measure = (part: string) => text.width(part, size, isHead);
    words.push({
      text: shorten(labelOf(token), room(position), measure),
      x: upright ? Math.round(spot.x) : Math.round(spot.x * 2) / 2 + (list ? -size : size * 0.3),
      y: Math.round(spot.y + (upright ? size * 0.7 : list ? 0 : size * 0.35)),
      size,
      bold: isHead,
      angle: tilt,
      alignX: upright ? 0.5 : 1,
      colour: isHead ? palette.accent : token?.kind === "generated" ? palette.ink : palette.dim,
      alpha: isHead ? phases.strike : 1,
    });
  }

  // Layers, at the right end of the cache, where the head is; positions under the columns.
  const wall = EDGE + pose.strip;
  const high = distance(on(scene.head, wall), on(scene.head, wall + pose.wall)) / Math.max(1, scene.layers);
  for (const layer of layerTicks(scene.layers, high, scene.layer)) {
    const spot = on(scene.head + 0.62, wall + ((layer + 0.5) / scene.layers) * pose.wall);
    if (!inside(spot, 2)) continue;
    const selected = layer === scene.layer;
    const colour = selected ? palette.ink : palette.dim;
    words.push({ text: `L${layer}`, x: spot.x + 3, y: spot.y, size: 10.5, bold: selected, alignX: 0, colour });
  }
  const step = positionStep(pitch);
  for (let position = Math.ceil(first / step) * step; position <= last; position += step) {
    const spot = on(position, wall + pose.wall + 0.1);
    if (inside(spot)) words.push({ text: String(position), x: spot.x, y: spot.y + 9, size: 10.5, colour: palette.dim });
  }

  // What the beams say in words.
  if (scene.row && phases.beams > 0) {
    const hub = sight.spot(place.set(scene.head + 0.55, HUB.y, HUB.z));
    const note = { x: hub.x + 6, alignX: 0, size: 11, colour: palette.dim, alpha: phases.beams };
    if (inside(hub, 20)) {
      words.push({ ...note, text: `L${scene.row.layer} H${scene.row.head}`, y: hub.y - 6, bold: true });
      const rest = `+ ${percent(beams.rest)} on ${beams.restCount} more`;
      if (beams.rest >= 0.005 && hub.x + text.width(rest, 11) < width - 8)
        words.push({ ...note, text: rest, y: hub.y + 9 });
    }
    if (beams.argmax !== null && phases.beams >= 1) {
      const spot = on(beams.argmax, -TILE.long / 2, TILE.high);
      const visible = spot.before && spot.x > 8 && spot.x < width - 4;
      const way = visible ? spot : leaving(beams.argmax);
      const label = shorten(labelOf(scene.tokens[beams.argmax]), 90, (part) => text.width(part, 11, true));
      words.push({
        text: visible ? percent(beams.strongest) : `◂ ${percent(beams.strongest)} on ${beams.argmax} ${label}`,
        x: visible ? Math.max(spot.x - 7, 44) : clamp(way.x + 4, 8, width - 160),
        y: visible ? spot.y - 11 : clamp(way.y + 18, 16, height - 16),
        size: 11,
        bold: true,
        alignX: visible ? 1 : 0,
        colour: palette.dark ? mix(palette.beam, palette.ink, 0.3) : palette.ink,
        plate: 0.85,
      });
    }
  }

  if (scene.hovered !== null && scene.hovered < tokens) {
    const spot = on(scene.hovered, EDGE + 0.2);
    const measure = (part: string) => text.width(part, 12.5, true);
    const whole = `${shorten(labelOf(scene.tokens[scene.hovered]), width - 80, measure)}  ·  ${scene.hovered}`;
    const half = measure(whole) / 2 + 8;
    if (spot.before)
      words.push({
        text: whole,
        x: clamp(spot.x, half, Math.max(half, width - half)),
        y: clamp(spot.y + 12, 12, height - 12),
        size: 12.5,
        bold: true,
        colour: palette.ink,
        plate: 0.96,
      });
  }
  return words;
}

const distance = (a: Spot, b: Spot): number => Math.hypot(a.x - b.x, a.y - b.y);

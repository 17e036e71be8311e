// The words in the scene, and where on the screen: the tokens' labels, the names of layers and positions, the
// strongest weight where its beam lands, and the hovered token in full. Places are projected here, so that words face the
// viewer and are as sharp as the screen is, from whatever camera; the layout keeps them apart.

import { translated } from "../../../language/language";
import { numbered, percent } from "../../../ui/format";
import { type Beams, readerOf } from "../beams";
import type { Focus, Scene } from "../renderer";
import {
  allNamed,
  NEXT,
  NEXT_FROM,
  fontSize,
  freshColumn,
  hoveredName,
  labelOf,
  layerNames,
  lineGap,
  nextAt,
  nextIsEmpty,
  numberedTokens,
  partsOf,
  readingNames,
  roomFor,
  shorten,
  sliceTicks,
  strongestNames,
  tiltOfPart,
  wallNames,
} from "../labels";
import { keepStamp, Layout, type Word } from "../layout";
import { type Phases, clamp } from "../motion";
import { type Palette, mix } from "../theme";
import { arcPoint } from "./arcs";
import { EDGE, HUB, type Pose, TILE, onStrip, onWall } from "./pose";
import type { Text } from "./text";
import { Vector3 } from "./vector";

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
  layerHigh: number; // of one layer at the end of the wall
  spot(place: Vector3): Spot;
  at(position: number): number; // where it stands
  free: Focus["free"]; // where words may stand
}

/** What the writers below share. */
interface Page {
  scene: Scene;
  sight: Sight;
  beams: Beams;
  phases: Phases;
  palette: Palette;
  text: Text;
  layout: Layout;
}

const place = new Vector3();

/** The words of a picture, the most important first. */
export function wordsOf(
  scene: Scene,
  sight: Sight,
  beams: Beams,
  phases: Phases,
  palette: Palette,
  text: Text,
): Layout {
  const wide = (word: Word) => text.width(word.text, word.size, word.bold);
  const measure = (word: Word) => (text.fits(wide(word)) ? wide(word) : Infinity); // a shorter name is placed instead
  const { top, right, bottom } = sight.free;
  const layout = new Layout(measure, right * sight.width, bottom * sight.height, top);
  const page: Page = { scene, sight, beams, phases, palette, text, layout };
  if (scene.tokens.length === 0) return layout;
  if (scene.recorded) keepStamp(layout, sight.width, sight.height);
  hovered(page);
  const tokens = labels(page);
  tokens(true);
  tokens(false);
  reading(page);
  layers(page);
  wall(page);
  positions(page);
  return layout;
}

const inside = ({ width, height }: Sight, spot: Spot, margin: number): boolean =>
  spot.before && spot.x > margin && spot.x < width - margin && spot.y > 4 && spot.y < height - 4;

const distance = (a: Spot, b: Spot): number => Math.hypot(a.x - b.x, a.y - b.y);

/** Pixels from one token to the next, at the head or what is in view of it. */
function pitchOf({ scene, sight }: Page): number {
  const middle = Math.max(clamp(scene.head, sight.first, sight.last) - 1, 0);
  const at = (position: number) => sight.spot(onStrip(place, sight.at(position), EDGE, sight.pose.slope));
  return distance(at(middle), at(middle + 1));
}

/** Labels of the tokens: tilted, the end at its tile; upright where the columns are wide. Returns what places them: first
 * those that matter (the head, what was read most), then the others. */
function labels(page: Page): (important: boolean) => void {
  const { sight } = page;
  const anchors = new Map<number, Spot>();
  const anchor = (position: number): Spot => {
    let spot = anchors.get(position);
    if (!spot) anchors.set(position, (spot = sight.spot(onStrip(place, sight.at(position), EDGE, sight.pose.slope))));
    return spot;
  };
  const parts = partsOf(sight.first, sight.last, sight.pose.from);
  const each = parts.map(([first, last]) => labelsOf(page, anchor, first, last, parts.length));
  return (important) => each.forEach((part) => part(important));
}

/** Of the positions first..last, which are about as far apart. */
function labelsOf(
  page: Page,
  anchor: (position: number) => Spot,
  first: number,
  last: number,
  parts: number,
): (important: boolean) => void {
  const { scene, sight, beams, phases, palette, text, layout } = page;
  const { pose } = sight;
  const pitchAt = (position: number): number => distance(anchor(position), anchor(position + 1));
  const middle = Math.max(clamp(scene.head, first, last) - 1, 0);
  const [older, newer] = [anchor(middle), anchor(middle + 1)];
  const pitch = last < pose.from ? Math.min(pitchAt(first), pitchAt(Math.max(first, last - 1))) : pitchAt(middle);
  const size = fontSize(pitch);
  // A row that runs into the depth is read like a list: level labels that end at their tiles.
  const list = Math.abs(newer.y - older.y) > 0.4 * Math.abs(newer.x - older.x);
  const tilt = list ? 0 : tiltOfPart(pitch, parts);
  const upright = tilt === 0 && !list;
  const across = (a: number, b: number): number => {
    const [p, q] = [anchor(a), anchor(b)];
    if (upright) return Math.abs(p.x - q.x);
    return Math.abs((p.x - q.x) * Math.sin(tilt) - (p.y - q.y) * Math.cos(tilt));
  };
  const room = (position: number): number => {
    if (list) return 150;
    if (upright) return pitch - 6;
    const strip = distance(
      anchor(position),
      sight.spot(onStrip(place, sight.at(position), EDGE + pose.strip, pose.slope)),
    );
    return Math.max(24, (strip - size * 0.6) / Math.abs(Math.sin(tilt)));
  };
  const gap = upright ? 30 : list ? size * 1.2 : lineGap(size);
  const matters = [scene.head, beams.argmax];
  const chosen = roomFor(first, last, [scene.head, scene.hovered, beams.argmax], gap, across);
  return (important) => {
    for (const position of chosen) {
      if (matters.includes(position) !== important || position === scene.hovered) continue;
      if (!matters.includes(position) && !allNamed(pitch, parts, last < pose.from)) continue;
      const spot = anchor(position);
      if (!spot.before) continue;
      const token = scene.tokens[position];
      const isHead = position === scene.head;
      layout.add({
        text: shorten(isHead && phases.strike <= 0 ? "?" : labelOf(token), room(position), (part) =>
          text.width(part, size, isHead),
        ),
        x: upright ? Math.round(spot.x) : Math.round(spot.x * 2) / 2 + (list ? -size : size * 0.3),
        y: Math.round(spot.y + (upright ? size * 0.7 : list ? 0 : size * 0.35)),
        size,
        bold: isHead,
        angle: tilt,
        alignX: upright ? 0.5 : 1,
        colour: isHead ? palette.accent : token?.kind === "generated" ? palette.ink : palette.dim,
      });
    }
  };
}

/** Layers, at the right end of the wall, where the head is. */
function layers({ scene, sight, palette, layout }: Page): void {
  const { pose } = sight;
  if (pose.wall < 0.05) return;
  const at = (share: number) => sight.spot(onWall(place, sight.at(scene.head) + 0.62, share, pose));
  for (const layer of sliceTicks(scene, sight.layerHigh)) {
    const spot = at((layer + 0.5) / scene.layers);
    if (!inside(sight, spot, 2)) continue;
    const selected = layer === scene.layer;
    const colour = selected ? palette.ink : palette.dim;
    const look = { x: spot.x + 4, y: spot.y, size: 10.5, bold: selected, alignX: 0, colour };
    layerNames(scene, layer).some((text) => layout.add({ text, ...look }));
  }
}

/** The tokens' numbers, under the wall. */
function positions(page: Page): void {
  const { sight, palette, layout } = page;
  if (sight.pose.wall < 0.05) return;
  for (const position of numberedTokens(sight.first, sight.last, pitchOf(page))) {
    if (position + 0.5 < sight.pose.from && position > 0) continue; // between the first and the newest there is no room
    const spot = sight.spot(onWall(place, sight.at(position), 1, sight.pose));
    if (inside(sight, spot, 12))
      layout.add({ text: numbered(position), x: spot.x, y: spot.y + 9, size: 10.5, colour: palette.dim });
  }
}

/** What the wall is, along its foot, and which of its columns is new. */
function wall({ scene, sight, phases, palette, layout }: Page): void {
  if (sight.pose.wall < 0.05) return;
  const foot = (position: number) => sight.spot(onWall(place, sight.at(position), 1, sight.pose));
  let first = sight.first;
  while (first < sight.last && !inside(sight, foot(first), 14)) first++;
  const [from, to] = [foot(first), foot(Math.max(first + 1, sight.last))];
  const angle = Math.atan2(to.y - from.y, to.x - from.x);
  if (!from.before || Math.abs(angle) > 0.4) return; // along a row that runs into the depth nothing can be read
  const write = (names: readonly string[], spot: Spot, colour: Palette["ink"]) =>
    names.some((text) => layout.add({ text, x: spot.x - 6, y: spot.y + 26, size: 13, angle, alignX: 0, colour }));
  const fresh = phases.filled > 0 ? freshColumn(scene) : null;
  if (fresh) write(fresh.names, foot(fresh.position), palette.fresh);
  write(wallNames(scene), from, scene.cache ? palette.kept : palette.recomputed);
  if (!nextIsEmpty(scene)) return;
  const middle = sight.spot(onWall(place, sight.at(scene.head), nextAt(scene), sight.pose));
  const level = distance(foot(scene.head), foot(scene.head - 1)) >= NEXT_FROM;
  if (inside(sight, middle, 12))
    layout.add({ text: NEXT(), ...middle, size: 11, angle: level ? angle : -Math.PI / 2, colour: palette.dim });
}

/** What the beams say in words. */
function reading(page: Page): void {
  const { scene, sight, beams, phases, palette, text, layout } = page;
  const { width, height } = sight;
  if (!scene.row || phases.beams <= 0) return;
  if (beams.argmax !== null && phases.beams >= 1) {
    const spot = sight.spot(place.set(sight.at(beams.argmax), TILE.high, -TILE.long / 2));
    const visible = spot.before && spot.x > 8 && spot.x < width - 4;
    const way = visible ? spot : leaving(page, beams.argmax);
    const measure = (part: string) => text.width(part, 11, true);
    const note = {
      y: visible ? spot.y - 11 : clamp(way.y + 18, 16, height - 16),
      size: 11,
      bold: true,
      alignX: visible ? 0.5 : 0,
      colour: !scene.cache ? palette.dim : palette.dark ? mix(palette.beam, palette.ink, 0.3) : palette.ink,
      ...(scene.cache ? { plate: 0.85 } : { alpha: 0.7 }),
    };
    const x = (name: string): number => {
      const half = measure(name) / 2 + 5;
      return visible ? clamp(spot.x, half, width - half) : clamp(way.x + 4, 8, width - 160);
    };
    strongestNames(scene, beams.argmax, beams.strongest, visible, measure).some((name) =>
      layout.add({ ...note, text: name, x: x(name) }),
    );
  }
  const hub = sight.spot(place.set(sight.at(scene.head) + 0.55, HUB.y, HUB.z));
  if (!inside(sight, hub, 20)) return;
  const note = { x: hub.x + 6, alignX: 0, size: 11, colour: palette.dim, alpha: phases.beams };
  const names = readingNames(scene, scene.row, (part) => text.width(part, 11, true));
  names.some((name) => layout.add({ ...note, text: name, y: hub.y - 6, bold: true }));
  if (beams.rest >= 0.005)
    layout.add({ ...note, text: translated(`+ ${percent(beams.rest)} on ${beams.restCount} more`), y: hub.y + 9 });
}

/** Where the beam to a position leaves the canvas. */
function leaving({ scene, sight }: Page, position: number): Spot {
  const reader = scene.row ? readerOf(scene.row, scene.head) : scene.head;
  const at = (t: number) => sight.spot(arcPoint(place, sight.at(reader), sight.at(position), t, sight.pose));
  let out = at(0);
  for (let t = 0.02; t <= 1; t += 0.02) {
    const next = at(t);
    if (!next.before || next.x < 0 || next.x > sight.width || next.y < 0) break;
    out = next;
  }
  return out;
}

/** The hovered token in full. */
function hovered({ scene, sight, palette, text, layout }: Page): void {
  const { width, height } = sight;
  if (scene.hovered === null || scene.hovered >= scene.tokens.length) return;
  const spot = sight.spot(onStrip(place, sight.at(scene.hovered), EDGE + 0.1, sight.pose.slope));
  if (!spot.before) return;
  const measure = (part: string) => text.width(part, 12.5, true);
  const whole = hoveredName(scene, scene.hovered, Math.min(width - 80, 440), measure);
  const half = measure(whole) / 2 + 8;
  layout.add({
    text: whole,
    x: clamp(spot.x, half, Math.max(half, width - half)),
    y: clamp(spot.y + 12, 12, height - 12),
    size: 12.5,
    bold: true,
    colour: palette.ink,
    plate: 0.96,
  });
}

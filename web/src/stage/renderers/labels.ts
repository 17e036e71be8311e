// The labels of tokens, layers and positions, and where there is room for them. Both renderers take them from here, so
// that they name the same things. All measures are CSS pixels on the screen.

import { drawn, quote, translated, verbatim } from "../../language/language";
import { numbered, percent, plural } from "../../ui/format";
import { Cell, type Scene, type SceneRow, type SceneToken } from "./renderer";

export const SANS = 'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
export const UPRIGHT_FROM = 62; // pitch from which labels stand upright

/** Angle of a label, in radians. A tilted one rises to its tile and ends there; the narrower the pitch the steeper. */
export const tiltOf = (pitch: number): number => (pitch >= UPRIGHT_FROM ? 0 : pitch >= 20 ? -0.92 : -1.25);

export const LABELS_FROM = 7; // pitch from which more than the most important tokens are named
const OLDER_FROM = 14; // the same for the older ones, where the newer stand further apart

/** Whether all tokens of a part are named. */
export const allNamed = (pitch: number, parts: number, older: boolean): boolean =>
  pitch >= (parts > 1 && older ? OLDER_FROM : LABELS_FROM);
const [LINE, APART] = [1.06, 1.1]; // of tilted labels: a line in font sizes, and px between two; not less than a layout keeps
const SMALLEST = 9; // px

/** In a row of two parts, older and newer tokens, all labels are as steep as those that are closer together. */
export const tiltOfPart = (pitch: number, parts: number): number =>
  parts > 1 && pitch < UPRIGHT_FROM ? tiltOf(LABELS_FROM) : tiltOf(pitch);

/** Font size for a distance between tokens: so small that every token's label has room, down to a size one can read. */
export function fontSize(pitch: number): number {
  if (pitch >= UPRIGHT_FROM) return 14;
  return Math.max(SMALLEST, Math.min(13, Math.floor((pitch * Math.abs(Math.sin(tiltOf(pitch))) - APART) / LINE)));
}

/** What two labels of a size must be apart, across their lines. */
export const lineGap = (size: number): number => size * LINE + APART;

/** The positions first..last in up to two parts, older and newer ones, each of one pitch. */
export function partsOf(first: number, last: number, from: number): (readonly [number, number])[] {
  if (from <= first || from > last) return [[first, last]];
  return [
    [from, last],
    [first, from - 1],
  ];
}

/** The beginning of a text that is no wider than `room`, with an ellipsis where it was cut. */
export function shorten(text: string, room: number, width: (text: string) => number): string {
  if (width(text) <= room) return text;
  const letters = [...text];
  let low = 0;
  let high = letters.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (width(`${letters.slice(0, middle).join("")}…`) <= room) low = middle;
    else high = middle - 1;
  }
  return `${letters.slice(0, low).join("")}…`;
}

/** Which of the positions first..last get a label when neighbours must be `gap` apart; `across` says how far two are.
 * From the newest back, since that is where one looks; those of `wanted` go before their neighbours. */
export function roomFor(
  first: number,
  last: number,
  wanted: readonly (number | null)[],
  gap: number,
  across: (a: number, b: number) => number,
): number[] {
  const ahead = wanted.filter((p): p is number => p !== null && p >= first && p <= last).sort((a, b) => b - a);
  const shown: number[] = [];
  for (let position = last; position >= first; position--) {
    const before = shown.at(-1);
    while (ahead[0] !== undefined && ahead[0] > position) ahead.shift();
    const next = ahead[0];
    if (before !== undefined && across(position, before) < gap) continue;
    if (next === undefined || next === position || across(position, next) >= gap) shown.push(position);
  }
  return shown;
}

/** How many layers are drawn as one block where a layer is `height` high: lower ones would melt into stripes. */
export const groupOf = (height: number): number =>
  height >= 13 ? 1 : ([2, 5, 10, 20, 40].find((every) => every * height >= 18) ?? 80);

/** Layers that are named at an axis where a layer is `height` high: the first, the last, and whole blocks between. */
export function layerTicks(layers: number, height: number, selected: number): number[] {
  const step = groupOf(height);
  const apart = (a: number, b: number) => Math.abs(a - b) * height >= 13;
  const ticks = [...new Set([selected, 0, layers - 1])].filter((t) => t >= 0 && t < layers);
  const kept: number[] = [];
  for (const tick of ticks) if (kept.every((other) => apart(tick, other))) kept.push(tick);
  for (let tick = step; tick < layers - 1; tick += step) if (kept.every((other) => apart(tick, other))) kept.push(tick);
  return kept;
}

/** The slices that are named, the most important first: of two walls the first layer of each goes before the others. */
export function sliceTicks({ layers, lanes, layer }: Scene, height: number): number[] {
  const wall = layers / lanes;
  const ticks = layerTicks(wall, height, layer);
  if (lanes === 1) return ticks;
  const firsts = Array.from({ length: lanes }, (_, lane) => lane * wall);
  return [...firsts, ...firsts.flatMap((first) => ticks.filter((tick) => tick > 0).map((tick) => first + tick))];
}

/** Which of the positions first..last get their token's number: all, or the round numbers and the first token's. */
export function numberedTokens(first: number, last: number, pitch: number): number[] {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((every) => every * pitch >= 34) ?? 1000;
  const found = step > 2 && first === 0 ? [0] : [];
  for (let number = Math.ceil((first + 1) / step) * step; number <= last + 1; number += step) found.push(number - 1);
  return found;
}

/** The names of a slice, its layer, the longest first. With two walls the count begins again at the second. */
export function layerNames({ layers, lanes, states }: Scene, slice: number): readonly string[] {
  const layer = slice % Math.max(1, layers / lanes);
  return states.includes(layer) ? [`L${layer} ↻`, "↻"] : [`L${layer}`];
}

/** The first layer whose cells stay; the first of all if none do. */
export function rowLayer({ layers, lanes, states }: Scene): number {
  for (let layer = 0; layer < layers / lanes; layer++) if (!states.includes(layer)) return layer;
  return 0;
}

/** What the wall is, in words, the longest first. */
export const wallNames = (scene: Scene): readonly string[] => wallWords(scene).map(translated);

function wallWords({ lanes, cache, layers, states }: Scene): readonly string[] {
  if (lanes > 1)
    return [
      "upper wall: with the cache. Lower wall: without it, computed again at every step",
      "upper wall: with the cache. Lower wall: without",
      "above with the cache, below without",
    ];
  if (cache && states.length > 0)
    return [
      `KV cache in ${layers - states.length} of ${plural(layers, "layer")}; ↻ keeps one state instead, rewritten at each token`,
      "KV cache; ↻ a state, rewritten at each token",
      "↻ a rewritten state",
    ];
  return cache
    ? [
        "KV cache: each cell is one layer’s saved key (K, left half) and value (V, right half) of one token",
        "the KV cache: saved keys and values",
        "the KV cache",
      ]
    : ["no cache: every step computes all cells and throws them away", "no cache: nothing is saved", "no cache"];
}

/** The column that a step with the cache computed, and its name, the longest first; null where it computed several. */
export function freshColumn(scene: Scene): { position: number; names: readonly string[] } | null {
  const position = scene.head - 1;
  const state = (at: number) => scene.cells[at * scene.layers + rowLayer(scene)];
  if (
    scene.lanes > 1 ||
    !scene.cache ||
    position < 1 ||
    state(position) !== Cell.fresh ||
    state(position - 1) !== Cell.kept
  )
    return null;
  return { position, names: ["the only cells computed in this step", "computed now", "new"].map(translated) };
}

/** The name of the empty column: the next step fills it. */
export const NEXT = (): string => translated("next");
export const NEXT_FROM = 34; // pitch from which it is level

/** Where on the column it stands, as a share of its height: in a cell, and not between two. */
export const nextAt = ({ layers }: Scene): number => (Math.floor(layers / 2) + 0.5) / layers;

/** Whether the newest token's column is empty, and is the one that the next step fills. */
export const nextIsEmpty = (scene: Scene): boolean =>
  scene.lanes === 1 && scene.cache && scene.cells[scene.head * scene.layers + rowLayer(scene)] === Cell.empty;

const LONGEST_READER = 70; // CSS pixels

/** Which token reads, by which head: the one before the newest, which is what its step wrote. The longest name first. */
export function readingNames({ tokens }: Scene, row: SceneRow, width: (text: string) => number): readonly string[] {
  const head = `L${row.layer} H${row.head}`;
  const reader = shorten(labelOf(tokens[row.weights.length - 1]), LONGEST_READER, width);
  return [
    drawn(`“${verbatim(reader)}” reads: layer ${row.layer}, head ${row.head}`),
    drawn(`“${verbatim(reader)}” reads, ${head}`),
    head,
  ];
}

/** The strongest weight and the token it is on, the longest name first; `seen`: whether that token is in the picture. */
export function strongestNames(
  { tokens }: Scene,
  position: number,
  weight: number,
  seen: boolean,
  width: (text: string) => number,
): readonly string[] {
  const token = shorten(labelOf(tokens[position]), 90, width);
  if (!seen)
    return [drawn(`◂ ${percent(weight)} on “${verbatim(token)}”, token ${numbered(position)}`), `◂ ${percent(weight)}`];
  return [`${quote(token)} ${percent(weight)}`, percent(weight)];
}

/** The hovered token in full, with its number. */
export function hoveredName(
  { tokens }: Scene,
  position: number,
  room: number,
  width: (text: string) => number,
): string {
  return `${shorten(labelOf(tokens[position]), room, width)}  ·  ${numbered(position)}`;
}

export const labelOf = (token: SceneToken | undefined): string => token?.label || "␣";

// Where words stand on the screen, so that none covers another. Each has a rectangle, turned by its angle; a word is
// placed only if its rectangle meets no other's. Both renderers place theirs in order of importance: what finds no room
// is left out. All measures are CSS pixels of the canvas.

import type { Rgb } from "./theme";

export interface Word {
  text: string;
  x: number; // of the point that `alignX`, `alignY` of the word is laid on
  y: number;
  size: number; // of the font
  bold?: boolean;
  angle?: number; // radians
  alignX?: number; // 0 the word's beginning, 1 its end; 0.5 where nothing is said
  alignY?: number;
  colour: Rgb;
  alpha?: number;
  plate?: number; // opacity of the ground behind it
}

export interface Point {
  x: number;
  y: number;
}

/** A placed word: its text and the corners of its rectangle, clockwise from the beginning of its top. */
export interface Placed {
  text: string;
  corners: readonly [Point, Point, Point, Point];
}

/** The stamp "Recorded" over the canvas: at its right, above, or below where that is narrow; as overlay.css has it. */
const STAMP = { wide: 146, high: 38, narrow: 700 };
export function keepStamp(layout: Layout, width: number, height: number): void {
  const top = width < STAMP.narrow ? height - STAMP.high : 0;
  layout.keep(width - STAMP.wide, top, width, top + STAMP.high);
}

const LINE = 1.06; // height of a word's rectangle, in font sizes
const APART = 1; // between two rectangles

export class Layout {
  readonly words: Word[] = [];
  readonly placed: Placed[] = [];
  private readonly kept: { corners: Placed["corners"]; bounds: Bounds }[] = []; // of words, and of what is left free

  constructor(
    private readonly measure: (word: Word) => number,
    private readonly width: number,
    private readonly height: number,
    private readonly top = 0,
  ) {}

  /** Leaves a rectangle free: something of the page stands over it. */
  keep(left: number, top: number, right: number, bottom: number): void {
    const [a, b, c, d] = [left, right].flatMap((x) => [top, bottom].map((y) => ({ x, y })));
    const corners = [a, c, d, b] as unknown as Placed["corners"];
    this.kept.push({ corners, bounds: boundsOf(corners) });
  }

  /** Places the word if there is room for it. Words that would leave the canvas at its sides or ends are not placed. */
  add(word: Word): boolean {
    const corners = this.corners(word);
    const inside = corners.every(({ x, y }) => x > -1 && x < this.width + 1 && y > this.top - 1 && y < this.height + 1);
    if (!inside) return false;
    const bounds = boundsOf(corners);
    if (this.kept.some((other) => near(bounds, other.bounds) && meet(corners, other.corners))) return false;
    this.kept.push({ corners, bounds });
    this.words.push(word);
    this.placed.push({ text: word.text, corners });
    return true;
  }

  private corners(word: Word): Placed["corners"] {
    const margin = word.plate ? 4 : APART / 2;
    const wide = this.measure(word) + 2 * margin;
    const high = word.size * (word.plate ? 1.4 : LINE) + APART;
    const [cos, sin] = [Math.cos(word.angle ?? 0), Math.sin(word.angle ?? 0)];
    const at = (ax: number, ay: number): Point => {
      const [dx, dy] = [(ax - (word.alignX ?? 0.5)) * wide, (ay - (word.alignY ?? 0.5)) * high];
      return { x: word.x + dx * cos - dy * sin, y: word.y + dx * sin + dy * cos };
    };
    return [at(0, 0), at(1, 0), at(1, 1), at(0, 1)];
  }
}

interface Bounds {
  left: number;
  right: number;
  top: number;
  bottom: number;
}

function boundsOf(corners: Placed["corners"]): Bounds {
  const [xs, ys] = [corners.map(({ x }) => x), corners.map(({ y }) => y)];
  return { left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys) };
}

/** Whether upright rectangles around two words meet: else the words do not. */
const near = (a: Bounds, b: Bounds): boolean =>
  a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

/** Whether two rectangles meet: they do unless a side of one of them parts them. */
export function meet(a: Placed["corners"], b: Placed["corners"]): boolean {
  for (const [one, other] of [
    [a, b],
    [b, a],
  ] as const)
    for (const side of [0, 1] as const) {
      const [from, to] = [one[side], one[side + 1] as Point];
      const [nx, ny] = [to.x - from.x, to.y - from.y];
      const range = (corners: Placed["corners"]) => {
        const along = corners.map((p) => p.x * nx + p.y * ny);
        return [Math.min(...along), Math.max(...along)] as const;
      };
      const [[a0, a1], [b0, b1]] = [range(one), range(other)];
      if (a1 <= b0 || b1 <= a0) return false;
    }
  return true;
}

// The 2-D renderer: arcs of attention above a row of tokens, and under it the cache as a grid of positions by layers.
// It shows all that the 3-D renderer shows (same scene, same colours, same write head) and is used where there is no
// WebGL. This module owns the view, where it is and how large, and the order of painting; the painters are in flat/.

import { beamsOf } from "./beams";
import { type Camera, type Focus, HOME_CAMERA, type Renderer, type Scene } from "./renderer";
import { hatchOf, paintCells, paintPanel } from "./flat/cells";
import { type Frame, type Picture, type View, columnWidth, frameOf, gutterOf } from "./flat/picture";
import { paintBeams, paintHead, placeHovered, placeNotes } from "./flat/reading";
import { fontOf, paintTiles, paintWords, placeLabels, placeLayers, placePositions, placeWall } from "./flat/tokens";
import { keepStamp, Layout, type Placed } from "./layout";
import { FLIGHT_MS, Glide, clamp, phasesOf } from "./motion";
import { type Entry, entriesOf } from "./roles";
import { positionIn, slotOf, spanOf } from "./span";
import { css, readPalette } from "./theme";

const MOST_PITCH = 96; // CSS pixels, to which the user may zoom
const LEAST_PITCH = 2;
/** Of the height, for the cache: TOP shows the beams alone, SIDE the wall. */
const SHARES: Record<Camera, number> = { iso: 0.54, top: 0, side: 0.8, head: 0.54, follow: 0.54 };
const [LEAST_ZOOM, MOST_ZOOM] = [0.4, 8];
const WORDS_AT = 0.74; // of the way down to the place: so far above it is its word

/** How many times nearer a flight is, and which place of the picture stands at which of the canvas. */
interface Zoom {
  by: number;
  x: number;
  y: number;
  atX: number;
  atY: number;
}
const WHOLE: Zoom = { by: 1, x: 0, y: 0, atX: 0, atY: 0 };
const UNDER_GUTTER = 4; // tokens left of the columns whose tiles may still show

export function createCanvasRenderer(canvas: HTMLCanvasElement): Renderer {
  const context = canvas.getContext("2d");
  if (!context) throw new Error("This browser gives no 2-D canvas.");
  const c = context;

  let palette = readPalette();
  let hatch = hatchOf(palette, 1);
  let [width, height, ratio] = [0, 0, 1];
  let camera: Camera = HOME_CAMERA;
  let manual: View | null = null; // where the user has put the view
  let focus: Focus | null = null; // of a flight
  let flies = false; // whether the view is on such a way
  let jump = true; // the next view is taken without a glide
  let frames = 0;
  let lastHead = 0;
  let inView = { first: 0, last: -1 };
  let placed: readonly Placed[] = [];
  let entries: readonly Entry[] = [];
  let shown: { view: View; frame: Frame; tokens: number; layers: number } | null = null;
  const glide = new Glide<View>();
  const nearing = new Glide<Zoom>();
  let zoomed = WHOLE;
  const widths = new Map<string, number>();

  const snap = (value: number) => Math.round(value * ratio) / ratio;
  const place = (view: View, position: number) =>
    gutterOf(width) + (slotOf(view, position + 0.5) - view.left) * view.pitch;

  function measure(text: string): number {
    const key = `${c.font}|${text}`;
    let known = widths.get(key);
    if (known === undefined) {
      if (widths.size > 4000) widths.clear();
      known = c.measureText(text).width;
      widths.set(key, known);
    }
    return known;
  }

  function wanted(scene: Scene): View {
    const area = Math.max(1, width - gutterOf(width) - 14);
    const share = SHARES[focus ? "side" : camera];
    if (manual && !focus) {
      const x = (slotOf(manual, lastHead + 0.5) - manual.left) * manual.pitch;
      // The page moves on under a head that was in view, as paper does.
      if (scene.head !== lastHead && x > 0 && x < area) {
        const next = (slotOf(manual, scene.head + 0.5) - manual.left) * manual.pitch;
        if (next > 0.9 * area || next < 0.1 * area) manual.left += scene.head - lastHead;
      }
      return { ...manual, share };
    }
    const most = clamp(width * 0.07, 30, 96);
    const span = spanOf(focus ? "side" : camera, scene.tokens.length, area);
    const pitch = Math.min(most, area / span.count);
    const { from, scale } = span;
    return { left: span.first - (area / pitch - span.count) / 2, pitch, share, from, scale };
  }

  function draw(scene: Scene, now: number): boolean {
    frames++;
    if (width < 2 || height < 2) return false;
    glide.aim(wanted(scene), now, jump || (manual !== null && focus === null));
    const atOnce = jump;
    jump = false;
    lastHead = scene.head;
    const tokens = scene.tokens.length;
    const layers = Math.max(1, scene.layers);
    const view = glide.at(now);
    const frame = frameOf(view, layers, width, height, ratio);
    shown = { view, frame, tokens, layers: scene.layers };
    nearing.aim(zoomOf(view, frame), now, atOnce, FLIGHT_MS);
    zoomed = nearing.at(now);
    const picture: Picture = {
      c,
      scene,
      palette,
      hatch,
      phases: phasesOf(scene),
      beams: beamsOf(scene.row, scene.head),
      view,
      frame,
      width,
      height,
      ratio,
      first: clamp(Math.floor(positionIn(view, view.left)) - UNDER_GUTTER, 0, tokens),
      last: clamp(Math.ceil(positionIn(view, view.left + (width - frame.x0) / view.pitch)), 0, tokens) - 1,
      wide: (position) =>
        Math.max(1 / ratio, columnWidth(position + 0.5 < view.from ? view.pitch * view.scale : view.pitch)),
      hub: { x: place(view, scene.head), y: frame.tileTop - 22 },
      centre: (position) => place(view, position),
      snap,
      measure,
      layout: new Layout(
        (word) => {
          c.font = fontOf(word.size, word.bold ?? false);
          return measure(word.text);
        },
        focus ? Math.min(width, inPicture(focus.free.right * width, "x")) : width,
        focus ? Math.min(height, inPicture(focus.free.bottom * height, "y")) : height,
        focus ? Math.max(0, inPicture(focus.free.top, "y")) : 0,
      ),
    };
    inView = { first: picture.first, last: picture.last };
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.fillStyle = css(palette.bg);
    c.fillRect(0, 0, width, height);
    const near = ratio * zoomed.by;
    c.setTransform(near, 0, 0, near, ratio * onScreen(0, "x"), ratio * onScreen(0, "y"));
    paintPanel(picture);
    c.save();
    c.beginPath();
    c.rect(frame.x0 - 2, 0, width, height);
    c.clip();
    paintCells(picture);
    c.restore();
    paintTiles(picture);
    if (tokens > 0) {
      if (scene.recorded) keepStamp(picture.layout, width, height);
      placeHovered(picture);
      placeLabels(picture, true);
      placeLabels(picture, false);
      placeNotes(picture);
      placeLayers(picture);
      placeWall(picture);
      placePositions(picture);
      paintBeams(picture);
      paintHead(picture);
    }
    paintWords(picture);
    placed = picture.layout.placed;
    entries = entriesOf(scene, picture.phases, picture.beams, inView, frame.cell > 0);
    flies &&= nearing.moving(now);
    return glide.moving(now) || nearing.moving(now);
  }

  /** How a flight sees the picture: its place of the picture stands at its place of the canvas. */
  function zoomOf(view: View, { tileTop, tile, cellsTop, cell }: Frame): Zoom {
    if (!focus) return WHOLE;
    const y = focus.layer === null ? tileTop + tile / 2 : cellsTop + (focus.layer + 0.5) * cell;
    const whole = focus.words ? (focus.y * WORDS_AT * height) / Math.max(1, y - tileTop) : MOST_ZOOM;
    const by = clamp(Math.min(height / focus.units / view.pitch, whole), LEAST_ZOOM, MOST_ZOOM);
    return { by, x: place(view, focus.position), y, atX: focus.x * width, atY: focus.y * height };
  }

  const onScreen = (at: number, axis: "x" | "y"): number =>
    (axis === "x" ? zoomed.atX : zoomed.atY) + (at - zoomed[axis]) * zoomed.by;
  const inPicture = (at: number, axis: "x" | "y"): number =>
    (at - (axis === "x" ? zoomed.atX : zoomed.atY)) / zoomed.by + zoomed[axis];

  return {
    get orthographic() {
      return true;
    },
    fly(to) {
      focus = to;
      flies = true;
    },
    resize(w, h, r) {
      width = Math.max(0, w);
      height = Math.max(0, h);
      ratio = clamp(r || 1, 1, 3);
      const pixels = (length: number) => Math.max(1, Math.round(length * ratio));
      if (canvas.width !== pixels(width)) canvas.width = pixels(width);
      if (canvas.height !== pixels(height)) canvas.height = pixels(height);
      hatch = hatchOf(palette, ratio);
      jump = !flies;
    },
    draw,
    camera(name, scene) {
      camera = name;
      manual = null;
      lastHead = scene.head;
    },
    orbit() {}, // a plane has nothing to turn around
    pan(dx) {
      if (!shown || focus) return;
      const { view, tokens } = shown;
      const room = (width - gutterOf(width)) / view.pitch;
      manual = { ...view, left: clamp(view.left - dx / view.pitch, 2 - room, Math.max(0, slotOf(view, tokens - 2))) };
      shown.view = manual;
    },
    zoom(factor, x) {
      if (!shown || focus || !(factor > 0)) return;
      const { view } = shown;
      const pitch = clamp(view.pitch * factor, LEAST_PITCH, MOST_PITCH);
      const under = view.left + (x - gutterOf(width)) / view.pitch;
      manual = { ...view, pitch, left: under - (x - gutterOf(width)) / pitch };
      shown.view = manual;
    },
    project(position) {
      if (!shown) return { x: 0, y: 0 };
      const { view, frame } = shown;
      return { x: onScreen(place(view, position), "x"), y: onScreen(frame.tileTop + frame.tile / 2, "y") };
    },
    pick(x, y) {
      if (!shown || inPicture(y, "y") < shown.frame.tileTop - 8) return null;
      const slot = shown.view.left + (inPicture(x, "x") - gutterOf(width)) / shown.view.pitch;
      const position = Math.floor(positionIn(shown.view, slot));
      return position >= 0 && position < shown.tokens ? position : null;
    },
    layerAt(_x, y) {
      const { cellsTop, cell } = shown?.frame ?? { cellsTop: 0, cell: 0 };
      const layer = cell > 0 ? Math.floor((inPicture(y, "y") - cellsTop) / cell) : -1;
      return layer >= 0 && layer < (shown?.layers ?? 0) ? layer : null;
    },
    wall() {
      if (!shown || shown.frame.cell === 0 || shown.tokens === 0) return null;
      const { view, frame, tokens } = shown;
      const [left, right] = [slotOf(view, 0), slotOf(view, tokens)].map((slot) =>
        onScreen(frame.x0 + (slot - view.left) * view.pitch, "x"),
      );
      const [top, bottom] = [onScreen(frame.cellsTop, "y"), onScreen(frame.cellsEnd, "y")];
      return { left: left ?? 0, top, right: right ?? 0, bottom };
    },
    words: () => placed,
    legend: () => entries,
    window: () => inView,
    show(position) {
      if (!shown) return;
      const { view } = shown;
      manual = { ...view, left: slotOf(view, position + 0.5) - (width - gutterOf(width)) / view.pitch / 2 };
      shown.view = manual;
    },
    finish() {}, // a flat picture is drawn when `draw` returns
    stats: () => ({ kind: "2d", gpu: "canvas", calls: 0, triangles: 0, frames }),
    theme() {
      palette = readPalette();
      hatch = hatchOf(palette, ratio);
    },
    dispose() {
      widths.clear();
      canvas.width = canvas.height = 1;
    },
  };
}

// The stage: one canvas and the renderer that draws on it. A renderer cannot share a canvas with another, so changing
// the renderer replaces the canvas. This module owns the choice of the renderer (the user's; else 3-D where the machine
// can, else 2-D), its size, and its pointers, wheels and keys. It draws only after something has changed.

import { effect, signal, untracked } from "@preact/signals";
import { chosenCell, hoveredCell } from "./cell-pointer";
import * as clock from "../visit/clock";
import { lanes, leave } from "./lanes";
import { createCanvasRenderer } from "./renderers/canvas2d";
import type { Renderer, RendererStats, Scene } from "./renderers/renderer";
import type { Entry } from "./renderers/roles";
import { hideFirst, row, selected } from "../run/answers/attention-row";
import { SceneBuilder } from "./scene";
import { shower } from "../run/patches";
import {
  camera,
  card,
  hovered,
  panel,
  pictureTime,
  renderer as drawing,
  rendererChoice,
  rendererNote,
  run,
  shown,
} from "../visit/store";
import { kept, tried } from "./kept";
import { theme } from "../visit/theme";
import { enter } from "./flight/flight";
import { focus } from "./flight/focus";

type Kind = "2d" | "3d";

const SLOW = 50; // ms a picture may take before a machine without graphics hardware is given the 2-D renderer
const TRIAL = 3; // pictures by which that is judged, drawn where they cannot be seen
const TRIAL_TOKENS = 60;
const SOFTWARE = /swiftshader|llvmpipe|software|basic render/i;
const ORBIT = 0.008; // radians per CSS pixel
const FALLS = 1500; // ms in which columns fall that a smaller cache leaves out, as of a step
const CLICK = 5; // CSS pixels that a pointer may move between press and release of a click
const TURN = 0.12; // radians per key

const builder = new SceneBuilder();
const reduced = matchMedia("(prefers-reduced-motion: reduce)");
const lost = signal(false); // whether the 3-D renderer was lost and may not come back by itself

let host: HTMLElement | null = null;
let canvas: HTMLCanvasElement | null = null;
let renderer: Renderer | null = null;
let scene: Scene | null = null;
let stale = true; // whether the scene must be built anew
let pictures = 0; // since the page was opened
let spent = 0; // ms of this program in the last picture, without the GPU
let making = 0; // the renderer being made; an older one is thrown away

export const stats = (): RendererStats | null => renderer?.stats() ?? null;
export const frames = (): number => pictures;
export const orthographic = (): boolean => renderer?.orthographic ?? false;
export const wall = () => renderer?.wall() ?? null;
export const words = () => renderer?.words() ?? [];
/** ms of this program in the last picture, without the GPU. */
export const drawTime = (): number => spent;
/** The positions that the picture shows. */
export const windowed = signal({ first: 0, last: -1 });
/** What a legend of the picture has. */
export const legend = signal<readonly Entry[]>([]);
export const project = (position: number): { x: number; y: number } | null => renderer?.project(position) ?? null;

/** Puts the stage into an element of the page. Returns what takes it out again. */
export function mount(element: HTMLElement): () => void {
  host = element;
  clock.parts.draw = draw;
  const sizes = new ResizeObserver(() => fit());
  sizes.observe(element);
  const stops = [
    effect(() => void make(preferred())),
    effect(() => {
      void [run.value, run.value?.shared.value, shown.value, row.value, selected.value, hideFirst.value, lanes.value];
      stale = true;
      clock.invalidate();
    }),
    effect(() => {
      void kept.value;
      stale = true;
      if (tried.peek() !== null) clock.animate(FALLS);
      clock.invalidate();
    }),
    effect(() => {
      void hovered.value;
      clock.invalidate();
    }),
    effect(() => {
      const { name } = camera.value;
      untracked(() => renderer?.camera(name, current()));
      clock.invalidate();
    }),
    effect(() => {
      const to = focus.value;
      renderer?.fly(to);
      clock.invalidate();
    }),
    effect(() => {
      void [theme.value, shower.value];
      renderer?.theme();
      clock.invalidate();
    }),
  ];
  return () => {
    sizes.disconnect();
    for (const stop of stops) stop();
    remove();
    host = null;
  };
}

/** Draws at once, also where nothing has changed. */
export function renderOnce(): void {
  draw(performance.now(), 1);
}

/** The canvas with the shown step at rest on it, drawn in this turn; null where there is none. */
export function drawn(): HTMLCanvasElement | null {
  leave(); // the picture and its figures are of the run
  renderOnce();
  return canvas;
}

export function zoom(factor: number): void {
  if (!canvas) return;
  renderer?.zoom(factor, canvas.clientWidth / 2, canvas.clientHeight / 2);
  clock.invalidate();
}

/** Moves the view along the text, so that a position is in its middle. */
export function showPosition(position: number): void {
  renderer?.show(position);
  clock.invalidate();
}

/** Turns the picture by keys; a flat one is moved. */
export function turn(x: number, y: number): void {
  if (drawing.value === "3d" && !orthographic()) renderer?.orbit(x * TURN, y * TURN);
  else renderer?.pan(-x * 40, -y * 40);
  clock.invalidate();
}

/** The user's choice; else 3-D, unless WebGL was lost or the system asks for less motion. */
function preferred(): Kind {
  if (rendererChoice.value !== null) return rendererChoice.value;
  return lost.value || reduced.matches ? "2d" : "3d";
}

async function make(kind: Kind): Promise<void> {
  const turn = ++making;
  const element = host;
  if (element === null) return;
  const fresh = document.createElement("canvas");
  fresh.tabIndex = 0;
  fresh.setAttribute("role", "img");
  fresh.setAttribute(
    "aria-label",
    "The tokens in a row, with one slice per layer below each. The text and the instruments say the same.",
  );
  let made: Renderer;
  try {
    made = kind === "2d" ? createCanvasRenderer(fresh) : await createScene(fresh);
  } catch (error) {
    if (turn !== making) return;
    lost.value = true;
    rendererChoice.value = null;
    rendererNote.value = `${error instanceof Error ? error.message : String(error)} The same is drawn in 2-D.`;
    return;
  }
  if (turn !== making) return made.dispose();
  if (kind === "3d" && rendererChoice.peek() === null && SOFTWARE.test(made.stats().gpu)) {
    const time = trial(made, element);
    if (time > SLOW) {
      made.dispose();
      pictureTime.value = time;
      lost.value = true; // asks for the other renderer
      return;
    }
  }
  remove();
  element.append(fresh);
  canvas = fresh;
  renderer = made;
  handle(fresh, made);
  fit();
  made.theme();
  untracked(() => made.camera(camera.value.name, current()));
  made.fly(focus.peek());
  drawing.value = kind;
  clock.invalidate();
}

async function createScene(canvas: HTMLCanvasElement): Promise<Renderer> {
  const { createSceneRenderer } = await import("./renderers/scene3d").catch(() => {
    throw new Error("The program for 3-D could not be fetched: the server does not answer.");
  });
  try {
    return createSceneRenderer(canvas);
  } catch {
    throw new Error("3-D needs WebGL 2, which this browser does not offer here.");
  }
}

function remove(): void {
  renderer?.dispose();
  canvas?.remove();
  renderer = null;
  canvas = null;
}

function fit(): void {
  if (!host || !renderer || !canvas) return;
  const { clientWidth: width, clientHeight: height } = host;
  if (width === 0 || height === 0) return;
  renderer.resize(width, height, Math.min(devicePixelRatio, 2));
  // In the same turn, or an empty canvas shows for a moment; a second picture is needed only where something moves.
  if (scene === null || draw(performance.now(), scene.progress)) clock.invalidate();
}

function current(): Scene {
  if (stale || scene === null) {
    stale = false;
    const shownRun = run.peek();
    scene =
      lanes.peek()?.scene ??
      (shownRun
        ? builder.build(shownRun, shown.peek(), row.peek(), selected.peek().layer, hideFirst.peek(), kept.peek())
        : EMPTY);
  }
  return scene;
}

function draw(now: number, progress: number): boolean {
  if (renderer === null || host === null || host.clientWidth === 0) return false;
  const picture = current();
  picture.progress = progress;
  picture.hovered = lanes.peek() === null ? hovered.peek() : null; // a place in the text of the run
  const began = performance.now();
  const more = renderer.draw(picture, now);
  shower.peek()?.paint(host, lanes.peek() === null ? run.peek() : null, renderer, clock.invalidate);
  spent = performance.now() - began;
  pictures++;
  const { first, last } = renderer.window();
  const known = windowed.peek();
  if (known.first !== first || known.last !== last) windowed.value = { first, last };
  const entries = renderer.legend();
  if (!alike(entries, legend.peek())) legend.value = entries;
  return more;
}

const alike = (a: readonly Entry[], b: readonly Entry[]): boolean =>
  a.length === b.length && a.every(({ role, drawn }, i) => role === b[i]?.role && drawn === b[i]?.drawn);

/** The time of one picture in ms, on a machine without graphics hardware: judged before anything is shown, so that the
 * picture never changes its kind while someone looks. */
function trial(made: Renderer, element: HTMLElement): number {
  const layers = card.peek()?.layers ?? 6;
  const size = TRIAL_TOKENS * layers;
  const sample: Scene = {
    ...EMPTY,
    tokens: Array.from({ length: TRIAL_TOKENS }, () => ({ label: "token", kind: "generated" })),
    head: TRIAL_TOKENS - 1,
    layers,
    cells: new Uint8Array(size).fill(1),
    layerShare: Float32Array.from({ length: layers }, (_, i) => (i + 1) / layers),
    row: { layer: 0, head: 0, weights: new Float32Array(TRIAL_TOKENS - 1).fill(1 / TRIAL_TOKENS), argmax: 0 },
  };
  made.resize(element.clientWidth, element.clientHeight, Math.min(devicePixelRatio, 2));
  const times: number[] = [];
  for (let i = 0; i <= TRIAL; i++) {
    const began = performance.now();
    made.draw(sample, began);
    made.finish();
    if (i > 0) times.push(performance.now() - began); // the first one compiles
  }
  return times.sort((a, b) => a - b)[TRIAL >> 1] ?? 0;
}

function handle(element: HTMLCanvasElement, own: Renderer): void {
  const pointers = new Map<number, { x: number; y: number }>();
  let pressed = { x: 0, y: 0 };
  const at = (event: MouseEvent): { x: number; y: number } => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const flat = (): boolean => own.stats().kind === "2d" || own.orthographic;

  element.addEventListener("pointerdown", (event) => {
    event.preventDefault(); // the keys stay with the page; Tab reaches the canvas
    if (document.activeElement instanceof HTMLElement) document.activeElement.blur();
    element.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, at(event));
    pressed = at(event);
  });
  element.addEventListener("pointermove", (event) => {
    const now = at(event);
    const then = pointers.get(event.pointerId);
    if (then === undefined) {
      const position = own.pick(now.x, now.y);
      const layer = position === null || lanes.peek() !== null ? null : own.layerAt(now.x, now.y);
      hovered.value = position;
      hoveredCell.value = position === null || layer === null ? null : { position, layer, ...now };
      return;
    }
    const [dx, dy] = [now.x - then.x, now.y - then.y];
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other !== undefined) {
      const spread = Math.hypot(then.x - other.x, then.y - other.y);
      if (spread > 0)
        own.zoom(Math.hypot(now.x - other.x, now.y - other.y) / spread, (now.x + other.x) / 2, (now.y + other.y) / 2);
      own.pan(dx / 2, dy / 2);
    } else if (event.shiftKey || event.buttons === 4 || flat()) own.pan(dx, dy);
    else own.orbit(dx * ORBIT, dy * ORBIT);
    pointers.set(event.pointerId, now);
    clock.invalidate();
  });
  const release = (event: PointerEvent): void => void pointers.delete(event.pointerId);
  element.addEventListener("click", (event) => {
    const now = at(event);
    if (lanes.peek() !== null) return; // no cell of the run
    if (Math.hypot(now.x - pressed.x, now.y - pressed.y) > CLICK) return; // the end of a drag
    const position = own.pick(now.x, now.y);
    if (position === null) return;
    const layer = own.layerAt(now.x, now.y);
    chosenCell.value = { position, layer };
    if (panel.peek() !== "block") enter(position, layer);
  });
  element.addEventListener("pointerup", release);
  element.addEventListener("pointercancel", release);
  element.addEventListener("pointerleave", () => (hovered.value = hoveredCell.value = null));
  element.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const { x, y } = at(event);
      own.zoom(Math.exp(-event.deltaY * (event.deltaMode === 1 ? 0.03 : 0.0015)), x, y);
      clock.invalidate();
    },
    { passive: false },
  );
  element.addEventListener("webglcontextlost", (event) => {
    event.preventDefault();
    if (element !== canvas) return; // a canvas that was replaced
    lost.value = true;
    rendererChoice.value = null;
    rendererNote.value = "The graphics context was lost. The same is drawn in 2-D; press V for 3-D again.";
  });
}

const EMPTY: Scene = {
  tokens: [],
  head: 0,
  layers: 1,
  states: [],
  lanes: 1,
  cells: new Uint8Array(0),
  layerShare: new Float32Array(1),
  row: null,
  layer: 0,
  thin: 1,
  cache: true,
  progress: 1,
  hovered: null,
  recorded: false,
};

// The 3-D renderer: the row of tokens, the cache as an upright wall of layers under it, the write head and its beams, in
// WebGL 2. Six draw calls for any number of tokens. This module owns the WebGL context and the camera; the
// parts are in gl/. It draws when it is asked to and never by itself.

import { type Beams, beamsOf, readerOf } from "./beams";
import { groupOf, rowLayer } from "./labels";
import type { Placed } from "./layout";
import { type Camera, type Focus, HOME_CAMERA, type Renderer, type Scene } from "./renderer";
import { makeArcs } from "./gl/arcs";
import { makeBoard } from "./gl/board";
import { makeColumns } from "./gl/columns";
import { NOWHERE, frameUniforms, setColours } from "./gl/glsl";
import { makeHead } from "./gl/head";
import {
  EDGE,
  FRONT,
  type Pose,
  TILE,
  type Turn,
  axesOf,
  matricesOf,
  onWall,
  placeOf,
  poseAt,
  poseFor,
  positionAt,
} from "./gl/pose";
import { States } from "./gl/states";
import { Text } from "./gl/text";
import { makeTiles } from "./gl/tiles";
import { Vector3, invert, matrix } from "./gl/vector";
import { type Sight, type Spot, wordsOf } from "./gl/words";
import { FLIGHT_MS, Glide, clamp, easeOut, phasesOf } from "./motion";
import { type Entry, entriesOf } from "./roles";
import { spanOf } from "./span";
import { readPalette } from "./theme";

const SEPARATE = 8; // CSS pixels from which each of the older tokens has a box of its own
const STILL: Turn = { yaw: 0, pitch: 0 };
const DEGREE = Math.PI / 180;
const ROW = 0.82; // of the width, which the row of tokens has in perspective

export function createSceneRenderer(canvas: HTMLCanvasElement): Renderer {
  const gl = canvas.getContext("webgl2", { antialias: true, alpha: false, depth: true, stencil: false });
  if (!gl) throw new Error("This browser gives no WebGL 2, which the 3-D scene needs.");
  gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  gl.depthFunc(gl.LEQUAL);
  const info = gl.getExtension("WEBGL_debug_renderer_info");
  const name = String(gl.getParameter(info ? info.UNMASKED_RENDERER_WEBGL : gl.RENDERER));

  const states = new States(gl, Number(gl.getParameter(gl.MAX_TEXTURE_SIZE)));
  const uniforms = frameUniforms(states.texture);
  const board = makeBoard(gl, uniforms);
  const columns = makeColumns(gl, uniforms);
  const tiles = makeTiles(gl, uniforms);
  const head = makeHead(gl, uniforms);
  const arcs = makeArcs(gl, uniforms);
  const text = new Text(gl, uniforms);
  // Nearest first: what the columns cover of the board is then not shaded.
  const parts = [tiles, columns, head, board, arcs.part, text.part];
  const world = matrix(); // of the camera
  const projection = matrix();
  let [inverse, unprojection] = [matrix(), matrix()];
  const drawn = { calls: 0, triangles: 0 };

  let palette = readPalette();
  let [width, height] = [0, 0];
  let camera: Camera = HOME_CAMERA;
  let turn = STILL;
  let manual: Pose | null = null; // where the user has put the camera
  let focus: Focus | null = null; // of a flight
  let flies = false; // whether the camera is on such a way
  let current: Pose | null = null;
  let jump = true;
  let frames = 0;
  let lastHead = 0;
  let lastTokens = 0;
  let lastLayers = 1;
  let [firstInView, lastInView] = [0, -1];
  let placed: readonly Placed[] = [];
  let entries: readonly Entry[] = [];
  const glide = new Glide<Pose>();
  const scratch = new Vector3();
  colours();

  function colours(): void {
    setColours(uniforms, palette);
    gl?.clearColor(...palette.bg, 1);
  }

  function wanted(scene: Scene): Pose {
    if (manual) {
      // The board moves on under a head that was in view, as paper does.
      if (scene.head !== lastHead) {
        const before = spot(scratch.set(placeOf(manual, lastHead), 0, 0));
        if (before.before && before.x > 0 && before.x < width) manual.x += scene.head - lastHead;
      }
      return manual;
    }
    const from = focus ? "side" : camera;
    const span = spanOf(from, scene.tokens.length, ROW * width);
    const board = poseFor(from, span, scene.head, scene.layers, width, height, focus ? STILL : turn);
    if (!focus) return board;
    const [yaw, pitch] = [focus.yaw + turn.yaw / DEGREE, clamp(focus.pitch + turn.pitch / DEGREE, 2, 88)];
    return poseAt(board, { ...focus, yaw, pitch }, Math.max(1, scene.layers), width / height);
  }

  function stand(pose: Pose): void {
    current = pose;
    matricesOf(pose, width / height, world, projection);
    [inverse, unprojection] = [invert(world), invert(projection)];
    uniforms.viewMatrix.value.set(inverse);
    uniforms.projectionMatrix.value.set(projection);
  }

  /** What lies under a point of the canvas: from the near plane on, and which way. */
  function ray(x: number, y: number): { near: Vector3; way: Vector3 } {
    const at = (depth: number) =>
      new Vector3((x / width) * 2 - 1, 1 - (y / height) * 2, depth).through(unprojection).through(world);
    const [near, far] = [at(-1), at(1)];
    return { near, way: far.add(near, -1) };
  }

  function spot(place: Vector3): Spot {
    const p = place.through(inverse);
    const before = p.z < 0;
    p.through(projection);
    return { x: ((p.x + 1) / 2) * width, y: ((1 - p.y) / 2) * height, before };
  }

  /** The positions that may be in view: those whose tile or whose column's end is, with one to spare. */
  function inView(tokens: number, pose: Pose): [number, number] {
    const seen = (position: number): boolean => {
      const x = placeOf(pose, position);
      const a = spot(scratch.set(x, 0, 0));
      if (a.before && a.x > -40 && a.x < width + 40) return true;
      const b = spot(onWall(scratch, x, 1, pose));
      return b.before && ((b.x > -40 && b.x < width + 40) || (a.before && a.x < 0 !== b.x < 0));
    };
    let [first, last] = [0, tokens - 1];
    while (first <= last && !seen(first)) first++;
    while (first < last && !seen(last)) last--;
    return first > last ? [0, -1] : [Math.max(0, first - 1), Math.min(tokens - 1, last + 1)];
  }

  function draw(scene: Scene, now: number): boolean {
    frames++;
    if (width < 2 || height < 2) return false;
    glide.aim(wanted(scene), now, jump || manual !== null, flies ? FLIGHT_MS : undefined);
    jump = false;
    lastHead = scene.head;
    const tokens = scene.tokens.length;
    lastTokens = tokens;
    lastLayers = scene.layers;
    const pose = glide.at(now);
    stand(pose);
    if (states.update(scene)) uniforms.uStates.value = states.texture;

    const phases = phasesOf(scene);
    const beams: Beams = beamsOf(scene.row, scene.head);
    const [first, last] = inView(tokens, pose);
    [firstInView, lastInView] = [first, last];
    uniforms.uSlope.value.set([Math.cos(pose.slope), Math.sin(pose.slope)]);
    uniforms.uBoard.value.set([EDGE + pose.strip, pose.wall, Math.max(1, scene.layers), phases.filled]);
    // Where the older tokens are narrower they have one box: thousands would be drawn into the same pixels.
    const folded = (pose.scale * height) / pose.view < SEPARATE ? Math.ceil(pose.from - 0.5) : 0;
    const own = clamp(folded, first, last + 1);
    const boxes = last - own + 1 + Number(own > first);
    uniforms.uFirst.value = first;
    uniforms.uOwn.value = own;
    uniforms.uLast.value = last;
    uniforms.uRow.value = rowLayer(scene);
    uniforms.uFold.value.set([pose.from, pose.scale]);
    uniforms.uHead.value = tokens > 0 ? scene.head : NOWHERE;
    uniforms.uStrike.value = phases.strike < 1 ? easeOut(phases.strike) : 1;
    uniforms.uHovered.value = scene.hovered ?? NOWHERE;
    uniforms.uArgmax.value = phases.beams >= 1 && scene.cache ? (beams.argmax ?? NOWHERE) : NOWHERE;
    uniforms.uFallen.value = phases.fallen;
    uniforms.uThin.value = scene.thin;
    uniforms.uLayer.value = scene.layer < 0 ? NOWHERE : scene.layer;
    uniforms.uHeat.value = 1 - clamp(scene.progress, 0, 1);
    uniforms.uCache.value = scene.cache ? 1 : 0;
    const span = spanOf(focus ? "side" : camera, tokens, ROW * width);
    uniforms.uEnd.value = Math.max(placeOf(span, tokens + 2), span.first + span.count - 1);
    columns.instances = scene.layers > 0 ? boxes : 0;
    tiles.instances = boxes;
    head.visible = tokens > 0;
    arcs.set(beams, pose.wall > 0.05);
    arcs.part.visible = phases.beams > 0 && beams.drawn.length > 0;
    arcs.uniforms.uReader.value = scene.row ? readerOf(scene.row, scene.head) : NOWHERE;
    arcs.uniforms.uGrown.value = phases.beams;
    arcs.uniforms.uArc.value = pose.arc;
    arcs.uniforms.uReach.value = pose.reach;
    tiles.visible = last >= first;
    columns.visible = tiles.visible && pose.wall > 0.05;
    const at = (position: number) => placeOf(pose, position);
    const end = (share: number) => spot(onWall(scratch, at(scene.head) + 0.62, share, pose));
    const [top, foot] = [end(0), end(1)];
    const layerHigh = Math.hypot(top.x - foot.x, top.y - foot.y) / Math.max(1, scene.layers);
    uniforms.uGroup.value.set([groupOf(layerHigh), Math.max(1, scene.layers / scene.lanes)]);
    const free = focus?.free ?? { top: 0, right: 1, bottom: 1 };
    const sight: Sight = { pose, width, height, first, last, layerHigh, spot, at, free };
    const layout = wordsOf(scene, sight, beams, phases, palette, text);
    placed = layout.placed;
    entries = entriesOf(scene, phases, beams, { first, last }, columns.visible);
    text.set(layout.words);
    text.part.visible = tokens > 0;
    render();
    const moving = glide.moving(now);
    flies &&= moving;
    return moving;
  }

  function render(): void {
    if (!gl) return;
    gl.depthMask(true);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    const seen = parts.filter((part) => part.visible && part.instances > 0);
    drawn.calls = seen.length;
    drawn.triangles = seen.reduce((sum, part) => sum + part.draw(), 0);
  }

  /** The pose that the user's hand moves on from. */
  function held(): Pose | null {
    if (current && !manual && !focus) manual = { ...current };
    return manual;
  }

  return {
    get orthographic() {
      return camera === "top" && focus === null;
    },
    fly(to) {
      focus = to;
      manual = null;
      turn = STILL;
      flies = true;
    },
    resize(w, h, ratio) {
      width = Math.max(0, w);
      height = Math.max(0, h);
      const density = clamp(ratio || 1, 0.5, 2);
      canvas.width = Math.floor(Math.max(1, width) * density);
      canvas.height = Math.floor(Math.max(1, height) * density);
      gl.viewport(0, 0, canvas.width, canvas.height);
      uniforms.uRatio.value = density;
      uniforms.uSize.value.set([Math.max(1, width), Math.max(1, height)]);
      text.resolution(density);
      jump = !flies;
    },
    draw,
    camera(next, scene) {
      camera = next;
      manual = null;
      turn = STILL;
      lastHead = scene.head;
    },
    orbit(dx, dy) {
      if (!current) return;
      if (manual) {
        manual.yaw = clamp(manual.yaw + dx, -1.4, 1.4);
        manual.pitch = clamp(manual.pitch + dy, 0.07, Math.PI / 2);
      } else {
        turn = { yaw: turn.yaw + dx, pitch: turn.pitch + dy };
        jump = true;
      }
    },
    pan(dx, dy) {
      const pose = held();
      if (!pose || height < 2) return;
      const unit = pose.view / height;
      const { right, up } = axesOf(pose.yaw, pose.pitch);
      const to = new Vector3(pose.x, pose.y, pose.z).add(right, -dx * unit).add(up, dy * unit);
      pose.x = clamp(to.x, -2, lastTokens + 2);
      pose.y = clamp(to.y, -(EDGE + pose.strip + pose.wall), pose.arc + 2);
      pose.z = clamp(to.z, -pose.arc - 2, EDGE + pose.strip + 2);
    },
    zoom(factor, x, y) {
      const pose = held();
      if (!pose || height < 2 || !(factor > 0)) return;
      const view = clamp(pose.view / factor, 3, 160);
      const unit = (pose.view - view) / height;
      const { right, up } = axesOf(pose.yaw, pose.pitch);
      const to = new Vector3(pose.x, pose.y, pose.z)
        .add(right, (x - width / 2) * unit)
        .add(up, (height / 2 - y) * unit);
      Object.assign(pose, { x: to.x, y: to.y, z: to.z, view });
    },
    project(position) {
      if (!current) return { x: 0, y: 0 };
      const { x, y } = spot(scratch.set(placeOf(current, position), TILE.high, 0));
      return { x, y };
    },
    pick(x, y) {
      if (!current || width < 2 || height < 2) return null;
      const { near, way } = ray(x, y);
      const stood = current;
      const token = (place: Vector3): number | null => {
        const position = Math.round(positionAt(stood, place.x));
        return position >= 0 && position < lastTokens ? position : null;
      };
      // First what looks up: the tops of the tokens. Then what looks forward: their fronts, labels and columns.
      if (way.y < -1e-9) {
        const top = near.clone().add(way, (TILE.high - near.y) / way.y);
        const end = current.slope < 1 ? EDGE + FRONT + current.strip : TILE.long / 2;
        if (top.z > -0.6 && top.z < end) return token(top);
      }
      if (way.z > -1e-9) return null;
      const front = near.clone().add(way, (FRONT - near.z) / way.z);
      if (front.y > TILE.high || front.y < -(EDGE + current.strip + current.wall) - 0.3) return null;
      return token(front);
    },
    layerAt(x, y) {
      const { near, way } = ray(x, y);
      if (!current || way.z > -1e-9) return null;
      const front = near.clone().add(way, (FRONT - near.z) / way.z);
      const layer = Math.floor((-(EDGE + current.strip) - front.y) / (current.wall / lastLayers));
      return layer >= 0 && layer < lastLayers ? layer : null;
    },
    wall() {
      if (!current || current.wall < 0.05 || lastTokens === 0) return null;
      const pose = current;
      const ends = [placeOf(pose, 0) - TILE.wide / 2, placeOf(pose, lastTokens - 1) + TILE.wide / 2];
      const corners = ends.flatMap((x) => [0, 1].map((share) => spot(onWall(scratch, x, share, pose))));
      const [xs, ys] = [corners.map(({ x }) => x), corners.map(({ y }) => y)];
      return { left: Math.min(...xs), top: Math.min(...ys), right: Math.max(...xs), bottom: Math.max(...ys) };
    },
    words: () => placed,
    legend: () => entries,
    window: () => ({ first: firstInView, last: lastInView }),
    show(position) {
      const pose = held();
      if (pose) pose.x = clamp(placeOf(pose, position), -2, lastTokens + 2);
    },
    finish() {
      gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4));
    },
    stats: () => ({
      kind: "3d",
      gpu: name,
      ...drawn,
      frames,
    }),
    theme() {
      palette = readPalette();
      colours();
    },
    dispose() {
      states.texture.dispose();
      text.dispose();
      for (const part of [board, columns, tiles, head, arcs.part]) part.dispose();
      gl.getExtension("WEBGL_lose_context")?.loseContext(); // a browser has room for few, and drops the oldest
    },
  };
}

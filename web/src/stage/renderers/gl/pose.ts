// Where the camera of the scene stands and how the scene is laid out for it. The tokens are blocks in a row. Under them
// hang their labels, and under those stands the cache as an upright wall: one column for each token, one slice for each
// layer. The write head is above its token, and the beams rise and lean back, so that they are a fan from above. TOP
// folds the labels flat in front of the tokens and leaves the wall out. Lengths are chosen with the view so that the
// frame is filled at any width, number of tokens and number of layers. One unit is the distance between two tokens;
// x is the position, y is up, z comes towards the viewer.

import type { Camera, Focus } from "../renderer";
import { UPRIGHT_FROM } from "../labels";
import { clamp } from "../motion";
import { type Fold, type Span, positionIn, slotOf } from "../span";
import { type Matrix4, Vector3, cross } from "./vector";

export interface Pose extends Fold {
  yaw: number; // radians; to the right of the board's middle
  pitch: number; // radians above the horizon
  fov: number; // radians; 0 is orthographic
  x: number; // what is looked at
  y: number;
  z: number;
  view: number; // height of what is seen at that point, in units
  slope: number; // of the labels' strip, radians: 0 lies flat in front of the tokens, a right angle hangs under them
  strip: number; // length of that strip
  wall: number; // height of the cache
  arc: number; // height of the longest arc
  reach: number; // distance at which arcs come near that height
}

export const HUB = { y: 1.45, z: -0.95 }; // of the write head, over its tile's middle
export const TILE = { wide: 0.84, long: 0.84, high: 0.42 };
export const FRONT = 0.43; // z of what hangs under the tokens
export const EDGE = 0.1; // from the tokens to their labels
export const LEAN = { y: 0.84, z: -0.54 }; // the way the arcs rise, so that they are arcs from above too
const DEGREE = Math.PI / 180;

const ANGLES: Record<Camera, { yaw: number; pitch: number; fov: number; slope: number }> = {
  iso: { yaw: 12 * DEGREE, pitch: 19 * DEGREE, fov: 24 * DEGREE, slope: 90 * DEGREE },
  top: { yaw: 0, pitch: 90 * DEGREE, fov: 0, slope: 0 },
  side: { yaw: 12 * DEGREE, pitch: 7 * DEGREE, fov: 14 * DEGREE, slope: 90 * DEGREE },
  head: { yaw: 48 * DEGREE, pitch: 22 * DEGREE, fov: 38 * DEGREE, slope: 90 * DEGREE },
  follow: { yaw: 18 * DEGREE, pitch: 19 * DEGREE, fov: 26 * DEGREE, slope: 90 * DEGREE },
};

/** Where a position stands, in units; those before `from` share what the others leave. */
export const placeOf = (fold: Fold, position: number): number => slotOf(fold, position + 0.5) - 0.5;
export const positionAt = (fold: Fold, x: number): number => positionIn(fold, x + 0.5) - 0.5;

export interface Turn {
  yaw: number;
  pitch: number;
}

/** A point of the strip of labels, `s` from the tokens. */
export function onStrip(out: Vector3, x: number, s: number, slope: number): Vector3 {
  return out.set(x, -s * Math.sin(slope), FRONT + s * Math.cos(slope));
}

/** A point of the wall's front: `share` of its height from its top. */
export function onWall(out: Vector3, x: number, share: number, pose: Pick<Pose, "strip" | "wall">): Vector3 {
  return out.set(x, -(EDGE + pose.strip + share * pose.wall), FRONT);
}

export function poseFor(
  camera: Camera,
  span: Span,
  head: number,
  layers: number,
  width: number,
  height: number,
  turn: Turn,
): Pose {
  const angles = ANGLES[camera];
  const yaw = clamp(angles.yaw + turn.yaw, -80 * DEGREE, 80 * DEGREE);
  const pitch = clamp(angles.pitch + turn.pitch, 4 * DEGREE, 90 * DEGREE);
  const pixels = clamp(Math.min((0.86 * width) / span.count, height / (camera === "side" ? 8.6 : 7.2)), 4, 80); // of a unit, about
  const high = (0.92 * height) / pixels;
  const strip = (pixels >= UPRIGHT_FROM ? 28 : height < 280 ? 42 : height < 460 ? 48 : 66) / pixels + 0.3;
  const free = Math.max(1, high - strip - 2.6);
  const shares = { iso: 0.66, top: 0, side: 0.96, head: 0.5, follow: 0.6 };
  const wall = camera === "top" ? 0 : clamp(free * shares[camera], 2.2, 1.3 * layers + 2);
  const arc = clamp(
    (free - wall) * (camera === "top" ? 1.5 : camera === "side" ? 1 : 1.35),
    camera === "side" ? 0.6 : 1,
    0.36 * span.count + 1.2,
  );
  const { from, scale } = span;
  const board = {
    from,
    scale,
    yaw,
    pitch,
    fov: angles.fov,
    slope: angles.slope,
    strip,
    wall,
    arc,
    reach: span.count * 0.42,
  };
  if (camera === "head") {
    const back = 3.9 * clamp(width / height / 1.93, 0.3, 1.1);
    return { ...board, wall: clamp(wall, 2.2, 4.2), arc: 2.2, x: head - back, y: -1.1, z: 0.4, view: 10.6 };
  }
  return { ...board, ...fit(board, span, width, height) };
}

const WORDS_AT = 0.74; // of the way down to the place: so far above it is its word

/** The pose of a flight: near a place of the wall, which stands at the focus's place on the canvas. */
export function poseAt(board: Pose, focus: Focus, layers: number, aspect: number): Pose {
  const [yaw, pitch, fov] = [focus.yaw * DEGREE, focus.pitch * DEGREE, 26 * DEGREE];
  const at = placeOf(board, focus.position);
  const spot =
    focus.layer === null
      ? new Vector3(at, TILE.high / 2, 0)
      : onWall(new Vector3(), at, (focus.layer + 0.5) / layers, board);
  const { right, up } = axesOf(yaw, pitch);
  const rise = focus.words ? TILE.high - spot.y : 0;
  const view = Math.max(focus.units, (rise * Math.cos(pitch)) / (focus.y * WORDS_AT));
  const { x, y, z } = spot.add(right, (0.5 - focus.x) * view * aspect).add(up, (focus.y - 0.5) * view);
  return { ...board, yaw, pitch, fov, x, y, z, view };
}

const insets = (width: number, height: number) => ({
  left: width < 480 ? 10 : 26,
  right: width < 480 ? 22 : 34,
  top: height < 400 ? 6 : 16,
  bottom: height < 200 ? 16 : height < 400 ? 34 : 42, // the names of the positions, and of the wall
});

/** The nearest place from which all of the span is in view: each point bounds where the camera may be. */
function fit(
  board: Omit<Pose, "x" | "y" | "z" | "view">,
  span: Span,
  width: number,
  height: number,
): Pick<Pose, "x" | "y" | "z" | "view"> {
  const { right, up, back } = axesOf(board.yaw, board.pitch);
  const inset = insets(width, height);
  const [x0, x1] = [span.first - 0.6, span.first + span.count - 0.4];
  const points: Vector3[] = [];
  for (const x of [x0, x1]) {
    points.push(new Vector3(x, TILE.high, -0.5), new Vector3(x, 0, FRONT));
    points.push(onStrip(new Vector3(), x, EDGE + board.strip, board.slope));
    if (board.wall > 0) points.push(new Vector3(x, -(EDGE + board.strip + board.wall + 0.2), FRONT));
    points.push(new Vector3(x, HUB.y + 0.4, HUB.z - 0.3));
  }
  const rise = board.arc + 0.5;
  for (const share of [span.first > 0 ? 0 : 0.2, 0.8])
    points.push(new Vector3(x0 + (x1 - x0) * share, HUB.y / 2 + LEAN.y * rise, HUB.z / 2 + LEAN.z * rise));
  const aspect = width / height;
  const seen = points.map((p) => ({ u: p.dot(right), v: p.dot(up), w: p.dot(back) }));
  const range = (values: number[]) => [Math.min(...values), Math.max(...values)] as const;
  const tan = Math.tan(board.fov / 2);
  // Shares of the half width (height) that may be used on each side.
  const l = 1 - (2 * inset.left) / width;
  const r = 1 - (2 * inset.right) / width;
  const b = 1 - (2 * inset.bottom) / height;
  const t = 1 - (2 * inset.top) / height;
  let [u, v, view, depth] = [0, 0, 1, 0];
  if (board.fov === 0) {
    const [u0, u1] = range(seen.map((p) => p.u));
    const [v0, v1] = range(seen.map((p) => p.v));
    view = Math.max((2 * (v1 - v0)) / (b + t), (2 * (u1 - u0)) / ((l + r) * aspect));
    u = (u0 + u1) / 2 + ((l - r) * view * aspect) / 4;
    v = (v0 + v1) / 2 + ((b - t) * view) / 4;
  } else {
    const [al, ar, ab, at] = [l * tan * aspect, r * tan * aspect, b * tan, t * tan];
    const u0 = Math.min(...seen.map((p) => p.u - al * p.w));
    const u1 = Math.max(...seen.map((p) => p.u + ar * p.w));
    const v0 = Math.min(...seen.map((p) => p.v - ab * p.w));
    const v1 = Math.max(...seen.map((p) => p.v + at * p.w));
    const w = Math.max((u1 - u0) / (al + ar), (v1 - v0) / (ab + at));
    u = (u1 - ar * w + u0 + al * w) / 2;
    v = (v1 - at * w + v0 + ab * w) / 2;
    depth = new Vector3((x0 + x1) / 2, 0, 0).dot(back);
    view = 2 * (w - depth) * tan;
  }
  const place = right.scale(u).add(up, v).add(back, depth);
  return { x: place.x, y: place.y, z: place.z, view };
}

export function axesOf(yaw: number, pitch: number): { right: Vector3; up: Vector3; back: Vector3 } {
  const back = new Vector3(Math.sin(yaw) * Math.cos(pitch), Math.sin(pitch), Math.cos(yaw) * Math.cos(pitch));
  const right = new Vector3(Math.cos(yaw), 0, -Math.sin(yaw));
  return { right, up: cross(back, right), back };
}

const LEAST_FOV = 0.4 * DEGREE; // on the way from one kind of projection to the other

/** Sets the matrices of a camera that stands at a pose. */
export function matricesOf(pose: Pose, aspect: number, world: Matrix4, projection: Matrix4): void {
  const { right, up, back } = axesOf(pose.yaw, pose.pitch);
  const flat = pose.fov < LEAST_FOV;
  const distance = flat ? 200 : pose.view / 2 / Math.tan(pose.fov / 2);
  const place = new Vector3(pose.x, pose.y, pose.z).add(back, distance);
  world.set([
    right.x,
    right.y,
    right.z,
    0,
    up.x,
    up.y,
    up.z,
    0,
    back.x,
    back.y,
    back.z,
    0,
    place.x,
    place.y,
    place.z,
    1,
  ]);
  const around = 30 + pose.view * 2 + pose.wall + pose.arc;
  const near = Math.max(flat ? 0.1 : distance * 0.08, distance - around);
  const far = distance + around * 2;
  const half = (flat ? pose.view / 2 : near * Math.tan(pose.fov / 2)) || 1e-3;
  const deep = far - near;
  projection.fill(0);
  projection[0] = (flat ? 1 : near) / (half * aspect);
  projection[5] = (flat ? 1 : near) / half;
  projection[10] = -(flat ? 2 : far + near) / deep;
  projection[11] = flat ? 0 : -1;
  projection[14] = -(flat ? far + near : 2 * far * near) / deep;
  projection[15] = flat ? 1 : 0;
}

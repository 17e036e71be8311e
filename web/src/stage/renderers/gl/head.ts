// The write head: an amber carriage over the row with a type bar that strikes the newest token. It stands behind and
// above the tile, so that from no camera it hides the tile's middle. One draw call.

import { Part } from "./device";
import { FRAGMENT, type FrameUniforms, VERTEX } from "./glsl";
import { HUB, TILE } from "./pose";

type Point = readonly [number, number, number];

export function makeHead(gl: WebGL2RenderingContext, uniforms: FrameUniforms): Part {
  const places: number[] = [];
  const shades: number[] = [];
  const quad = (a: Point, b: Point, c: Point, d: Point, shade: number) => {
    for (const p of [a, b, c, a, c, d]) {
      places.push(...p);
      shades.push(shade);
    }
  };
  // A bar from one rectangle (around `from`) to another (around `to`), in the plane x = 0, both across x.
  const bar = (
    from: readonly [number, number],
    to: readonly [number, number],
    w0: number,
    w1: number,
    thick: number,
  ) => {
    const [dy, dz] = [to[0] - from[0], to[1] - from[1]];
    const length = Math.hypot(dy, dz) || 1;
    const [ny, nz] = [(dz / length) * thick, (-dy / length) * thick];
    const ring = (at: readonly [number, number], w: number): [Point, Point, Point, Point] => [
      [-w, at[0] + ny, at[1] + nz],
      [w, at[0] + ny, at[1] + nz],
      [w, at[0] - ny, at[1] - nz],
      [-w, at[0] - ny, at[1] - nz],
    ];
    const [a, b] = [ring(from, w0), ring(to, w1)];
    quad(a[0], a[1], b[1], b[0], 0.95);
    quad(a[2], a[3], b[3], b[2], 1);
    quad(a[1], a[2], b[2], b[1], 0.72);
    quad(a[3], a[0], b[0], b[3], 0.72);
    quad(a[0], a[3], a[2], a[1], 1);
    quad(b[0], b[1], b[2], b[3], 0.8);
  };
  bar([-0.16, 0], [0.16, 0], 0.42, 0.42, 0.17); // the carriage
  bar([-0.1, 0.12], [TILE.high + 0.1 - HUB.y, -TILE.long / 2 - 0.08 - HUB.z], 0.24, 0.06, 0.06); // the type bar
  return new Part(gl, {
    uniforms,
    vertices: { position: [places, 3], shade: [shades, 1] },
    bothSides: true,
    vertex: /* glsl */ `${VERTEX}
      in vec3 position;
      in float shade;
      out float vShade;
      void main() {
        float up = 0.5 * (1.0 - uStrike);
        float c = cos(up), s = sin(up);
        vec3 p = vec3(position.x, position.y * c + position.z * s, position.z * c - position.y * s);
        vShade = shade;
        gl_Position = toClip(p + vec3(placeOf(float(uHead)), ${HUB.y}, ${HUB.z}));
      }`,
    fragment: /* glsl */ `${FRAGMENT}
      in float vShade;
      void main() { colour = vec4(mix(uBg, uAccent, vShade), 1.0); }`,
  });
}

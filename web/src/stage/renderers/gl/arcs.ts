// The beams: one instanced ribbon along a cubic curve from the token that asks to the one that is read, bent up and back, and as wide on
// the screen as its weight says whatever the camera; and from there straight down to the token's cell in the layer that
// is read. Four floats an instance.

import { type Beam, type Beams, MOST_BEAMS, beamOpacity, beamWidth, dropWidth, drops } from "../beams";
import { Part } from "./device";
import { FRAGMENT, type FrameUniforms, VERTEX } from "./glsl";
import { FRONT, LEAN, type Pose, TILE } from "./pose";
import { Vector3 } from "./vector";

const LANDING = -0.38; // z of the place on a tile where beams end
const PARTS = 28;
const SPREAD = 2.2; // of the faint light around a beam, times its width

/** A point of the arc from the token that asks to another, by where they stand; the vertex shader has the same curve. */
export function arcPoint(out: Vector3, reader: number, position: number, t: number, pose: Pose): Vector3 {
  const a = new Vector3(reader, TILE.high, LANDING);
  const d = new Vector3(position, TILE.high, LANDING);
  const far = Math.abs(reader - position);
  const apex = (0.5 + pose.arc * (1 - Math.exp(-far / pose.reach))) * 1.33;
  const rise = new Vector3(0, LEAN.y * apex, LEAN.z * apex);
  const lean = 0.1 * Math.min(far, 3 * pose.reach) * Math.sign(reader - position);
  const b = a.clone().add(rise);
  const c = d.clone().add(rise);
  b.x -= lean;
  c.x += lean;
  const u = 1 - t;
  return out
    .set(0, 0, 0)
    .add(a, u * u * u)
    .add(b, 3 * u * u * t)
    .add(c, 3 * u * t * t)
    .add(d, t * t * t);
}

export function makeArcs(gl: WebGL2RenderingContext, frame: FrameUniforms) {
  const sides: number[] = [];
  const index: number[] = [];
  for (let part = 0; part <= PARTS; part++) {
    sides.push(part / PARTS, -1, part / PARTS, 1);
    const at = part * 2;
    if (part < PARTS) index.push(at, at + 1, at + 2, at + 2, at + 1, at + 3);
  }
  const data = new Float32Array(MOST_BEAMS * 8);
  const uniforms = { ...frame, uGrown: { value: 1 }, uReader: { value: 0 }, uArc: { value: 1 }, uReach: { value: 10 } };
  const part = new Part(gl, {
    uniforms,
    vertices: { position: [sides, 2] },
    index,
    each: { data, fields: { beam: 4 } },
    bothSides: true,
    over: true,
    vertex: /* glsl */ `${VERTEX}
      in vec2 position;
      in vec4 beam; // position, weight, width in CSS pixels (negative: the part down to the cell), opacity
      uniform int uLayer, uReader;
      uniform float uGrown, uArc, uReach;
      uniform vec2 uSize;
      out float vAcross; // CSS pixels from the middle
      out float vAlong;
      flat out vec3 vBeam;
      void main() {
        float at = placeOf(beam.x);
        vec3 a = vec3(placeOf(float(uReader)), ${TILE.high}, ${LANDING});
        vec3 d = vec3(at, ${TILE.high}, ${LANDING});
        float far = abs(a.x - d.x);
        float apex = 0.5 + uArc * (1.0 - exp(-far / uReach));
        vec3 rise = vec3(0.0, ${LEAN.y}, ${LEAN.z}) * apex * 1.33;
        bool drop = beam.z < 0.0;
        vec3 lean = vec3(0.1 * min(far, 3.0 * uReach) * sign(a.x - d.x), 0.0, 0.0);
        vec3 b = a + rise - lean;
        vec3 c = d + rise + lean;
        if (drop) {
          a = vec3(at, 0.0, ${FRONT + 0.02});
          d = vec3(at, -uBoard.x - (float(uLayer) + 0.5) / uBoard.z * uBoard.y, ${FRONT + 0.02});
          b = mix(a, d, 0.33);
          c = mix(a, d, 0.67);
        }
        float t = position.x * uGrown, u = 1.0 - t;
        vec3 place = a * u * u * u + b * 3.0 * u * u * t + c * 3.0 * u * t * t + d * t * t * t;
        vec3 way = (b - a) * u * u + (c - b) * 2.0 * u * t + (d - c) * t * t;
        vec4 here = toClip(place);
        vec4 next = toClip(place + normalize(way + 1e-5) * 0.02);
        vec2 line = (next.xy / next.w - here.xy / here.w) * uSize;
        line = length(line) > 1e-9 ? normalize(line) : vec2(0.0, 1.0);
        float halfWidth = abs(beam.z) * 0.5 * (beam.y > 0.1 ? ${SPREAD.toFixed(1)} : 1.0) + 1.0;
        vAcross = position.y * halfWidth;
        vAlong = position.x;
        vBeam = vec3(beam.y, abs(beam.z), beam.w);
        here.xy += vec2(-line.y, line.x) * position.y * halfWidth * 2.0 / uSize * here.w;
        here.z -= 0.0004 * here.w; // over the edge it lands on
        gl_Position = here;
      }`,
    fragment: /* glsl */ `${FRAGMENT}
      in float vAcross;
      in float vAlong;
      flat in vec3 vBeam;
      void main() {
        float strong = sqrt(vBeam.x);
        float halfWidth = vBeam.y * 0.5;
        float soft = 1.0 / uRatio;
        float core = 1.0 - smoothstep(halfWidth - soft * 0.5, halfWidth + soft, abs(vAcross));
        float glow = 1.0 - smoothstep(0.0, halfWidth * ${SPREAD.toFixed(1)} + 1.0, abs(vAcross));
        glow *= vBeam.x > 0.1 ? 0.2 : 0.0;
        float a = max(core * vBeam.z, glow * uDark);
        vec3 c = uDark > 0.5 ? mix(uBeam, vec3(1.0), 0.3 * strong * core) : mix(uBeam, uInk, 0.25 * strong);
        // On a dark ground a beam is light and adds a little; on a light one it is ink.
        a *= mix(0.3, 1.0, uCache); // without the cache the columns are the lesson
        colour = vec4(c * a, a * mix(1.0, 0.85, uDark));
      }`,
  });
  let last: Beams | null = null;
  let wall = false;
  return {
    part,
    uniforms,
    /** `cells`: whether there is a wall, to whose cells they go on. */
    set(chosen: Beams, cells: boolean): void {
      if (chosen === last && cells === wall) return;
      [last, wall] = [chosen, cells];
      const down: Beam[] = cells ? chosen.drawn.filter(({ weight }) => drops(weight)) : [];
      const arcs = chosen.drawn.length;
      chosen.drawn.forEach(({ position, weight }, i) =>
        data.set([position, weight, beamWidth(weight), beamOpacity(weight)], 4 * i),
      );
      down.forEach(({ position, weight }, i) =>
        data.set([position, weight, -dropWidth(weight), beamOpacity(weight)], 4 * (arcs + i)),
      );
      part.instances = arcs + down.length;
      part.changed(part.instances * 4);
    },
  };
}

// The row of tokens: one instanced box. A prompt token is an outline around a dim core, a generated one is solid, and
// the middle of both, seen from above, has exactly the colour of its role, unlit. The newest drops in from the write
// head when the type bar strikes.

import { box } from "./box";
import { Part } from "./device";
import { FRAGMENT, type FrameUniforms, VERTEX } from "./glsl";
import { TILE } from "./pose";

export function makeTiles(gl: WebGL2RenderingContext, uniforms: FrameUniforms): Part {
  return new Part(gl, {
    ...box(),
    uniforms,
    vertex: /* glsl */ `${VERTEX}
      in vec3 position;
      in float face;
      out vec3 vAt;
      flat out int vFace;
      flat out int vPosition;
      flat out int vKind;
      void main() {
        int p = uFirst + gl_InstanceID;
        vPosition = p;
        vKind = stateOf(p, 0);
        vFace = int(face + 0.5);
        vAt = position;
        float lift = 0.0;
        float high = ${TILE.high};
        if (p == uHead && uStrike < 1.0) {
          if (uStrike > 0.0) lift = 2.6 * pow(1.0 - uStrike, 2.0); else high = 0.02; // it drops in from the head
        }
        gl_Position = toClip(vec3(placeOf(float(p)) + position.x * ${TILE.wide} * partOf(float(p)), position.y * high + lift, position.z * ${TILE.long}));
      }`,
    fragment: /* glsl */ `${FRAGMENT}
      in vec3 vAt;
      flat in int vFace;
      flat in int vPosition;
      flat in int vKind;
      void main() {
        vec3 role = vKind == 1 ? uGenerated : uPrompt;
        vec3 c = role;
        if (vFace <= 1) {
          vec2 at = vFace == 0 ? vAt.xz : vec2(vAt.x, (vAt.y - 0.5));
          vec2 pixel = fwidth(at) + 1e-6;
          vec2 edge = (0.5 - abs(at)) / pixel; // device pixels from the nearest edges
          float d = min(edge.x, edge.y) / uRatio;
          float small = smoothstep(0.055, 0.1, max(pixel.x, pixel.y) * uRatio);
          float rim = min(1.8, 0.14 / (max(pixel.x, pixel.y) * uRatio));
          if (vPosition == uHead && uStrike <= 0.0) c = mix(uGround, uOutline, 1.0 - smoothstep(1.0, 2.0, d));
          else if (vKind != 1) {
            float gap = smoothstep(1.0, 1.8, d) * (1.0 - smoothstep(2.4, 3.4, d));
            c = mix(role, mix(uBg, role, 0.12), gap * (1.0 - small));
            c = mix(c, mix(role, uInk, 0.6), small * (1.0 - smoothstep(0.6, 1.4, d)));
          }
          if (vPosition == uArgmax) c = mix(uBeam, c, smoothstep(rim, rim + 0.8, d));
          if (vPosition == uHovered) c = mix(uInk, c, smoothstep(1.2, 2.0, d));
          if (vFace == 1) c = mix(uBg, c, 0.78);
        } else {
          c = mix(uBg, role, 0.42);
          if (vPosition == uHead && uStrike <= 0.0) c = uOutline;
        }
        colour = vec4(c, 1.0);
      }`,
  });
}

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
      flat out ivec2 vRange;
      void main() {
        vRange = rangeOf(gl_InstanceID);
        int p = vRange.y;
        vFace = int(face + 0.5);
        vAt = vec3(across(vRange, position.x), position.yz);
        float lift = 0.0;
        float high = ${TILE.high};
        if (p == uHead && uStrike < 1.0) {
          if (uStrike > 0.0) lift = 2.6 * pow(1.0 - uStrike, 2.0); else high = 0.02; // it drops in from the head
        }
        gl_Position = toClip(vec3(vAt.x, position.y * high + lift, position.z * ${TILE.long}));
      }`,
    fragment: /* glsl */ `${FRAGMENT}
      in vec3 vAt;
      flat in int vFace;
      flat in ivec2 vRange;
      void main() {
        float x;
        int position = tokenAt(vRange, vAt.x, x);
        int kind = stateOf(position, 0);
        vec3 role = kind == 1 ? uGenerated : uPrompt;
        vec3 c = role;
        if (vFace <= 1) {
          float deep = vFace == 0 ? vAt.z : vAt.y - 0.5;
          vec2 pixel = fwidth(vec2(positionAt(vAt.x) / ${TILE.wide}, deep)) + 1e-6;
          vec2 edge = (0.5 - abs(vec2(x, deep))) / pixel; // device pixels from the nearest edges
          float narrow = smoothstep(0.4, 0.7, pixel.x * uRatio);
          float d = min(mix(edge.x, 9.0 * uRatio, narrow), edge.y) / uRatio;
          float small = smoothstep(0.055, 0.1, max(pixel.x, pixel.y) * uRatio);
          float rim = min(1.8, 0.14 / (max(pixel.x, pixel.y) * uRatio));
          if (position == uHead && uStrike <= 0.0) c = mix(uGround, uOutline, 1.0 - smoothstep(1.0, 2.0, d));
          else if (kind != 1) {
            float gap = smoothstep(1.0, 1.8, d) * (1.0 - smoothstep(2.4, 3.4, d));
            c = mix(role, mix(uBg, role, 0.12), gap * (1.0 - small));
            c = mix(c, mix(role, uInk, 0.6), small * (1.0 - smoothstep(0.6, 1.4, d)));
          }
          if (position == uArgmax) c = mix(uBeam, c, smoothstep(rim, rim + 0.8, d));
          if (position == uHovered) c = mix(uInk, c, smoothstep(1.2, 2.0, d));
          if (vRange.x < vRange.y) c = mix(uBg, c, ownPart(x, pixel.x * uRatio));
          if (vFace == 1) c = mix(uBg, c, 0.78);
        } else {
          c = mix(uBg, role, 0.42);
          if (position == uHead && uStrike <= 0.0) c = uOutline;
        }
        colour = vec4(c, 1.0);
      }`,
  });
}

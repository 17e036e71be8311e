// The cache: an upright wall, one instanced box per token, sliced into its layers from the top down by the fragment
// shader, which reads each cell's state. A kept cell is a solid block; a computed and discarded one is a thin,
// hollow, hatched plate; what is not there is an empty one. 12 triangles a token, for any number of layers; the older
// tokens, where they are narrow, have one box together, which the shader slices into columns too.

import { box } from "./box";
import { Part } from "./device";
import { FRAGMENT, type FrameUniforms, VERTEX } from "./glsl";
import { FRONT, TILE } from "./pose";

export function makeColumns(gl: WebGL2RenderingContext, uniforms: FrameUniforms): Part {
  return new Part(gl, {
    ...box(),
    uniforms,
    vertex: /* glsl */ `${VERTEX}
      in vec3 position;
      in float face;
      out vec3 vAt; // place, in layers from the top, into the depth
      flat out int vFace;
      flat out ivec2 vRange;
      void main() {
        vRange = rangeOf(gl_InstanceID);
        vFace = int(face + 0.5);
        int state = stateOf(vRange.y, uRow + 1);
        bool solid = state == 1 || state == 4 || (state == 5 && uFallen < 1.0) || (state == 2 && uCache > 0.5);
        float deep = solid ? ${TILE.long} : 0.05;
        float part = solid && vRange.x == vRange.y ? uThin : 1.0;
        vAt = vec3(across(vRange, position.x * part), (1.0 - position.y) * uBoard.z, position.z);
        float y = -uBoard.x - (1.0 - position.y) * uBoard.y;
        if ((state == 3 || state == 5) && uFallen < 1.0) y -= 0.8 * uBoard.y * uFallen * uFallen;
        gl_Position = toClip(vec3(vAt.x, y, ${FRONT} - (0.5 - position.z) * deep));
      }`,
    fragment: /* glsl */ `${FRAGMENT}
      in vec3 vAt;
      flat in int vFace;
      flat in ivec2 vRange;
      void main() {
        float x;
        int position = tokenAt(vRange, vAt.x, x);
        float along = clamp(vAt.y, 0.0, uBoard.z - 1e-3);
        float layer = floor(along);
        float at = along - layer;
        int state = stateOf(position, int(layer) + 1);
        float high = max(fwidth(vAt.y), 1e-5) * uRatio; // of a CSS pixel, in layers
        float wide = max(fwidth(vFace == 2 ? vAt.z : positionAt(vAt.x) / ${TILE.wide}), 1e-5) * uRatio;
        float narrow = smoothstep(0.4, 0.7, wide); // columns of few pixels lose their edges
        bool kept = state == 1 || state == 4 || state == 5;
        bool grows = state == 2 || state == 3;
        bool falls = (state == 3 || state == 5) && uFallen < 1.0; // thrown away, to be computed again
        bool done = !grows || falls || along < uBoard.w;
        float small = smoothstep(0.2, 0.45, high); // cells of few pixels lose their gaps
        float edgeS = min(at, 1.0 - at) / high; // CSS pixels
        float edgeX = vFace == 1 ? mix((0.5 - abs(x)) / wide, 9.0, narrow) : 9.0;
        float gap = mix(smoothstep(0.1, 0.9, edgeS), 1.0, 0.25 + 0.6 * small);
        if (vFace == 0 || vFace == 3) { gap = 1.0; edgeS = 9.0; }
        float block = mod(mod(along, uGroup.y), uGroup.x);
        float part = uGroup.x > 1.0 && vFace != 0 && vFace != 3 ? smoothstep(0.6, 1.6, min(block, uGroup.x - block) / high) : 1.0;
        float outline;
        vec3 ground = uGround;
        vec3 c;
        bool scratch = state == 3 || (state == 2 && uCache < 0.5);
        bool none = state == 0 || (state == 5 && !falls);
        if (none || !done) {
          outline = max(1.0 - smoothstep(0.8, 1.6, edgeX), (1.0 - smoothstep(0.3, 1.0, edgeS)) * (1.0 - small));
          c = mix(ground, uOutline, outline * 0.8);
        } else if (scratch) {
          vec3 role = state == 3 ? uRecomputed : uFresh;
          float stripe = fract((gl_FragCoord.x + gl_FragCoord.y) / (7.0 * uRatio));
          float hatch = smoothstep(0.0, 0.14, stripe) * (1.0 - smoothstep(0.42, 0.56, stripe));
          c = mix(mix(ground, role, 0.17), role, hatch * 0.92);
          c = mix(c, role, 1.0 - smoothstep(1.0, 1.8, edgeX));
          c = falls ? mix(c, ground, uFallen) : mix(c, role, uHeat * 0.75);
          c = mix(ground, c, mix(gap, 1.0, 0.3) * part);
        } else {
          c = kept ? mix(uBg, uKept, 0.92) : uFresh;
          if (falls) c = mix(c, ground, uFallen);
          if (state == 4) { // dotted: other runs use this page, too
            vec2 dot = fract(gl_FragCoord.xy / (7.0 * uRatio)) - 0.5;
            c = mix(c, uDark > 0.5 ? uInk : uBg, 1.0 - smoothstep(0.16, 0.26, length(dot)));
          }
          c = mix(mix(c, ground, 0.78), c, gap * part);
        }
        if (done && !none && vFace == 1 && wide < 0.11) { // two halves: the key, and the value
          c = mix(c, ground, x > 0.0 ? 0.24 : 0.0);
          c = mix(c, ground, 0.8 * (1.0 - smoothstep(0.4, 0.9, abs(x) / wide)));
        }
        if (done && !none) {
          if (grows && !falls && uHeat > 0.0) {
            float since = (uBoard.w - along);
            float front = 1.0 - smoothstep(0.0, 0.7 + high, since + 9.0 * step(uBoard.z - 0.01, uBoard.w));
            c = mix(c, uInk, 0.9 * front); // the front of the work, as it passes
          }
        }
        if (vRange.x < vRange.y && vFace != 2) c = mix(mix(ground, c, 0.4), c, ownPart(x, wide));
        // The light comes from above and the left: each block is lighter at its top, and its side is in the shade.
        float lit = vFace == 1 ? 1.0 : vFace == 2 ? 0.5 : 0.86;
        bool there = done && !none;
        if (there && vFace == 1) c = mix(c, at < 0.5 ? vec3(1.0) : vec3(0.0), 0.28 * small * abs(at - 0.5));
        if (there && vFace == 0) c = mix(c, vec3(1.0), 0.16);
        c = mix(uDark > 0.5 ? uBg : vec3(0.0), c, lit);
        if (int(layer) == uLayer) {
          c = mix(c, uDark > 0.5 || !kept ? uInk : uBg, (none ? 0.16 : 0.3) * lit);
          float rim = 1.0 - smoothstep(0.7, 1.5, min(at, 1.0 - at) / high);
          if (vFace == 1 || vFace == 2) c = mix(c, uInk, rim * (vFace == 1 ? 0.6 : 0.4));
        }
        if (position == uHovered) c = mix(c, uInk, 0.14 * lit);
        colour = vec4(c, 1.0);
      }`,
  });
}

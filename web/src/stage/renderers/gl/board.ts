// The board behind the tokens and the wall, or under them where TOP folds it flat: one quad. Its shader draws the ground of
// the cache, the free slots, the band of the hovered column and of the selected layer. One draw call, two triangles.

import { Part } from "./device";
import { FRAGMENT, type FrameUniforms, VERTEX } from "./glsl";

export function makeBoard(gl: WebGL2RenderingContext, uniforms: FrameUniforms): Part {
  return new Part(gl, {
    uniforms,
    vertices: { position: [[0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0], 3] },
    index: [0, 2, 1, 0, 3, 2],
    vertex: /* glsl */ `${VERTEX}
      in vec3 position;
      uniform float uEnd;
      out vec2 vPlace;
      void main() {
        float x = mix(-1.6, uEnd + 1.6, position.x);
        float s = mix(-0.9, uBoard.x + uBoard.y + 0.35, position.y);
        vPlace = vec2(x, s);
        float behind = -0.44 * uSlope.y;
        gl_Position = toClip(vec3(x, -s * uSlope.y - 0.02, s * uSlope.x + behind));
      }`,
    fragment: /* glsl */ `${FRAGMENT}
      in vec2 vPlace;
      void main() {
        vec2 pixel = fwidth(vPlace) + 1e-6;
        float x = vPlace.x, s = vPlace.y;
        float folded = uSlope.x; // 1 where the strip lies on the ground, 0 where it hangs
        float inWall = smoothstep(uBoard.x - 0.12, uBoard.x - 0.12 + pixel.y, s) * step(0.05, uBoard.y);
        // Behind an upright wall there is only its shade, which fades to the foot.
        float shade = 0.5 * (1.0 - smoothstep(uBoard.x, uBoard.x + uBoard.y, s));
        vec3 c = mix(mix(uBg, uGround, 0.45 * folded), uGround, inWall * mix(shade, 1.0, folded));
        float at = positionAt(x);
        float near = floor(at + 0.5);
        float across = at - near; // from the middle of a column
        bool slot = near > float(uHead) && x <= uEnd + 0.5;
        // The rail that the write head rides on, and the front edge of the row.
        c = mix(c, uLine, folded * stroke(s + 0.6, pixel.y * 0.7, pixel.y));
        c = mix(c, uLine, folded * 0.8 * stroke(s - 0.52, pixel.y * 0.5, pixel.y));
        // Slots that are still free.
        if (slot) {
          float dot = length(vec2(across, s + 0.2 * uSlope.y));
          c = mix(c, uLine, 1.0 - smoothstep(0.05, 0.05 + pixel.x, dot));
        }
        float inColumn = step(abs(across), 0.5);
        if (int(near) == uHovered) c = mix(c, uInk, 0.13 * inColumn);
        if (int(near) == uHead && near >= 0.0) {
          float frame = max(abs(across) - 0.49, abs(s) - 0.49);
          float corner = step(0.22, abs(across)) * step(0.22, abs(s));
          c = mix(c, uAccent, folded * stroke(frame, max(pixel.x, 0.025), pixel.x) * corner);
        }
        // The band of the selected layer.
        float row = (s - uBoard.x) / uBoard.y * uBoard.z - float(uLayer);
        if (uBoard.y > 0.05 && at > -0.5 && at < float(uHead) + 0.5) {
          float high = fwidth(row);
          c = mix(c, uInk, 0.5 * max(stroke(row, high * 0.6, high), stroke(row - 1.0, high * 0.6, high)));
          c = mix(c, uInk, 0.1 * step(0.0, row) * step(row, 1.0));
        }
        if (s < -0.5 && folded < 0.5) discard; // above the tokens there is nothing behind the beams
        float fade = smoothstep(-1.6, -0.7, x) * (1.0 - smoothstep(uEnd + 0.6, uEnd + 1.6, x));
        colour = vec4(mix(uBg, c, fade), 1.0);
      }`,
  });
}

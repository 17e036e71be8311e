// Shared by the shaders of the scene: the uniforms of a frame, and the cells' states, one byte each, four to a texel of an integer-addressed texture (a row is a position; byte 0 is the kind of token, then
// layers).

import type { Palette, Rgb } from "../theme";
import type { Texture, Uniform } from "./device";
import { TILE } from "./pose";

export const NOWHERE = -99; // a position that no token has

export function frameUniforms(states: Texture) {
  return {
    uStates: { value: states },
    viewMatrix: numbers(16),
    projectionMatrix: numbers(16),
    uSlope: numbers(2), // cosine and sine of the strip of labels
    uBoard: numbers(4), // from the tokens to the wall, its height, layers, layers filled
    uGroup: numbers(2), // layers of a block, and of a wall
    uFirst: { value: 0 }, // positions: the first in view, the first with a box of its own, and the last in view
    uOwn: { value: 0 },
    uLast: { value: 0 },
    uRow: { value: 0 }, // the layer whose cells say whether a column is kept: one that attends
    uFold: numbers(2), // the position from which each token has a slot, and the part of one that the older have
    uHead: { value: 0 },
    uStrike: { value: 1 },
    uHovered: { value: NOWHERE },
    uArgmax: { value: NOWHERE },
    uLayer: { value: 0 },
    uThin: { value: 1 }, // width of a kept column
    uHeat: { value: 0 }, // 1 while cells are being computed, 0 at rest
    uRatio: { value: 1 },
    uSize: numbers(2), // of the canvas, CSS pixels
    uEnd: { value: 0 }, // last slot of the board
    uBg: numbers(3),
    uPanel: numbers(3),
    uInk: numbers(3),
    uLine: numbers(3),
    uAccent: numbers(3),
    uPrompt: numbers(3),
    uGenerated: numbers(3),
    uKept: numbers(3),
    uFresh: numbers(3),
    uRecomputed: numbers(3),
    uBeam: numbers(3),
    uGround: numbers(3),
    uOutline: numbers(3),
    uDark: { value: 1 },
    uCache: { value: 1 },
    uFallen: { value: 1 }, // of the columns that were thrown away: 1 is gone
  };
}

export type FrameUniforms = ReturnType<typeof frameUniforms>;

const numbers = (count: number): Uniform<Float32Array> => ({ value: new Float32Array(count) });

export function setColours(uniforms: FrameUniforms, palette: Palette): void {
  const set = (uniform: Uniform<Float32Array>, rgb: Rgb) => uniform.value.set(rgb);
  set(uniforms.uBg, palette.bg);
  set(uniforms.uPanel, palette.panel);
  set(uniforms.uInk, palette.ink);
  set(uniforms.uLine, palette.line);
  set(uniforms.uAccent, palette.accent);
  set(uniforms.uPrompt, palette.prompt);
  set(uniforms.uGenerated, palette.generated);
  set(uniforms.uKept, palette.kept);
  set(uniforms.uFresh, palette.fresh);
  set(uniforms.uRecomputed, palette.recomputed);
  set(uniforms.uBeam, palette.beam);
  set(uniforms.uGround, palette.ground);
  set(uniforms.uOutline, palette.outline);
  uniforms.uDark.value = palette.dark ? 1 : 0;
}

const FOLD = /* glsl */ `
uniform vec2 uFold;
// Where a position stands, in units, and how much of a unit it has; as in pose.ts.
float placeOf(float p) {
  return (p + 0.5 < uFold.x ? (p + 0.5) * uFold.y : uFold.x * (uFold.y - 1.0) + p + 0.5) - 0.5;
}
float partOf(float p) { return p + 0.5 < uFold.x ? uFold.y : 1.0; }
float positionAt(float x) {
  return (x + 0.5 < uFold.x * uFold.y ? (x + 0.5) / uFold.y : x + 0.5 - uFold.x * (uFold.y - 1.0)) - 0.5;
}
`;

export const VERTEX = /* glsl */ `
precision highp float;
precision highp int;
uniform mat4 viewMatrix;
uniform mat4 projectionMatrix;
uniform vec2 uSlope;
uniform vec4 uBoard;
uniform int uFirst, uOwn, uLast, uRow;
uniform int uHead;
uniform float uStrike;
uniform float uCache;
uniform float uFallen, uThin;
uniform highp sampler2D uStates;

${FOLD}
// The positions of an instance, nearest first; the last one may be a box of all tokens before uOwn.
ivec2 rangeOf(int instance) {
  int p = max(uLast - instance, uOwn - 1);
  return ivec2(p < uOwn ? uFirst : p, p);
}
// The place of a point of its box that is x from the middle.
float across(ivec2 range, float x) {
  vec2 at = vec2(range);
  if (range.x == range.y) return placeOf(at.x) + x * ${TILE.wide} * partOf(at.x);
  return mix(placeOf(at.x) - 0.5 * partOf(at.x), placeOf(at.y) + 0.5 * partOf(at.y), x + 0.5);
}
vec4 toClip(vec3 place) { return projectionMatrix * (viewMatrix * vec4(place, 1.0)); }
int stateOf(int position, int index) {
  return int(texelFetch(uStates, ivec2(index >> 2, position), 0)[index & 3] * 255.0 + 0.5);
}
`;

export const FRAGMENT = /* glsl */ `
precision highp float;
precision highp int;
uniform vec2 uSlope;
uniform vec4 uBoard;
uniform int uHead;
uniform int uHovered;
uniform int uArgmax;
uniform int uLayer;
uniform vec2 uGroup;
uniform float uStrike;
uniform float uHeat;
uniform float uRatio;
uniform float uEnd;
uniform float uDark;
uniform float uCache;
uniform float uFallen, uThin;
uniform vec3 uBg, uPanel, uInk, uLine, uAccent, uPrompt, uGenerated, uKept, uFresh, uRecomputed, uBeam;
uniform vec3 uGround, uOutline;
uniform highp sampler2D uStates;
layout(location = 0) out highp vec4 colour;
${FOLD}
int stateOf(int position, int index) {
  return int(texelFetch(uStates, ivec2(index >> 2, position), 0)[index & 3] * 255.0 + 0.5);
}
// Which token of a box is at a place, and where across its own box: -0.5 to 0.5, and beyond that the gap.
int tokenAt(ivec2 range, float place, out float x) {
  float at = positionAt(place);
  int position = clamp(int(floor(at + 0.5)), range.x, range.y);
  x = (at - float(position)) / ${TILE.wide};
  return position;
}
// How much of a pixel is the token and not the gap beside it: x across its box, of which a pixel has so much.
float ownPart(float x, float wide) {
  float part = clamp((0.5 - abs(x)) / wide + 0.5, 0.0, 1.0);
  return mix(part, ${TILE.wide}, smoothstep(0.4, 0.7, wide));
}
// 1 within half a width of a line at 0, softened over a pixel.
float stroke(float distance, float halfWidth, float pixel) {
  return 1.0 - smoothstep(halfWidth - pixel * 0.5, halfWidth + pixel * 0.5, abs(distance));
}
`;

// What the shaders of the scene share: the uniforms of a frame, and the cells' states, one byte each, four to a texel of an integer-addressed texture (a row is a position; byte 0 is the kind of token, then
// layers).

import { Color, type DataTexture, Vector2, Vector4 } from "three";
import type { Palette, Rgb } from "../theme";

export const NOWHERE = -99; // a position that no token has

export function frameUniforms(states: DataTexture) {
  return {
    uStates: { value: states },
    uSlope: { value: new Vector2() }, // cosine and sine of the strip of labels
    uBoard: { value: new Vector4() }, // from the tokens to the wall, its height, layers, layers filled
    uFirst: { value: 0 }, // position of the first instance
    uFold: { value: new Vector2(0, 1) }, // the position from which each token has a slot, and the part of one that the older have
    uHead: { value: 0 },
    uStrike: { value: 1 },
    uHovered: { value: NOWHERE },
    uArgmax: { value: NOWHERE },
    uLayer: { value: 0 },
    uHeat: { value: 0 }, // 1 while cells are being computed, 0 at rest
    uRatio: { value: 1 },
    uSize: { value: new Vector2(1, 1) }, // of the canvas, CSS pixels
    uEnd: { value: 0 }, // last slot of the board
    uBg: colour(),
    uPanel: colour(),
    uInk: colour(),
    uLine: colour(),
    uAccent: colour(),
    uPrompt: colour(),
    uGenerated: colour(),
    uKept: colour(),
    uFresh: colour(),
    uRecomputed: colour(),
    uBeam: colour(),
    uGround: colour(),
    uOutline: colour(),
    uDark: { value: 1 },
    uCache: { value: 1 },
    uFallen: { value: 1 }, // of the columns that were thrown away: 1 is gone
  };
}

export type FrameUniforms = ReturnType<typeof frameUniforms>;

const colour = () => ({ value: new Color() });

export function setColours(uniforms: FrameUniforms, palette: Palette): void {
  const set = (uniform: { value: Color }, [r, g, b]: Rgb) => uniform.value.setRGB(r, g, b);
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
uniform int uFirst;
uniform int uHead;
uniform float uStrike;
uniform float uCache;
uniform float uFallen;
uniform highp sampler2D uStates;

${FOLD}
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
uniform float uStrike;
uniform float uHeat;
uniform float uRatio;
uniform float uEnd;
uniform float uDark;
uniform float uCache;
uniform float uFallen;
uniform vec3 uBg, uPanel, uInk, uLine, uAccent, uPrompt, uGenerated, uKept, uFresh, uRecomputed, uBeam;
uniform vec3 uGround, uOutline;
uniform highp sampler2D uStates;
layout(location = 0) out highp vec4 colour;
${FOLD}
int stateOf(int position, int index) {
  return int(texelFetch(uStates, ivec2(index >> 2, position), 0)[index & 3] * 255.0 + 0.5);
}
// 1 within half a width of a line at 0, softened over a pixel.
float stroke(float distance, float halfWidth, float pixel) {
  return 1.0 - smoothstep(halfWidth - pixel * 0.5, halfWidth + pixel * 0.5, abs(distance));
}
`;

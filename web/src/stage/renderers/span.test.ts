import { describe, expect, it } from "vitest";
import { positionIn, slotOf, spanOf } from "./span";

describe("the span of a view", () => {
  it("holds all tokens at any length and width, the newest a slot each", () => {
    for (const width of [330, 700, 1200, 1900])
      for (const tokens of [1, 12, 30, 36, 60, 400, 2000]) {
        const span = spanOf("side", tokens, width);
        expect(slotOf(span, 0)).toBe(0);
        expect(slotOf(span, tokens)).toBeLessThanOrEqual(span.count - 1);
        const full = Math.min(tokens, width < 400 ? 12 : 24);
        expect(slotOf(span, tokens) - slotOf(span, tokens - full)).toBeCloseTo(full);
        expect(width / span.count).toBeGreaterThanOrEqual(16);
      }
  });

  it("finds the position that stands in a slot", () => {
    const span = spanOf("side", 400, 1200);
    for (const position of [0, 10, 375.5, 376, 399])
      expect(positionIn(span, slotOf(span, position))).toBeCloseTo(position);
  });
});

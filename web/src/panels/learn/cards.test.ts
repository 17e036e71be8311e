import { describe, expect, it } from "vitest";
import { CARDS, words } from "./cards";

describe("the cards", () => {
  it("are eight, each in three levels, the first of at most 60 words", () => {
    expect(CARDS.map(({ id }) => id)).toEqual([
      "loop",
      "phases",
      "qkv",
      "notebook",
      "savings",
      "dial",
      "smaller",
      "training",
    ]);
    for (const { id, short, full, formulas } of CARDS) {
      expect(words(short), id).toBeLessThanOrEqual(60);
      expect(words(short), id).toBeGreaterThan(40);
      expect(words(full.join(" ")), id).toBeGreaterThan(words(short));
      expect(formulas.length, id).toBeGreaterThanOrEqual(2);
    }
  });
});

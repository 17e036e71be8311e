import { describe, expect, it } from "vitest";
import { endsOf, placeAt, slownessOf } from "./race-clock";

describe("the clock of a race", () => {
  it("gives each lane its own measured times from one start", () => {
    const [fast, slow] = [endsOf([10, 10, 10, 10]), endsOf([10, 40, 80, 120])];
    expect([placeAt(fast, 0), placeAt(slow, 0)]).toEqual([
      { done: 0, part: 0, over: false },
      { done: 0, part: 0, over: false },
    ]);
    expect(placeAt(fast, 30)).toEqual({ done: 3, part: 0, over: false });
    expect(placeAt(slow, 30)).toEqual({ done: 1, part: 0.5, over: false }); // it has fallen behind
    expect(placeAt(fast, 40)).toEqual({ done: 4, part: 0, over: true });
    expect(placeAt(slow, 249).over).toBe(false);
    expect(placeAt(slow, 250)).toEqual({ done: 4, part: 0, over: true });
  });

  it("is slow enough to be seen, and never faster than the engine", () => {
    expect(slownessOf(300_000)).toBe(40);
    expect(slownessOf(60e6)).toBe(1);
  });
});

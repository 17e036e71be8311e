import { expect, test } from "vitest";
import { keepStamp, Layout } from "./layout";

const word = (x: number, y: number) => ({ text: "L4 H3", x, y, size: 11, alignX: 0, colour: [0, 0, 0] as const });

test("no word stands under the stamp of a recorded run", () => {
  for (const [width, under, free] of [
    [390, 280, 20],
    [1200, 20, 280],
  ] as const) {
    const layout = new Layout(() => 40, width, 300);
    expect(layout.add(word(width - 60, under))).toBe(true);
    const stamped = new Layout(() => 40, width, 300);
    keepStamp(stamped, width, 300);
    expect(stamped.add(word(width - 60, under))).toBe(false);
    expect(stamped.add(word(width - 60, free))).toBe(true);
    expect(stamped.add(word(100, under))).toBe(true);
    expect(stamped.placed.length).toBe(2);
  }
});

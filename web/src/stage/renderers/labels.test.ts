import { expect, test } from "vitest";
import { groupOf, layerTicks } from "./labels";

test("layers that are low are drawn in blocks, and named by them", () => {
  expect([36, 13, 12.9, 7.3, 5, 3.6, 1].map(groupOf)).toEqual([1, 1, 2, 5, 5, 5, 20]);
  const named = layerTicks(30, 7.3, 4).sort((a, b) => a - b);
  expect(named).toEqual([0, 4, 10, 15, 20, 25, 29]);
});

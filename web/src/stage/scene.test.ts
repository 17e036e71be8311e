import { expect, test } from "vitest";
import { Cell } from "./renderers/renderer";
import { rewritten, statesOf } from "./scene";

test("a layer with a state keeps nothing of a token once the next one is computed", () => {
  const [kept, fresh, empty] = [Cell.kept, Cell.fresh, Cell.empty];
  const states = statesOf([0, null, 64]);
  expect(states).toEqual([0]);
  const wall = Uint8Array.from([kept, kept, kept, fresh, fresh, fresh, empty, empty, empty]);
  expect([...rewritten(wall, 3, states)]).toEqual([empty, kept, kept, fresh, fresh, fresh, empty, empty, empty]);
});

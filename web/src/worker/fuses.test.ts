import { expect, test } from "vitest";
import { MODULE, fuses } from "./fuses";

test("the probe is a valid module but for its one operation, which not every engine knows", async () => {
  const bytes = new Uint8Array(MODULE);
  const at = MODULE.indexOf(0x85); // relaxed_madd, in two bytes, becomes bitselect: also of three vectors
  bytes.set([0xd2, 0x00], at);
  expect(WebAssembly.validate(bytes)).toBe(true);
  expect(WebAssembly.validate(new Uint8Array(MODULE)) || !(await fuses())).toBe(true);
});

// Every language has all strings of the page, and no other: a string outside of the catalogues is found here.

import { describe, expect, test } from "vitest";
import { catalogue, codes, faults } from "./languages.mjs";

const HANGS = 300_000; // ms; it reads all sources, with a machine that may be busy

describe.each(codes())("%s", (code) => {
  test(
    "has a translation of every string, with the same places in it",
    () => {
      expect(faults(catalogue(code))).toEqual([]);
    },
    HANGS,
  );
});

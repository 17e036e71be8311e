import { expect, it } from "vitest";
import { format, parse, type Link } from "./hash";

it("brings back what it wrote", () => {
  const link: Link = {
    prompt: "a & b\n= “c”#",
    seed: 7,
    temperature: 0,
    sampler: { top_k: 40, top_p: 0.9, min_p: 0.05, repetition_penalty: 1.1 },
    layer: 3,
    head: 2,
    step: 12,
    tokens: 40,
    stop: "the end.\n",
    pace: null,
    cache: false,
    camera: "top",
    renderer: "2d",
    panel: "guide",
    run: "0df535ab",
    room: "teach",
    embed: true,
  };
  expect(parse(format(link))).toEqual(link);
  expect(format(link)).toContain("&T=0&k=40&tp=0.9&mp=0.05&rp=1.1&");
  expect(format({})).toBe("");
  expect(parse("#room")).toEqual({ room: "join", panel: "guide" });
});

it("leaves out a prompt that is too long, and ignores what it does not understand", () => {
  expect(format({ prompt: "x".repeat(1501), seed: 1 })).toBe("#seed=1");
  expect(parse("#face=2d")).toEqual({ renderer: "2d" }); // an older link
  expect(
    parse("#seed=-1&pace=0&cache=maybe&n=-3&T=x&k=-1&tp=0&mp=2&rp=0&layer=1.5&cam=moon&renderer=4d&other=1"),
  ).toEqual({});
});

import { expect, test } from "vitest";
import { type Block, type Inline, inline, parse } from "./markdown";

const plain = (inner: Inline[]): string => inner.map((one) => ("text" in one ? one.text : plain(one.inner))).join("");
const kinds = (blocks: Block[]) => blocks.map(({ kind }) => kind);

test("blocks are told apart", () => {
  const blocks = parse(
    "# Title\n\nOne\ntwo\n\n- a\n- b\n  - c\n\n1. x\n2. y\n\n> said\n\n---\n\n```py\nif a < b:\n    **x**\n```",
  );
  expect(kinds(blocks)).toEqual(["heading", "paragraph", "list", "list", "quote", "rule", "code"]);
  const [, , bullets, numbers, , , code] = blocks;
  expect(bullets).toMatchObject({ ordered: false, items: [[{}], [{ kind: "paragraph" }, { kind: "list" }]] });
  expect(numbers).toMatchObject({ ordered: true, start: 1 });
  expect(code).toEqual({ kind: "code", language: "py", text: "if a < b:\n    **x**" });
  expect(parse("```\nstill writ")).toEqual([{ kind: "code", language: "", text: "still writ" }]);
});

test("marks in a line, and what only looks like one", () => {
  expect(inline("a **b _c_** `**d**` *e*")).toEqual([
    { kind: "text", text: "a " },
    {
      kind: "strong",
      inner: [
        { kind: "text", text: "b " },
        { kind: "em", inner: [{ kind: "text", text: "c" }] },
      ],
    },
    { kind: "text", text: " " },
    { kind: "code", text: "**d**" },
    { kind: "text", text: " " },
    { kind: "em", inner: [{ kind: "text", text: "e" }] },
  ]);
  for (const text of ["2 * 3 * 4", "snake_case_name", "**open", "a ` b", "[x](y z)", "*"])
    expect(inline(text)).toEqual([{ kind: "text", text }]);
});

test("no address that runs something becomes a link, and no markup becomes anything but text", () => {
  expect(inline("[ok](https://example.org/a?b=1)")).toMatchObject([
    { kind: "link", href: "https://example.org/a?b=1" },
  ]);
  for (const address of [
    "javascript:alert(1)",
    "JaVaScRiPt:x",
    "data:text/html,x",
    "//evil",
    "vbscript:x",
    'https://a"onclick=x',
  ])
    expect(inline(`[x](${address})`).map(({ kind }) => kind)).not.toContain("link");
  const hostile = "<img src=x onerror=alert(1)><script>alert(1)</script>";
  expect(parse(hostile)).toEqual([{ kind: "paragraph", inner: [{ kind: "text", text: hostile }] }]);
});

test("no text is lost or takes long", () => {
  for (const piece of ["*", "_", "`", "[", "](", "> ", "- ", "**a ", "1. ", "~~~"]) {
    const text = piece.repeat(20_000);
    const blocks = parse(text); // a quadratic reader does not end in the time of a test
    expect(blocks.length).toBeGreaterThan(0);
  }
  expect(plain(inline("a **b** *c* `d`"))).toBe("a b c d");
});

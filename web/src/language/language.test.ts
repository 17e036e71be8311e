import { expect, test, vi } from "vitest";
import { h, type VNode } from "preact";

/** The page's language module in a German browser, with a catalogue. */
async function german(catalogue: Record<string, string>) {
  vi.resetModules();
  const page = { getElementById: () => null, documentElement: {} as Record<string, string> };
  vi.stubGlobal("document", page);
  vi.stubGlobal("navigator", { languages: ["fr", "de-AT", "en"] });
  vi.stubGlobal("fetch", () => Promise.resolve({ json: () => Promise.resolve(catalogue) }));
  const own = await import("./language");
  await own.loading;
  return { ...own, page };
}

test("a text is translated by its pattern, and what stands in its places as well", async () => {
  const { language, page, translated } = await german({
    "{0} tokens": "{0} Token",
    "The cache had {0} of {1}.": "Von {1} hatte der Cache {0}.",
    "{0} of {1}": "{0} von {1}",
    "{0} head": "Kopf {0}",
    "the check was cancelled": "die Prüfung wurde abgebrochen",
  });
  expect([language, page.documentElement.lang, page.documentElement.dir]).toEqual(["de", "de", "ltr"]);
  expect(translated("The cache had 5 of 64 tokens.")).toBe("Von 64 Token hatte der Cache 5.");
  expect(translated(" 5 of 64\u00a0tokens ")).toBe(" 5 von 64 Token ");
  expect(translated("The check was cancelled.")).toBe("Die Prüfung wurde abgebrochen.");
  expect(translated("The history of France")).toBe("The history of France"); // a short pattern, met by chance
  expect(translated("5.3")).toBe("5.3");
});

test("a long text that is not the page's own takes no longer to look at", async () => {
  const { missed, translated, verbatim } = await german({ head: "Kopf", tail: "Ende", "{0} of {1}": "{0} von {1}" });
  const long = Array.from({ length: 4000 }, (_, at) => (at % 2 ? "head" : `tail${at}`)).join(", ");
  expect(translated(long)).toBe(long);
  expect(translated(verbatim(long))).toBe(verbatim(long));
  expect(translated(long.slice(0, 900))).toBe(long.slice(0, 900));
  expect(missed.size).toBe(2);
});

test("elements keep their places, and words of the model stay", async () => {
  const { missed, translated, verbatim } = await german({
    "{0} reads {1} now": "Jetzt liest {0} {1}",
    head: "Kopf",
    "Close {0}": "{0} schließen",
  });
  const [first, second] = [h("b", {}, "head"), h("i", {}, verbatim("head"))];
  const made = h("p", { title: "Close “\u2060head”" }, first, " reads ", second, null, " now") as VNode<{
    children: unknown;
    title: string;
  }>;
  expect(first.props.children).toBe("Kopf");
  expect(second.props.children).toBe("\u2060head");
  expect(made.props.title).toBe("“\u2060head” schließen");
  expect(made.props.children).toEqual(["Jetzt liest ", first, " ", second, null]);
  expect(h("p", { translate: false }, "head").props.children).toBe("head");
  // A pattern fits these words of the model, with the page's own and without.
  expect(translated(verbatim("She reads it now"))).toBe("\u2060She reads it now");
  const beside = h("p", {}, "Close ", verbatim("head, Close head")) as VNode<{ children: unknown }>;
  expect(beside.props.children).toEqual([verbatim("head, Close head"), " schließen"]);
  expect(translated("unknown words")).toBe("unknown words");
  expect([...missed]).toEqual(["unknown words"]);
});

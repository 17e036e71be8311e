import { expect, test } from "vitest";
import { type Heard, chunk, read } from "./sse";

const line = (value: unknown): string => `data: ${JSON.stringify(value)}\n\n`;

test("chunks are read however their bytes are cut", async () => {
  const whole =
    line({ choices: [{ delta: { role: "assistant", content: "" } }] }) +
    line({ choices: [{ delta: { content: "caf\u00e9 \u{1F600}" } }] }) +
    ": ping\n\n" +
    line({ choices: [{ text: " more" }] }) +
    line({ choices: [{ delta: {}, finish_reason: "stop" }] }) +
    line({ choices: [], usage: { prompt_tokens: 9 }, timings: { decode_ms: 2 } }) +
    "data: [DONE]\n\n";
  const bytes = new TextEncoder().encode(whole);
  for (const size of [1, 7, bytes.length]) {
    const parts: Heard[] = [];
    const stream = new ReadableStream<Uint8Array>({
      start(controller) {
        for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
        controller.close();
      },
    });
    await read(stream, (found) => parts.push(found));
    expect(parts.map(({ text }) => text).join("")).toBe("caf\u00e9 \u{1F600} more");
    expect(parts.some(({ finish }) => finish === "stop")).toBe(true);
    expect(parts.at(-1)?.usage?.prompt_tokens).toBe(9);
    expect(parts.at(-1)?.timings?.decode_ms).toBe(2);
  }
});

test("a failure in the stream is an error", () => {
  expect(() => chunk('data: {"error": {"message": "the engine failed"}}')).toThrow("the engine failed");
});

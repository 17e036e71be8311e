import { expect, test, vi } from "vitest";
import { PageWorker, type Asked, type Told } from "./client";

class FakeWorker {
  static last: FakeWorker;
  onmessage: ((event: { data: Told }) => void) | null = null;
  asked: Asked[] = [];
  ended = false;
  constructor() {
    FakeWorker.last = this;
  }
  postMessage(message: Asked): void {
    this.asked.push(message);
  }
  terminate(): void {
    this.ended = true;
  }
  tell(told: Told): void {
    this.onmessage?.({ data: told });
  }
}
vi.stubGlobal("Worker", FakeWorker);

function page(): [PageWorker, FakeWorker] {
  const made = new PageWorker("engine/");
  FakeWorker.last.tell({ kind: "loading", key: 0, loading: { phase: "ready", done: 9, total: 9, message: "" } });
  return [made, FakeWorker.last];
}

test("an answer in parts is a response", async () => {
  const [server, worker] = page();
  expect(worker.asked).toEqual([{ kind: "load", folder: "engine/", device: "cpu" }]);
  const asked = server.ask("runs", { method: "POST", body: "{}" });
  expect(worker.asked[1]).toEqual({ kind: "ask", key: 1, method: "POST", path: "runs", body: "{}" });
  worker.tell({ kind: "answer", key: 1, status: 201, type: "application/json" });
  const answer = await asked;
  worker.tell({ kind: "part", key: 1, data: '{"run":' });
  worker.tell({ kind: "part", key: 1, data: '"é"}' });
  worker.tell({ kind: "end", key: 1 });
  expect([answer.status, answer.ok, await answer.json()]).toEqual([201, true, { run: "é" }]);
});

test("an answer without content has no body", async () => {
  const [server, worker] = page();
  const asked = server.ask("runs/1", { method: "DELETE" });
  worker.tell({ kind: "answer", key: 1, status: 204, type: "application/json" });
  worker.tell({ kind: "end", key: 1 });
  expect([(await asked).status, (await asked).body]).toEqual([204, null]);
});

test("a request that is aborted is left, before its answer and within it", async () => {
  const [server, worker] = page();
  const stop = new AbortController();
  const early = server.ask("race", { signal: stop.signal });
  stop.abort(new Error("stopped"));
  await expect(early).rejects.toThrow("stopped");
  expect(worker.asked.at(-1)).toEqual({ kind: "leave", key: 1 });
  const late = new AbortController();
  const asked = server.ask("race", { signal: late.signal });
  worker.tell({ kind: "answer", key: 2, status: 200, type: "text/event-stream" });
  const reader = (await asked).body!.getReader();
  worker.tell({ kind: "part", key: 2, data: "data: 1\n\n" });
  expect((await reader.read()).done).toBe(false);
  late.abort(new Error("stopped"));
  await expect(reader.read()).rejects.toThrow("stopped");
  expect(worker.asked.at(-1)).toEqual({ kind: "leave", key: 2 });
  worker.tell({ kind: "part", key: 2, data: "too late" });
  worker.tell({ kind: "end", key: 2 });
});

test("a stream hears messages until it is closed by either side", () => {
  const [server, worker] = page();
  const heard: unknown[] = [];
  const hearing = {
    message: (data: unknown) => void heard.push(data),
    closed: (code: number) => void heard.push(code),
  };
  const first = server.open("runs/1/stream", hearing);
  const second = server.open("runs/2/stream", hearing);
  expect([first.state, second.state]).toEqual([1, 1]);
  first.send("{}");
  expect(worker.asked.at(-1)).toEqual({ kind: "say", key: 1, text: "{}" });
  worker.tell({ kind: "message", key: 1, data: "a" });
  first.close();
  worker.tell({ kind: "message", key: 1, data: "b" });
  worker.tell({ kind: "closed", key: 2, code: 4404 });
  expect(heard).toEqual(["a", 4404]);
  expect([first.state, second.state]).toEqual([3, 3]);
  expect(worker.asked.filter(({ kind }) => kind === "leave")).toEqual([{ kind: "leave", key: 1 }]);
});

test("while the engine loads, its status is the only answer", async () => {
  const server = new PageWorker("engine/");
  const worker = FakeWorker.last;
  worker.tell({ kind: "loading", key: 0, loading: { phase: "loading", done: 3, total: 9, message: "" } });
  expect(await (await server.ask("status", {})).json()).toMatchObject({ phase: "loading", done: 3 });
  const refused = await server.ask("model", {});
  expect([refused.status, (await refused.json()).error.kind]).toEqual([503, "loading"]);
  expect(worker.asked.map(({ kind }) => kind)).toEqual(["load"]);
});

test("a restart ends the worker, refuses what waits for it, and closes its streams", async () => {
  const [server, first] = page();
  const heard: unknown[] = [];
  const stream = server.open("runs/1/stream", { message: () => undefined, closed: (code) => void heard.push(code) });
  const waits = server.ask("course/check", { method: "POST", body: "{}" });
  const begun = server.ask("race", {});
  first.tell({ kind: "answer", key: 3, status: 200, type: "text/event-stream" });
  const reader = (await begun).body!.getReader();
  server.restart();
  const second = FakeWorker.last;
  expect([first.ended, second === first, second.asked]).toEqual([
    true,
    false,
    [{ kind: "load", folder: "engine/", device: "cpu" }],
  ]);
  expect([(await waits).status, heard, stream.state]).toEqual([503, [4404], 3]);
  await expect(reader.read()).rejects.toThrow("starts again");
  first.tell({ kind: "loading", key: 0, loading: { phase: "ready", done: 9, total: 9, message: "" } });
  expect((await server.ask("model", {})).status).toBe(503); // what the old one still says is not heard
  second.tell({ kind: "loading", key: 0, loading: { phase: "ready", done: 9, total: 9, message: "" } });
  void server.ask("model", {});
  expect(second.asked.at(-1)).toMatchObject({ kind: "ask", path: "model" });
});

// The page's side of its worker: requests and streams by numbers, whose answers come as messages.

import type { Loading } from "../schema";
import type { Hearing, Stream } from "../visit/server";

/** What computes: the processor, or the GPU by WebGPU. */
export type Device = "cpu" | "gpu";

/** From the page. */
export type Asked =
  | { kind: "load"; folder: string; device: Device }
  | { kind: "ask"; key: number; method: string; path: string; body: string }
  | { kind: "open"; key: number; path: string }
  | { kind: "say"; key: number; text: string }
  | { kind: "leave"; key: number }
  | { kind: "offer" | "keep"; key: number; files: File[] }; // a model: what it takes; keep it for the next visit

/** From the worker: how far it is; the beginning of an answer, parts of it, its end; of a stream messages and a code. */
export type Told =
  | { kind: "loading"; key: 0; loading: Loading }
  | { kind: "answer"; key: number; status: number; type: string }
  | { kind: "part"; key: number; data: Uint8Array<ArrayBuffer> | string }
  | { kind: "end"; key: number }
  | { kind: "message"; key: number; data: ArrayBuffer | string }
  | { kind: "closed"; key: number; code: number };

interface Waiting {
  begun(answer: Response): void;
  parts: ReadableStreamDefaultController<Uint8Array> | null;
}

const EMPTY = [204, 205, 304]; // answers that have no body
const [OPEN, CLOSED] = [1, 3]; // as WebSocket has them
const GONE = 4404; // as the engine closes the stream of a run that it does not have

export class PageWorker {
  private worker!: Worker;
  private readonly waiting = new Map<number, Waiting>();
  private readonly streams = new Map<number, Hearing>();
  private last = 0;
  private loading!: Loading;

  constructor(
    private readonly folder: string,
    private readonly device: Device = "cpu",
  ) {
    this.begin();
  }

  private begin(): void {
    this.loading = { phase: "loading", done: 0, total: 0, message: "" };
    this.worker = new Worker(new URL("./engine.ts", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data }: MessageEvent<Told>) => this.hear(data);
    this.post({ kind: "load", folder: this.folder, device: this.device });
  }

  /** Ends the worker, whatever it computes, and starts another one. What waited for it is refused; its runs are gone. */
  restart(): void {
    this.worker.onmessage = null;
    this.worker.terminate();
    const [waiting, streams] = [[...this.waiting.values()], [...this.streams.values()]];
    this.waiting.clear();
    this.streams.clear();
    this.begin();
    const error = { kind: "loading", message: "The engine was stopped, and starts again." };
    for (const one of waiting) {
      one.parts?.error(new Error(error.message));
      one.begun(Response.json({ error }, { status: 503 })); // where it had not begun
    }
    for (const one of streams) one.closed(GONE);
  }

  /** Nothing but its status while the engine loads: the worker may be busy for seconds then. */
  ask(path: string, init: RequestInit): Promise<Response> {
    if (path === "status") return Promise.resolve(Response.json(this.loading));
    if (this.loading.phase !== "ready") {
      const failed = this.loading.phase === "failed";
      const error = failed
        ? { kind: "engine", message: this.loading.message }
        : { kind: "loading", message: "The engine is loading." };
      return Promise.resolve(Response.json({ error }, { status: failed ? 500 : 503 }));
    }
    const key = ++this.last;
    const { method = "GET", body = "", signal } = init;
    return new Promise((begun, refuse) => {
      const leave = (): void => {
        this.post({ kind: "leave", key });
        const one = this.waiting.get(key);
        this.waiting.delete(key);
        one?.parts?.error(signal?.reason);
        refuse(signal?.reason as Error);
      };
      if (signal?.aborted) return refuse(signal.reason as Error);
      signal?.addEventListener("abort", leave, { once: true });
      this.waiting.set(key, { begun, parts: null });
      this.post({ kind: "ask", key, method, path, body: typeof body === "string" ? body : "" });
    });
  }

  /** What a model takes, as web/python/own_model.py says, or nothing once it is kept. No files: keep none. */
  bring(kind: "offer" | "keep", files: File[]): Promise<Response> {
    const key = ++this.last;
    return new Promise((begun) => {
      this.waiting.set(key, { begun, parts: null });
      this.post({ kind, key, files });
    });
  }

  open(path: string, hearing: Hearing): Stream {
    const key = ++this.last;
    this.streams.set(key, hearing);
    this.post({ kind: "open", key, path });
    const streams = this.streams;
    return {
      get state() {
        return streams.has(key) ? OPEN : CLOSED;
      },
      send: (text) => this.post({ kind: "say", key, text }),
      close: () => {
        if (streams.delete(key)) this.post({ kind: "leave", key });
      },
    };
  }

  private post(message: Asked): void {
    this.worker.postMessage(message);
  }

  private hear(told: Told): void {
    const one = this.waiting.get(told.key);
    switch (told.kind) {
      case "loading":
        this.loading = told.loading;
        break;
      case "answer":
        one?.begun(this.answer(told.key, told.status, told.type, one));
        break;
      case "part":
        one?.parts?.enqueue(typeof told.data === "string" ? new TextEncoder().encode(told.data) : told.data);
        break;
      case "end":
        one?.parts?.close();
        this.waiting.delete(told.key);
        break;
      case "message":
        this.streams.get(told.key)?.message(told.data);
        break;
      case "closed": {
        const hearing = this.streams.get(told.key);
        this.streams.delete(told.key);
        hearing?.closed(told.code);
      }
    }
  }

  private answer(key: number, status: number, type: string, one: Waiting): Response {
    if (EMPTY.includes(status)) return new Response(null, { status });
    const start = (parts: ReadableStreamDefaultController<Uint8Array>): void => {
      one.parts = parts;
    };
    const cancel = (): void => {
      if (this.waiting.delete(key)) this.post({ kind: "leave", key });
    };
    return new Response(new ReadableStream({ start, cancel }), { status, headers: { "content-type": type } });
  }
}

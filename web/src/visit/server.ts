// Where the page asks: the server that it came from; or on a site with an engine of its own, a worker of this page, which
// answers the same paths. Nothing else in the page fetches or opens a socket.

import type { PageWorker } from "../worker/client";

/** What comes over a stream: frames and messages, then the code with which it was closed. */
export interface Hearing {
  message(data: ArrayBuffer | string): void;
  closed(code: number): void;
}

export interface Stream {
  readonly state: number; // as a WebSocket's readyState
  send(text: string): void;
  close(): void; // nothing is heard afterwards
}

const FILES = ["recorded.json", "alone.html"]; // files of the site itself
let worker: Promise<PageWorker> | null | undefined; // once it was looked for

function engine(): Promise<PageWorker> | null {
  if (worker === undefined) {
    const folder = document.querySelector<HTMLMetaElement>("meta[name=engine]")?.content;
    const begun = async (): Promise<PageWorker> => {
      const { PageWorker } = await import("../worker/client");
      void navigator.serviceWorker?.register(address("sw.js")).catch(() => undefined); // without it there is no offline
      return new PageWorker(address(folder ?? "").href, onGpu() ? "gpu" : "cpu");
    };
    worker = folder === undefined ? null : begun();
  }
  return worker;
}

/** Whether the chat in this page computes on the visitor's GPU: by an address with ?device=gpu. */
export const onGpu = (): boolean =>
  /\/chat\/?$/.test(location.pathname) && new URLSearchParams(location.search).get("device") === "gpu";

/** Whether it could: Python must wait for what a GPU promises. */
export const hasGpu = (): boolean => "gpu" in navigator && "Suspending" in WebAssembly;

/** Whether the engine is in this page, which has no server. */
export const engineHere = (): boolean => engine() !== null;

/** Hands a visitor's model to the engine in this page. */
export const bring: PageWorker["bring"] = async (kind, files) => {
  const there = engine();
  if (there === null) throw new Error("this page has no engine of its own");
  return (await there).bring(kind, files);
};

/** Ends the engine in this page, whatever it does, and starts it again. */
export const restart = async (): Promise<void> => (await engine())?.restart();

/** An address on the page's own server, also where the page is served under a path. */
export function address(path: string): URL {
  return new URL(path, document.baseURI);
}

/** As `fetch`. */
export async function ask(path: string, init: RequestInit = {}): Promise<Response> {
  const there = FILES.includes(path) ? null : engine();
  return there === null ? fetch(address(path), init) : (await there).ask(path, init);
}

/** Opens a stream of frames. */
export function open(path: string, hearing: Hearing): Stream {
  const there = engine();
  return there === null ? overNetwork(path, hearing) : overWorker(there, path, hearing);
}

function overNetwork(path: string, hearing: Hearing): Stream {
  const url = address(path);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  const socket = new WebSocket(url);
  socket.binaryType = "arraybuffer";
  socket.onmessage = (event: MessageEvent<ArrayBuffer | string>) => hearing.message(event.data);
  socket.onclose = (event) => hearing.closed(event.code);
  return {
    get state() {
      return socket.readyState;
    },
    send: (text) => socket.send(text),
    close() {
      socket.onmessage = null;
      socket.onclose = null;
      socket.close();
    },
  };
}

function overWorker(there: Promise<PageWorker>, path: string, hearing: Hearing): Stream {
  let found: Stream | null = null;
  let closed = false;
  void there.then((page) => {
    if (!closed) found = page.open(path, hearing);
  });
  return {
    get state() {
      return closed ? WebSocket.CLOSED : (found?.state ?? WebSocket.CONNECTING);
    },
    send: (text) => found?.send(text),
    close() {
      closed = true;
      found?.close();
    },
  };
}

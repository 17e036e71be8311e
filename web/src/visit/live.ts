// The live run's engine: it feeds the run from the stream, acknowledges what was rendered, and passes ops on. It knows
// when the link is down and when the server has forgotten the run; what to do about that is decided in session.ts.

import { cache, head, layer, link, loading, reachable, retryAt, run } from "./store";
import { Stream, type Listener, type Op } from "./connection";
import { invalidate } from "./clock";
import type { Run } from "../run/run";

interface Hooks {
  ready(): void; // the link is open and the run's state is known
  lost(): void; // the server does not know the run any more
}

let stream: Stream | null = null;
let hooks: Hooks = { ready: () => undefined, lost: () => undefined };
let acked = -1;
let delay: number | null = null; // ms; for tests

export function attach(current: Run, listeners: Hooks): void {
  detach();
  hooks = listeners;
  acked = current.next - 1;
  link.value = "opening";
  stream = new Stream(current.id.value, listener(current));
}

export function detach(): void {
  stream?.close();
  stream = null;
  link.value = "none";
}

export function send(op: Op): boolean {
  return stream?.send(op) ?? false;
}

/** What has been rendered is acknowledged: the newest step stands for all before it. */
export function acknowledge(): void {
  const current = run.value;
  if (current?.origin !== "live" || current.next - 1 <= acked) return;
  const step = current.next - 1;
  acked = step;
  const from = stream;
  if (delay === null) send({ op: "ack", step });
  else setTimeout(() => from === stream && send({ op: "ack", step }), delay);
}

export function delayAcks(ms: number | null): void {
  delay = ms;
}

export function retryNow(): void {
  stream?.hurry();
}

function listener(current: Run): Listener {
  let greeted = false; // whether the first state after opening has come
  return {
    next: () => current.next,
    waiting: () => current.state.value.state === "running",
    opened() {
      greeted = false;
      acked = current.next - 1;
      link.value = "open";
      reachable.value = true;
      if (loading.value !== null && loading.value.phase !== "ready")
        loading.value = { ...loading.value, phase: "ready" };
    },
    state(state) {
      current.state.value = state;
      if (!greeted) {
        greeted = true;
        if (state.cache !== cache.value) send({ op: "cache", on: cache.value });
        if (state.watched[0] !== layer.value || state.watched[1] !== head.value)
          send({ op: "watch", layer: layer.value, head: head.value });
        hooks.ready();
      }
      invalidate();
    },
    labels: ({ tokens }) => current.label(tokens),
    frame(frame) {
      current.push(frame);
      invalidate();
    },
    broken(at) {
      link.value = "broken";
      retryAt.value = at;
    },
    lost() {
      stream = null;
      link.value = "lost";
      hooks.lost();
    },
  };
}
